"""What a run's page says, without a server: its name, its error, the verdict of its report."""

import json
from pathlib import Path

import pytest

from pipeline import run_pages
from pipeline.dvc_output import find_error

CONCLUSION = "ERROR: failed to reproduce 'fit': failed to run: python -m stages.fit, exited with 1"
KILLED = (
    "ERROR: failed to reproduce 'replay_trees@e009': failed to run: python -m stages.replay_trees "
    '"$DVC_STAGE", exited with '
)
LESS = "set a smaller replay_trees.memory_gib in params.yaml, or end what else uses it"
NO_MEMORY_LEFT = f"killed (SIGKILL), which the kernel does where memory is short (dmesg then says so); {LESS}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["aerie: tau is 1.2, expected 6", CONCLUSION], "tau is 1.2, expected 6"),
        (["Traceback (most recent call last):", "RuntimeError: no room", CONCLUSION], "RuntimeError: no room"),
        (["fit: 100%|##########| 3/3 [00:00<00:00,  9.86it/s]", "Killed", "", CONCLUSION], "Killed"),
        (["replay: 40 rows", f"{KILLED}-9"], NO_MEMORY_LEFT),  # Bug: the first line was taken for the error
        (["replay: 40 rows", f"WARNING:{KILLED.partition(':')[2].partition(':')[2]}137"], NO_MEMORY_LEFT),
        ([], None),
    ],
)
def test_the_error_of_a_stage_is_one_line(lines: list[str], expected: list[str] | str | None) -> None:
    """Bug: a failed run's message held ten lines of log, bars among them, and the pages showed it three times."""
    assert find_error(lines) == (expected[0] if isinstance(expected, list) else expected)


def test_the_report_has_verdict_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not [*run_pages.list_report_parts()]
    run_pages.PAGE_FILE.parent.mkdir(parents=True)
    run_pages.PAGE_FILE.write_text("<p>the page</p>")
    run_pages.TABLE_FILE.write_text("tree  tau\n")
    run_pages.METRICS_FILE.write_text(json.dumps({"verdict": {"kind": "launch", "text": "Launch\nt6_4_32"}}))
    verdict, location, table = run_pages.list_report_parts()
    assert verdict == "**Launch t6_4_32**" and table == "```text\ntree  tau\n```"
    assert location == f"The whole report is {tmp_path / 'results/report/index.html'}, a file of this machine."
