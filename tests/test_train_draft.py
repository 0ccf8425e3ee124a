"""Training as a stage: killed at any moment it resumes, and ends bit for bit where an undisturbed run ends."""

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.train_draft import plan

RESULTS = ("draft/model.safetensors", "draft/config.json", "state/optimizer.safetensors", "state/progress.json")


@pytest.fixture
def project(small_run: Path, tmp_path: Path) -> Path:
    """The small run, ready to train again: `straight`, three epochs from e000, is not there yet."""
    project = tmp_path / "project"
    shutil.copytree(small_run, project, ignore=shutil.ignore_patterns(".dvc", ".git", "straight*", ".scratch"))
    return project


def start(project: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "stages.train_draft", "straight"]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_and_finish(project: Path, kills: int, seed: int) -> str:
    """Let it be killed `kills` times at random moments, more and more of them past its start, then let it finish."""
    rng = random.Random(seed)
    for _ in range(kills):
        process = start(project)
        time.sleep(rng.uniform(1.0, 6.0))
        process.kill()
        process.wait()
    process = start(project)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def same_as_undisturbed(project: Path, small_run: Path) -> bool:
    places = [Path("drafts/straight") / part for part in RESULTS]
    return all((project / p).read_bytes() == (small_run / p).read_bytes() for p in places)


def test_a_killed_run_ends_where_an_undisturbed_one_does(project: Path, small_run: Path) -> None:
    kill_and_finish(project, kills=3, seed=1)
    assert same_as_undisturbed(project, small_run)
    assert not list((project / ".scratch").glob("train_draft-straight-*"))


@pytest.mark.long
def test_fifty_kills_end_where_an_undisturbed_run_does(project: Path, small_run: Path) -> None:
    for campaign in range(10):
        shutil.rmtree(project / "drafts/straight", ignore_errors=True)
        kill_and_finish(project, kills=5, seed=100 + campaign)
        assert same_as_undisturbed(project, small_run)


def test_it_resumes_rather_than_begins_again(project: Path) -> None:
    process = start(project)
    deadline = time.monotonic() + 120
    while not list((project / ".scratch").glob("train_draft-straight-*/log.json")):
        assert time.monotonic() < deadline and process.poll() is None, "no epoch was saved"
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert "resumed after epoch" in kill_and_finish(project, kills=0, seed=0)


def test_work_of_other_parameters_is_not_taken_up(project: Path) -> None:
    """The rival's caches went stale in silence; here the digest covers parameters, inputs and code."""
    process = start(project)
    while not list((project / ".scratch").glob("train_draft-straight-*/log.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    text = (project / "params.yaml").read_text()
    assert "ttt_decay: 0.8" in text
    (project / "params.yaml").write_text(text.replace("ttt_decay: 0.8", "ttt_decay: 0.7"))
    assert "resumed" not in kill_and_finish(project, kills=0, seed=0)


def test_a_plan_holds_every_row_once_and_keeps_to_the_budget() -> None:
    lengths = [5 + (37 * i) % 85 for i in range(200)]
    for epoch in range(3):
        batches = plan(lengths, 300, seed=1, epoch=epoch)
        assert sorted(i for b in batches for i in b) == list(range(200))
        assert all(len(b) * max(lengths[i] for i in b) <= 300 for b in batches)
    assert plan(lengths, 300, 1, 0) == plan(lengths, 300, 1, 0) != plan(lengths, 300, 1, 1)


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert sorted(map(len, plan([500, 10, 10], 300, seed=1, epoch=0))) == [1, 2]
