"""A port for a child that binds it minutes later."""

import socket
import subprocess
import sys
from collections.abc import Iterator
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


@pytest.fixture
def three_candidates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Three ports are all there is, and the first is in use."""
    with socket.socket() as holder:
        holder.bind((free_port.HOST, 0))
        first = holder.getsockname()[1]
        monkeypatch.setattr(free_port, "FIRST_PORT", first)
        monkeypatch.setattr(free_port, "EPHEMERAL_RANGE", tmp_path / "range")
        (tmp_path / "range").write_text(f"{first + 3}\t60999\n")
        yield [first, first + 1, first + 2]


FINDS = """
import sys
from pathlib import Path
from stages.runtime import free_port
free_port.FIRST_PORT, free_port.EPHEMERAL_RANGE = int(sys.argv[1]), Path(sys.argv[2])
print(free_port.find_free_port(), flush=True)
sys.stdin.read()
"""


def test_another_process_does_not_find_it_until_this_one_ends(three_candidates: list[int], tmp_path: Path) -> None:
    """Bug: stages that start servers at once each chose among free ports; a server binds its own a minute later."""
    line = [sys.executable, "-c", FINDS, str(three_candidates[0]), str(tmp_path / "range")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        theirs = int(other.stdout.readline())
        assert theirs not in {free_port.find_free_port() for _ in range(3)}
        other.communicate("")
    assert free_port._reserve(theirs)


@pytest.mark.parametrize("found", ["1024\t65535\n", "nonsense", None])
def test_where_the_range_leaves_nothing_or_is_unknown(found: str | None, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(free_port, "EPHEMERAL_RANGE", tmp_path / "range")
    if found is not None:
        (tmp_path / "range").write_text(found)
    with socket.socket() as holder:
        holder.bind((free_port.HOST, free_port.find_free_port()))
