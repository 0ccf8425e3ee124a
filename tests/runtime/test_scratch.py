"""Unfinished work is taken up by the very same work only, and forgotten once it is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.runtime import scratch
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_equal_work_has_an_equal_scratch_folder_and_other_work_another() -> None:
    """Names, numbers and the order of inputs count; the order of keys in a section doesn't."""
    work = ("train_draft-e003", {"seed": 1, "lr": 0.1}, ["abc", "def"])
    assert scratch.locate_scratch(*work) == scratch.locate_scratch(
        "train_draft-e003", {"lr": 0.1, "seed": 1}, ["abc", "def"]
    )
    others = [
        ("train_draft-e009", *work[1:]), (work[0], {"seed": 2, "lr": 0.1}, work[2]),
        (work[0], {"seed": 1, "lr": 0.1, "more": None}, work[2]), (work[0], work[1], ["def", "abc"]),
        (work[0], work[1], ["abcdef"]), (work[0], work[1]),
    ]  # fmt: skip
    folders = [scratch.locate_scratch(*o) for o in [work, *others]]
    assert len(set(folders)) == len(folders)
    assert all(
        p.parent == Path(".scratch") and p.name.startswith(w[0] + "-")
        for p, w in zip(folders, [work, *others], strict=True)
    )


def test_a_kill_while_work_is_removed_leaves_none_to_go_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: half of a finished work was left, and the next run called it broken (a count of rows without its file)."""
    work = scratch.locate_scratch("sample_target", {}, [])
    work.mkdir(parents=True)
    (work / "part").touch()

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            scratch.remove_scratch(work)
    assert not work.exists() and [file.name for file in scratch.SCRATCH_FOLDER.glob(".sample_target-*/*")] == ["part"]
    scratch.remove_scratch(work)
    assert not list(scratch.SCRATCH_FOLDER.glob("*sample_target*"))


HOLDER = """
import sys, time
from stages.runtime import scratch
with scratch.lock_stage(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(stage: str, **more: str) -> subprocess.Popen[str]:
    """Start a process that works at the stage, or is refused; it is at work once it has said so."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | more
    command = [sys.executable, "-c", HOLDER, stage]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_process_at_a_stage_is_refused_until_the_first_has_ended() -> None:
    """Bug: after `kill -9` of dvc the stage worked on, and the next run took up the same folder beside it."""
    first = hold("benchmark@eval-e009-t5_1_6")
    assert first.stdout and first.stdout.readline() == "held\n"
    refused = rf"e009-t5_1_6 is at work already, in process {first.pid}"
    with pytest.raises(ValueError, match=refused), scratch.lock_stage("benchmark@eval-e009-t5_1_6"):
        pass
    with scratch.lock_stage("benchmark@eval-e009-t8_2_16"):
        pass  # another
    first.kill()
    first.wait()
    with scratch.lock_stage("benchmark@eval-e009-t5_1_6"):
        pass
