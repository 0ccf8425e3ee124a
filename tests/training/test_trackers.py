"""Values logged to a tracker are those that the tracker's own reader returns."""

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from stages.training import trackers


def test_tensorboard_reads_logged_values_and_a_resumed_run_replaces_lost_steps(tmp_path: Path) -> None:
    name = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(name, reason="pip install -e '.[track]' to test it")
    with chdir(tmp_path):
        with trackers.open_trackers(["tensorboard"], "e003-1234", {"learning_rate": 0.5}, 0) as log_step:
            log_step(10, {"step/loss": 3.0})
            log_step(20, {"step/loss": 2.0})
        with trackers.open_trackers(["tensorboard"], "e003-1234", {"learning_rate": 0.5}, 15) as log_step:
            log_step(20, {"step/loss": 1.5})
    events = reader.EventAccumulator(str(tmp_path / "runs/e003-1234")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/loss")] == [(10, 3.0), (20, 1.5)]


def test_wandb_keeps_a_run_offline_without_code_or_console(tmp_path: Path) -> None:
    """In a process of its own: wandb starts a service, and looks at the environment once."""
    pytest.importorskip("wandb", reason="pip install -e '.[track]' to test it")
    story = (
        "from stages.training import trackers\n"
        "with trackers.open_trackers(['wandb'], 'e003-1234', {'learning_rate': 0.5}, 0) as log_step:\n"
        "    log_step(10, {'step/loss': 3.0})\n"
    )
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": path, "A_SECRET": "hunter2-never-sent"}
    completed = subprocess.run([sys.executable, "-c", story], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    (run,) = (tmp_path / "runs/wandb").glob("offline-run-*/run-e003-1234.wandb")
    written = b"".join(f.read_bytes() for f in run.parent.rglob("*") if f.is_file())
    assert b"step/loss" in written and b"learning_rate" in written
    assert b"hunter2" not in written and not list(run.parent.rglob("*.py"))


def test_a_tracker_that_does_not_start_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with chdir(tmp_path), pytest.raises(ValueError, match=r"report_to names wandb, which is not installed; run: pip"):
        trackers.open_trackers(["wandb"], "x", {}, 0).__enter__()
