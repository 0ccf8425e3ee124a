"""Families side by side: a page of made-up replays of EAGLE-3 and of a block draft, and what is offered for launch."""

import json
from pathlib import Path

import pytest

from stages import report
from stages.cells import replay_records
from stages.cells.prediction import PredictedSpeedup
from stages.params import schema
from stages.params.families import DFLASH, DraftKind
from stages.params.tree_shape import TreeShape
from stages.reporting import families
from tests.reporting.made_up_block_draft import NAME, add_block_draft
from tests.reporting.made_up_results import made_up_project, words
from tests.served_cells import replayed_tree


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Params:
    return add_block_draft(made_up_project(tmp_path, monkeypatch))


def test_the_tree_of_each_kind_is_the_fastest_one_where_speedups_are_predicted() -> None:
    """Bug: EAGLE-3's chain of highest tau, its slowest, stood beside a block's only one: 1.01 instead of 1.31."""
    taus = {"t3_1_4": 3.0, "t10_1_11": 4.0, "t5_4_16": 4.2, "t8_4_16": 4.4}
    replays = {name: [replayed_tree(tree, tau, tau - 0.1, tau + 0.1) for tree, tau in taus.items()] for name in "ab"}
    shapes = {tree: TreeShape.parse(tree) for tree in taus}
    guesses = [
        PredictedSpeedup(
            engine="torch", workload=None, max_new_tokens=None, temperature=0.0, checkpoint="a", **vars(shapes[tree]),
            concurrency=1, tau=taus[tree], tau_low=None, tau_high=None, C=taus[tree] / speedup, speedup=speedup, low=None,
            high=None,
        )
        for tree, speedup in {"t3_1_4": 1.31, "t10_1_11": 1.01, "t5_4_16": 1.5, "t8_4_16": 1.2}.items()
    ]  # fmt: skip
    given = {"a": DraftKind(), "b": DraftKind(DFLASH, 10)}
    page = families.build_families_page(replays, given, guesses)
    assert page
    chosen = {(line.checkpoint, line.kind): line.tree.shape.name for line in page.lines}
    assert chosen["a", "chain"] == "t3_1_4" and chosen["b", "chain"] == "t10_1_11"
    assert {chosen[key] for key in chosen if key[0] == "a" and key[1] != "chain"} == {"t5_4_16"}
    assert {chosen[key] for key in chosen if key[0] == "b" and key[1] != "chain"} == {"t8_4_16"}, "by tau"


def test_checkpoints_are_compared_over_the_trees_that_all_have(project: schema.Params) -> None:
    """Deep trees have the higher tau: with them, EAGLE-3's mean would rise by trees that the block can't grow."""
    report.main()
    metrics = json.loads(Path("results/metrics.json").read_text())
    assert metrics["best_checkpoint"] == NAME
    replays = {name: replay_records.read_replay(name) for name in project.replay_trees.checkpoints}
    shared = {row.shape for row in replays[NAME]} & {row.shape for row in replays["e009"]}
    means = {name: [row.tau for row in rows if row.shape in shared] for name, rows in replays.items()}
    for name, taus in means.items():
        assert metrics["checkpoints"][name]["mean_replay_tau"] == pytest.approx(sum(taus) / len(taus))
    assert f"over {len(shared)} trees it has the highest mean tau" in words(report.PAGE_FILE.read_text())
