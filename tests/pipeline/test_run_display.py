"""A run's output for a person: a line a stage, its own output in a log, notes at once, the end of the log on a failure."""

import re
from pathlib import Path

import pytest

from pipeline import processes, run_display
from pipeline.dvc_output import DvcOutput, Outcome
from pipeline.run_display import RunDisplay, locate_log

STAGES = ("fix_data", "train_draft@e003", "report")

# As DVC 3.67.1 prints with two stages that run, one restored, in a git repository.
OUTPUT = """\
Running stage 'fix_data':
> python -m stages.fix_data
rows in 100, rows out 98
note: the set is at commit abc today
note: the set is at commit abc today
Generating lock file 'dvc.lock'
Updating lock file 'dvc.lock'

Stage 'train_draft@e003' is cached - skipping run, checking out outputs
Updating lock file 'dvc.lock'

Running stage 'report':
> python -m stages.report
Running stage 'fix_data':
draw:  45%|####5     | 9/20 [00:10<00:12,  1.02row/s]
draw: 100%|##########| 20/20 [00:20<00:00,  1.02row/s]
WARNING: the cached copy of a.csv does not have the bytes it was kept with: it is damaged
Updating lock file 'dvc.lock'

To track the changes with git, run:

\tgit add dvc.lock
Use `dvc push` to send your updates to remote storage.
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def show(text: str, status: int = 0) -> RunDisplay:
    with RunDisplay(STAGES) as display:
        reader = DvcOutput(STAGES, display.begin, display.show)
        for line in text.splitlines():
            reader(line)
        display.finish(status)
    return display


def test_a_line_a_stage_and_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    counts = show(OUTPUT).counts
    lines = [re.sub(r"\d+\.\d s", "N s", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "fix_data: note: the set is at commit abc today",
        "fix_data                N s   rows in 100, rows out 98",
        "train_draft@e003     restored",
        "report: WARNING: the cached copy of a.csv does not have the bytes it was kept with: it is damaged",
        "report                  N s",
    ]
    assert counts == {Outcome.RAN: 2, Outcome.RESTORED: 1}


def test_the_log_has_all_that_the_stage_printed_and_of_a_bar_the_last_line() -> None:
    show(OUTPUT)
    assert locate_log("report").read_text().splitlines() == [
        "Running stage 'report':",
        "> python -m stages.report",
        "Running stage 'fix_data':",
        "draw: 100%|##########| 20/20 [00:20<00:00,  1.02row/s]",
        "WARNING: the cached copy of a.csv does not have the bytes it was kept with: it is damaged",
        "Updating lock file 'dvc.lock'",
    ]
    assert not locate_log("train_draft@e003").exists()  # it printed nothing; the log of the run that made it stays


def test_without_a_terminal_a_long_stage_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: check_overfit of five drafts printed nothing for as long as it took."""
    now = [0.0]
    monkeypatch.setattr(run_display.time, "monotonic", lambda: now[0])
    with RunDisplay(STAGES) as display:
        reader = DvcOutput(STAGES, display.begin, display.show)
        reader("Running stage 'fix_data':")
        for second in range(100):
            now[0] = float(second)
            reader(f"dflash: overfit row a.0:  {second}%|####5     | {second}/100 [00:10<00:12,  1.02step/s]")
        reader("dflash: overfit row a.0: 100%|##########| 100/100 [00:20<00:00,  1.02step/s]")
        for now[0] in (125.0, 145.0):
            display.tell()
        display.finish(0)
    bars = [f"dflash: overfit row a.0 {at}%, {at}/100 [00:10<00:12,  1.02step/s]" for at in (30, 60, 90)]
    bars.append("dflash: overfit row a.0 100%, 100/100 [00:20<00:00,  1.02step/s]")  # silent since
    at_work = zip(("30.0 s", "1 min 0 s", "1 min 30 s", "2 min 5 s"), bars, strict=True)
    assert capsys.readouterr().out.splitlines()[:-1] == [
        f"fix_data: at work for {time}, {bar}" for time, bar in at_work
    ]


def test_a_bar_is_seen_when_it_is_drawn(tmp_path: Path) -> None:
    """Bug: without a terminal "0%" was shown while 64 of 120 rows were saved: a bar's line ends when the next one begins."""
    code = """import pathlib, sys, time
print("\\r 50%|#####     | 1/2 [00:01<00:01,  1.00row/s]", end="", file=sys.stderr, flush=True)
for _ in range(100):
    time.sleep(0.1)
    if pathlib.Path("seen").exists(): sys.exit()
sys.exit("nobody saw it")"""
    Path("draws.py").write_text(code)
    seen: list[str] = []
    assert processes.run_command(["draws"], seen.append, on_silence=lambda: seen and Path("seen").touch()) == 0


FAILED = """\
Running stage 'fix_data':
> python -m stages.fix_data
aerie: data/raw is empty
{}"""


def test_a_failure_shows_the_stages_own_error_and_nothing_of_dvcs(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: an error of one line came with four of DVC's."""
    end = "ERROR: failed to reproduce 'fix_data': failed to run: python -m stages.fix_data, exited with 1\n"
    assert show(FAILED.format(end), 255).failed == ["fix_data"]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("fix_data") and printed.out.endswith(" s:\n")
    assert printed.err == "  data/raw is empty\n"


def test_a_log_that_can_not_be_written_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk stops the stage by its own error; the display must not stop it first."""
    Path("logs").write_text("no folder")
    assert show(OUTPUT).failed == []
    assert "note: logs/fix_data.log not written (File exists)" in capsys.readouterr().out
