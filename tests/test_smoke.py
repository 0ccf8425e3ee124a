"""The whole graph, small: every stage runs, the table is there, and what is replayed is what was decoded."""

import csv
import itertools
import json
import re
from pathlib import Path

import polars as pl
import pytest

from stages.cells.timing_grid import TimingGrids
from stages.reporting.timing_noise import find_grid_remarks
from tests.conftest import SMALL, dvc

COLUMNS = [
    "workload", "checkpoint", "tree", "num_steps", "topk", "num_draft_tokens", "tau", "tau_low", "tau_high",
    "accept_rate", "ttft_mean_s", "e2e_mean_s", "output_throughput", "speedup", "speedup_low", "speedup_high",
    "identical_share",
]  # fmt: skip


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_table_has_a_row_for_every_cell(small_run: Path) -> None:
    rows = [r for r in table(small_run / "results/benchmark.csv") if r["source"] == "measured"]
    assert [r["tree"] for r in rows] == SMALL["benchmark"]["trees"]
    assert set(COLUMNS) | {"engine"} <= set(rows[0])
    for r in rows:
        assert float(r["identical_share"]) == 1.0
        assert float(r["accept_rate"]) == (float(r["tau"]) - 1) / int(r["num_steps"])
        assert float(r["tau_low"]) <= float(r["tau"]) <= float(r["tau_high"])
        assert float(r["speedup_low"]) <= float(r["speedup"]) <= float(r["speedup_high"])


def test_the_table_has_a_row_for_every_tree_of_a_replayed_checkpoint(small_run: Path) -> None:
    """`straight` has e003's weights, and e003's cells decode the whole eval split: the taus are equal to the bit.

    The ends of their intervals are sums over the prompts in another order.
    """
    rows = table(small_run / "results/benchmark.csv")
    count = len(SMALL["benchmark"]["trees"])
    measured, replayed = rows[:count], rows[count:]
    assert [(r["source"], r["checkpoint"]) for r in replayed] == [("replayed", "straight")] * count
    for name in ("tree", "tau", "accept_rate"):
        assert [r[name] for r in replayed] == [r[name] for r in measured], name
    for name in ("tau_low", "tau_high"):
        assert [float(r[name]) for r in replayed] == pytest.approx([float(r[name]) for r in measured], rel=1e-12), name
    grid = TimingGrids.read_json(small_run / "results/cost/torch-e000.json", "time_cycles@torch-e000").grids[0]
    predicted = (
        [] if find_grid_remarks([grid]) else ["t5_1_6"]
    )  # a busy machine; the others are outside the timing grid
    assert [r["tree"] for r in replayed if r["speedup"]] == predicted
    assert {r["e2e_mean_s"] for r in replayed} == {""}


def test_replay_equals_live_decoding_as_integers(small_run: Path) -> None:
    """Cells decode every prompt of the eval split here, so accepted drafts and cycles must be replay's own."""
    rows = table(small_run / "results/replay/e003.csv")
    assert [r["temperature"] for r in rows] == ["0.0"] * (len(rows) // 2) + ["0.7"] * (len(rows) // 2)
    replayed = {(r["num_steps"], r["topk"], r["num_draft_tokens"]): r for r in rows if r["temperature"] == "0.0"}
    for name in SMALL["benchmark"]["trees"]:
        cell = json.loads((small_run / f"results/cells/torch/eval-e003-{name}.json").read_text())
        [point] = cell["points"]
        live = (sum(r["cycles"] for r in point["requests"]), sum(r["accepted"] for r in point["requests"]))
        histogram = point["acceptance"]["histogram"]
        row = replayed[tuple(name[1:].split("_"))]
        assert (int(row["cycles"]), int(row["accepted"])) == live
        assert live[1] > 0, "nothing was accepted, so nothing was compared"
        least = [sum(histogram[d:]) for d in range(len(histogram))]  # cycles with d drafts or more
        shares = [f"{here / ahead:.4f}" for ahead, here in itertools.pairwise(least) if ahead]
        assert row["acceptance"].split() == shares
        assert histogram and sum(i * n for i, n in enumerate(histogram)) == live[1]


def test_rows_add_up_at_every_stage(small_run: Path) -> None:
    fix = json.loads((small_run / "results/fix_report.json").read_text())
    assert fix["rows_in"] == fix["clean"] + fix["repaired"] + fix["dropped"] == 2000
    sampled = json.loads((small_run / "results/sample_report.json").read_text())
    fixed = pl.read_parquet(small_run / "data/fixed/train.parquet")["messages"].to_list()
    answers = sum(m["role"] == "assistant" for messages in fixed for m in messages)
    answers += sum(messages[-1]["role"] != "assistant" for messages in fixed)  # questions that the target is to answer
    assert sampled["not_asked"]["train"] == answers - SMALL["sample_target"]["train_rows"]
    for name in ("sample_report", "hiddens_report"):
        report = json.loads((small_run / f"results/{name}.json").read_text())
        assert report["rows_in"] == report["rows_out"] + sum(report["dropped"].values()) > 0


def test_two_segments_are_bit_for_bit_one_long_one(small_run: Path) -> None:
    """e001 then e003 against three epochs straight: weights, moments and position."""
    for part in ("draft/model.safetensors", "state/optimizer.safetensors", "state/progress.json"):
        assert (small_run / "drafts/e003" / part).read_bytes() == (small_run / "drafts/straight" / part).read_bytes()


def test_nothing_runs_twice(small_run: Path) -> None:
    again = dvc(small_run, "repro")
    assert again.returncode == 0, again.stderr
    assert re.findall(r"Running stage '(.+)'", again.stdout) == ["inputs"]
