"""Servers start together and are measured one at a time, over processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from stages.measuring import measurement_lock

# Each stage writes what it does to one file: starts, is ready when the others have started too, measures.
STAGE = """
import sys, time
from pathlib import Path
from stages.measuring import measurement_lock
log, name, stages = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def tell(word):
    with log.open("a") as file:
        file.write(f"{word} {name}\\n")
with measurement_lock.start_server():
    tell("starts")
    while log.read_text().count("starts") < stages:
        time.sleep(0.01)
    tell("ready")
with measurement_lock.measure_server():
    tell("measures")
    time.sleep(0.05)
    tell("measured")
"""


def test_servers_start_together_and_are_measured_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    log = tmp_path / "log"
    log.touch()
    words = [sys.executable, "-c", STAGE, str(log)]
    stages = [subprocess.Popen([*words, name, "3"]) for name in "abc"]
    assert [stage.wait(60) for stage in stages] == [0, 0, 0]
    events = log.read_text().splitlines()
    assert {line.split()[0] for line in events[:3]} == {"starts"}
    measured = [line for line in events if line.startswith("measure")]
    assert events[6:] == measured, "nobody was measured while another started"
    assert all(
        first.split()[1] == second.split()[1] for first, second in zip(measured[::2], measured[1::2], strict=True)
    )


def test_nothing_starts_while_a_server_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_lock, "open_user_folder", lambda *_: tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path.parent))
    with measurement_lock.measure_server():
        assert not measurement_lock.is_free("measuring")
    assert measurement_lock.is_free("measuring")
    with measurement_lock.start_server():
        assert not measurement_lock.is_free("starting")
