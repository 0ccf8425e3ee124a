"""How a stage ends that its user stopped, or that met a machine without what it needs: one line, and a status."""

import errno
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from tqdm import tqdm

from pipeline import cli
from stages.runtime import scratch
from stages.telemetry import run_stage
from tests.conftest import ROOT, copy_project


class OutOfMemoryError(RuntimeError):
    """As torch.cuda.OutOfMemoryError, which is known by its name."""


ERRORS = [
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has"), "train_draft@e009 is out of memory (CUDA"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "set a smaller train_draft.batch_tokens"),
    (RuntimeError("Found no NVIDIA driver on your system. Please"), "set target.device: cpu in params.yaml"),
    (OSError(errno.ENOSPC, "No space left on device", "results/x"), "the disk is full, or its quota used: "),
    (ValueError("expected 5, found 6"), "expected 5, found 6"),
]  # fmt: skip


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "stages/train_draft.py"), "e009"])
    monkeypatch.setattr(scratch, "_stage", None)


def fail(error: BaseException) -> object:
    """Run a stage that raises `error` -> the status or message it exits with."""

    def main(name: str) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_stage.run_stage(main)
    return ended.value.code


@pytest.mark.parametrize(("error", "line"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
def test_what_the_machine_lacks_is_one_line_with_what_to_set(started: None, error: Exception, line: str) -> None:
    """Bug: out of memory, a missing GPU and a file of another user ended in tracebacks."""
    message = fail(error)
    assert isinstance(message, str) and message.startswith("aerie: ") and "\n" not in message and line in message


HOSTILE = "a\n\x1b]0;b\x07\x9b31m\rc\u202e\udcff"


def test_words_of_others_reach_the_terminal_as_text(started: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: names of files, columns and tensors, and servers' errors, set the terminal's title, or forged lines of ours."""
    message = fail(ValueError(f"{HOSTILE}: expected 5"))
    with pytest.raises(SystemExit) as ended:
        cli.run_command_line(["use", HOSTILE])
    with tqdm(total=2, file=sys.stderr) as bar:
        bar.update()
        print(f"note: no row of {HOSTILE} is kept", Path(HOSTILE))
    print(*["a", HOSTILE], sep="\n", file=sys.stderr)
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and captured.err.count("\n") == 3 and "\r" in captured.err
    for text in (message, ended.value.code, captured.out, captured.err.replace("\r", "")):
        assert r"a\n\x1b]0;b\x07\x9b31m\rc\u202e\udcff" in str(text) and str(text).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ("train_draft@e009", "train_draft.batch_tokens"),
        ("benchmark@eval-e009-t8_2_16", "concurrency or max_new_tokens of the workload"),
        ("benchmark_served_baseline@sglang-eval", "benchmark_served.servers.*.mem_fraction"),
    ],
)
def test_torchs_own_error_of_a_real_allocation_names_the_key_to_lower(
    started: None, monkeypatch: pytest.MonkeyPatch, stage: str, key: str
) -> None:
    """The allocator refuses a petabyte on any machine. What the stage had in memory is gone before the process ends.

    Bug: the error kept it alive, so that torch's function at the exit found no memory either: a traceback below our line.
    """
    import torch

    name, _, words = stage.partition("@")
    monkeypatch.setattr(sys, "argv", [str(ROOT / f"stages/{name}.py"), *([stage] if words else [])])
    monkeypatch.setattr(run_stage, "split_stage_name", lambda words: [])
    kept: list[weakref.ref[object]] = []

    def main() -> None:
        held = torch.zeros(1)
        kept.append(weakref.ref(held))
        torch.empty(1 << 50)

    with pytest.raises(SystemExit) as ended:
        run_stage.run_stage(main)
    message = str(ended.value.code)
    assert (
        message.startswith(f"aerie: {stage} is out of memory (") and "\n" not in message and f"smaller {key}" in message
    )
    assert ended.value.__context__ is None and kept[0]() is None


def test_ctrl_c_says_where_the_stage_goes_on(started: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a traceback through torch, and no word on what is kept."""
    assert fail(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "aerie: train_draft@e009 stopped; run again to go on from its beginning\n"

    def main(name: str) -> None:
        scratch.note_progress("after epoch 3")
        scratch.note_progress("after epoch 4")
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_stage.run_stage(main)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "aerie: train_draft@e009 stopped; run again to go on after epoch 4\n"
    assert scratch.list_notes(time.time() + 60) == {}  # an older one is of another run
    run_stage.run_stage(lambda name: scratch.note_progress("after epoch 5"))
    assert scratch.list_notes(0) == {}  # it has ended well


@pytest.mark.parametrize("wait_s", [0.05, 1.2])
def test_ctrl_c_at_any_time_of_a_stage_prints_no_traceback(tmp_path: Path, wait_s: float) -> None:
    """Bug: Ctrl-C while torch or polars is imported printed their frames, and each of fix_data's processes printed its own."""
    copy_project(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("AERIE_FORK_SERVER", None)
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "stages.fix_data"],
        cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as stage:  # fmt: skip
        assert stage.stderr
        lines = []
        for line in stage.stderr:
            lines.append(line)
            if line.rstrip().endswith("| stages"):  # from here on Ctrl-C is ours
                break
        time.sleep(wait_s)
        os.killpg(stage.pid, signal.SIGINT)
        rest = [line for line in stage.stderr if not line.startswith("import time:")]
        status = stage.wait(60)
        if status in (
            0,
            -signal.SIGINT,
        ):  # done, or done and without Python's signal handlers, which end before the process
            assert not rest, rest
        else:
            assert status == 130 and len(rest) == 1 and rest[0].startswith("aerie: "), (status, rest)
