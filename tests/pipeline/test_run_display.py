"""A run's output for a person: a line a stage, its own output in a log, notes at once, the end of the log on a failure."""

import re
from pathlib import Path

import pytest

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
