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
    for _ in range(50):
        assert free_port.FIRST_PORT <= free_port.find_free_port() < first


def test_it_is_free_and_not_one_of_those_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind((free_port.HOST, 0))
        held = holder.getsockname()[1]
        monkeypatch.setattr(free_port, "FIRST_PORT", held)
        monkeypatch.setattr(free_port, "EPHEMERAL_RANGE", tmp_path / "range")
        (tmp_path / "range").write_text(f"{held + 3}\t60999\n")  # three candidates: one in use, one taken
        assert free_port.find_free_port({held + 1}) not in {held, held + 1}


@pytest.mark.parametrize("found", ["1024\t65535\n", "nonsense", None])
def test_where_the_range_leaves_nothing_or_is_unknown(found: str | None, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(free_port, "EPHEMERAL_RANGE", tmp_path / "range")
    if found is not None:
        (tmp_path / "range").write_text(found)
    with socket.socket() as holder:
        holder.bind((free_port.HOST, free_port.find_free_port()))
