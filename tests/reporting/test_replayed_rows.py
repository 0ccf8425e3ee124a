"""Checkpoints without cells: rows of replayed tau and predicted speedup, where the replay has the workload's answers."""

from pathlib import Path

import pytest

from stages import report
from stages.cells.prediction import PredictedSpeedup
from stages.cells.replay_records import ReplayedTree
from stages.cells.table import ResultRow
from stages.params import schema
from tests.conftest import EVAL, edit_params
from tests.reporting.made_up_results import Row, make_up_spent, replayed


@pytest.mark.parametrize(("draft_sampling", "less"), [("greedy", 0.5), ("sampled", 0.25)])
def test_rows_and_predictions_above_temperature_0_are_of_the_drafts_that_cells_have(
    half_measured: schema.Params, draft_sampling: str, less: float
) -> None:
    """A chain has a replay of each kind on the same answers, and one tau beside the cells'."""
    cold = [tree for tree in ReplayedTree.read("e003") if tree.shape.name == "t8_1_9"]
    hot = {"temperature": 0.7, "top_p": 1.0}
    kinds = [hot | {"tau": cold[0].tau - 0.5}, hot | {"tau": cold[0].tau - 0.25, "draft_sampling": "sampled"}]
    path = ReplayedTree.locate("e003")
    ReplayedTree.write_csv(path, [*cold, *(cold[0].model_copy(update=kind) for kind in kinds)])
    workload = half_measured.benchmark.workloads["eval"].model_copy(update={"temperature": 0.7})
    changes = {"draft_sampling": draft_sampling, "workloads": {"eval": workload}}
    p = half_measured.model_copy(update={"benchmark": half_measured.benchmark.model_copy(update=changes)})
    report.write_report(p)
    (row,) = (r for r in ResultRow.read_table() if r.checkpoint == "e003")
    (guess,) = (r for r in PredictedSpeedup.read_table() if (r.checkpoint, r.engine) == ("e003", "torch"))
    for found in (row, guess):
        assert (found.tau, found.draft_sampling) == (pytest.approx(cold[0].tau - less), draft_sampling)
    assert row.speedup == guess.speedup and guess.temperature == 0.7


@pytest.mark.parametrize(
    ("workload", "taken"),
    [
        ({}, "cold"),
        ({"temperature": 0.7, "top_p": 0.9}, "hot"),
        ({"temperature": 0.7, "top_p": 1.0}, None),
        ({"prompts": "gsm8k"}, None),
        ({"concurrency": 8}, None),
    ],
)
def test_only_what_replay_has_answers_of_is_in_the_table(
    half_measured: schema.Params, workload: Row, taken: str | None
) -> None:
    """Other prompts, text beyond the end, and answers drawn otherwise have no replay; loads have a table of their own."""
    known = ReplayedTree.read("e003")
    hot = [tree.model_copy(update={"tau": tree.tau - 0.5, "temperature": 0.7, "top_p": 0.9}) for tree in known]
    ReplayedTree.write_csv(ReplayedTree.locate("e003"), [*known, *hot])
    edit_params(
        Path(),
        {
            "benchmark": {
                "workloads": {"eval": EVAL, "other": {**EVAL, **workload}}, "torch_workloads": ["other"],
                "checkpoints": ["e009"], "trees": ["t8_2_16"],
            }
        },
    )  # fmt: skip
    make_up_spent("prepare_prompts-other")
    p = schema.load_params()
    replays = {name: ReplayedTree.read(name) for name in p.replay_trees.checkpoints}
    rows = report._build_replayed_rows(p, replays, [])
    cold = replayed("t8_2_16", "e003")
    expected = {"cold": [cold], "hot": [cold - 0.5], None: []}[taken]
    assert [(row.workload, row.checkpoint, row.tau) for row in rows] == [("other", "e003", tau) for tau in expected]
