"""A report's origin and cost, and the spread of latencies: against git, sums by hand, and Python's own quantiles."""

import hashlib
import subprocess
from pathlib import Path

from stages import report
from stages.cells.cell import Cell
from stages.cells.table import ResultRow
from stages.params import schema
from stages.reporting import provenance
from stages.telemetry import stage_log
from tests.reporting.made_up_results import words
from tests.test_sharing import git


def run(seconds: float, joules: float | None, *gpus: str) -> stage_log.StageRun:
    return stage_log.StageRun("", 0, 1, {}, seconds, list(gpus), joules)


def cell(engine: str, seconds: float, joules: float | None, *gpus: str) -> Cell:
    return Cell.model_construct(engine=engine, workload="eval", seconds=seconds, gpus=list(gpus), joules=joules)


def test_sums_are_those_by_hand() -> None:
    cells = [cell("torch", 10, 100.0, "A") for _ in range(3)] + [cell("sglang", 5, None, "B", "B")]
    stages = {"fix_data": run(2, None), "train_draft@e003": run(100, 3600.0, "A", "A")}
    *took, total = provenance.summarise_stage_runs(stages, cells)
    assert [(line.stage, line.runs, line.seconds, line.gpus, line.joules) for line in took] == [
        ("fix_data", 1, 2, "", None),
        ("train_draft@e003", 1, 100, "2 x A", 3600.0),
        ("benchmark, eval", 3, 30, "1 x A", 300.0),
        ("benchmark_served, sglang, eval", 1, 5, "2 x B", None),
    ]
    assert (total.seconds, total.gpu_seconds, total.is_counted) == (137, 200 + 30 + 10, True)
    assert total.joules is None  # one of the GPUs counted nothing: a sum would be too low
    assert provenance.summarise_stage_runs(stages, cells[:3])[-1].joules == 3900.0


def test_the_page_names_its_commit_what_differs_from_it_and_the_tables_beside_it(made_up: schema.Params) -> None:
    report.main()
    assert "no commit: this is no git repository" in report.PAGE_FILE.read_text()
    git(Path(), "init", "-q")
    git(Path(), "add", "params.yaml")
    git(Path(), "commit", "-qm", "one")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    report.main()
    assert f"written atcommit {head} (dvc.lock" in words(report.PAGE_FILE.read_text())
    with Path("params.yaml").open("a") as file:
        file.write("# a remark\n")
    report.main()
    text = words(report.PAGE_FILE.read_text())
    assert f"written atcommit {head}, with changes in params.yaml (dvc.lock" in text
    for file in (ResultRow.TABLE, report.REPLAY_TABLE, report.METRICS_FILE):
        assert f"{file}{hashlib.sha256(file.read_bytes()).hexdigest()}" in text
    assert f"draft e003{'ab' * 32}" in text
