"""A report's origin and cost, and the spread of latencies: against git, sums by hand, and Python's own quantiles."""

import hashlib
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from stages import report
from stages.cells import table
from stages.cells.cell import Cell
from stages.cells.table import ResultRow
from stages.params import schema
from stages.reporting import latencies, provenance
from stages.telemetry import stage_log
from tests.conftest import EVAL
from tests.reporting.made_up_results import TREES, make_up_served, make_up_spent, serve, words
from tests.test_sharing import git


def run(seconds: float, joules: float | None, *gpus: str) -> stage_log.StageRun:
    return stage_log.StageRun("", 0, 1, {}, seconds, list(gpus), joules)


def cell(engine: str, seconds: float, joules: float | None, *gpus: str) -> Cell:
    return Cell.model_construct(engine=engine, workload="eval", seconds=seconds, gpus=list(gpus), joules=joules)


def test_sums_are_those_by_hand() -> None:
    cells = [cell("torch", 10, 100.0, "A") for _ in range(3)] + [cell("sglang", 5, None, "B", "B")]
    stages = {"fix_data": run(2, None), "train_draft@e003": run(100, 3600.0, "A", "A")}
    took = provenance.summarise_stage_runs(stages, cells)
    assert [(line.stage, line.runs, line.seconds, line.gpus, line.joules) for line in took.lines] == [
        ("fix_data", 1, 2, "", None),
        ("train_draft@e003", 1, 100, "2 x A", 3600.0),
        ("benchmark, eval", 3, 30, "1 x A", 300.0),
        ("benchmark_served, eval", 1, 5, "2 x B", None),
    ]
    assert (took.all.seconds, took.all.gpu_seconds, took.counted) == (137, 200 + 30 + 10, True)
    assert took.all.joules is None  # one of the GPUs counted nothing: a sum would be too low
    assert provenance.summarise_stage_runs(stages, cells[:3]).all.joules == 3900.0


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


def test_what_a_stage_took_is_shown_where_it_ran_here(made_up: schema.Params) -> None:
    make_up_spent("train_draft@e003", seconds=5432.1, gpus=("NVIDIA H200", "NVIDIA H200"), joules=7100000.0)
    report.main()
    text = re.sub(r"(\s|<[^>]+>)+", " ", report.PAGE_FILE.read_text())
    assert "train_draft@e003 1 1 h 30 min 2 x NVIDIA H200 1.97 kWh" in text
    assert "3 h 01 min of GPUs, 1.97 kWh" in text
    stage_log.LOG_FILE.unlink()
    report.main()
    assert "train_draft@e003 1 1 h 30 min" not in re.sub(r"(\s|<[^>]+>)+", " ", report.PAGE_FILE.read_text())


def summarise(*cells: Cell) -> latencies.LatencyGroup:
    (group,) = latencies.summarise_latencies(table.join_lines(cells, {}, []))
    return group


def test_percentiles_are_those_of_the_answers(made_up: schema.Params) -> None:
    group = summarise(*(Cell.read("torch", "eval", "e003", tree) for tree in made_up.benchmark.trees))
    assert [row.tree for row in group.rows][-1] == "plain decoding" and len(group.plots) == 3
    spread = [0.1 * (n + 1) for n in range(12)]
    found = Cell.read("torch", "eval", "e003", "t8_2_16")
    for request, seconds in zip(found.points[0].requests, spread, strict=True):
        request.e2e_s, request.ttft_s, request.tpot_s = seconds, seconds / 10, None
    row = summarise(found).rows[0]
    hundredths = statistics.quantiles(spread, n=100, method="inclusive")
    by_hand = [hundredths[share - 1] for share in latencies.PERCENTILES]
    assert row.answers == 12 and row.percentiles["tpot_s"] is None  # as of answers of one token
    assert row.percentiles["e2e_s"] == pytest.approx(by_hand)
    assert row.percentiles["ttft_s"] == pytest.approx([100 * value for value in by_hand])


def test_requests_of_the_heaviest_load_are_shown_and_failed_ones_are_not(made_up: schema.Params) -> None:
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}})
    make_up_served("code")
    cells = [Cell.read("sglang", "code"), Cell.read("sglang", "code", "e009", TREES[0])]
    requests = cells[1].points[0].requests
    requests[0].failed = "timeout"
    group = summarise(*cells)
    assert group.about == "code, checkpoint e009, sglang, 200 tokens, concurrency 64"
    assert [(row.tree, row.answers) for row in group.rows] == [
        ("5_1_6 (5_1_5)", len(requests) - 1),
        ("plain decoding", len(requests)),
    ]
    values = [1000 * (request.ttft_s or 0.0) for request in requests[1:]]
    assert (group.rows[0].percentiles["ttft_s"] or [])[1] == pytest.approx(statistics.median(values))
