"""A port for a child that binds it minutes later."""

import socket
from pathlib import Path

import pytest

from stages.runtime import free_port


def test_no_outgoing_connection_takes_it() -> None:
    """Bug: ports came from the ephemeral range; a connection of another process held one when SGLang bound it after 100 s."""
    first = free_port.read_first_ephemeral()
    if first <= free_port.FIRST_PORT:
        pytest.skip(f"the ephemeral range of this machine begins at {first}")
    found = [free_port.find_free_port() for _ in range(50)]
    assert all(free_port.FIRST_PORT <= port < first for port in found) and len(set(found)) == 50


@pytest.mark.parametrize("found", ["1024\t65535\n", "nonsense", None])
def test_where_the_range_leaves_nothing_or_is_unknown(found: str | None, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(free_port, "EPHEMERAL_RANGE", tmp_path / "range")
    if found is not None:
        (tmp_path / "range").write_text(found)
    with socket.socket() as holder:
        holder.bind((free_port.HOST, free_port.find_free_port()))
