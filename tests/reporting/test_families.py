"""Families side by side: a page of made-up replays of EAGLE-3 and of a block draft, and what is offered for launch."""

import json
import re
from pathlib import Path

import pytest

from stages import report
from stages.cells.prediction import PredictedSpeedup, read_launch
from stages.cells.replay_records import ReplayedTree
from stages.params import schema
from stages.params.families import DFLASH, SUFFIX, DraftKind
from stages.params.tree_shape import TreeShape
from stages.reporting import families
from tests.conftest import edit_params
from tests.reporting.made_up_block_draft import NAME, add_block_draft
from tests.reporting.made_up_results import made_up_project, words, write_cell
from tests.reporting.test_costs import simulate
from tests.served_cells import made_up as served_cell
from tests.served_cells import point, replayed_tree
from tests.torch_cells import timed_cell


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
    lines = families.choose_family_lines(replays, given, guesses)
    chosen = {(line.checkpoint, line.kind): line.tree.shape.name for line in lines}
    assert chosen["a", "chain"] == "t3_1_4" and chosen["b", "chain"] == "t10_1_11"
    assert {chosen[key] for key in chosen if key[0] == "a" and key[1] != "chain"} == {"t5_4_16"}
    assert {chosen[key] for key in chosen if key[0] == "b" and key[1] != "chain"} == {"t8_4_16"}, "by tau"


def test_verdict_terminal_page_and_launch_take_the_measured_speedup(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: families stood side by side by predictions, above a verdict and cells that measured another tree as faster.

    On the torch engine and on a server the tree that is predicted to be the fastest is measured at 0.67x, another at 1.5x.
    """
    simulate(trees=("t3_1_4", "t5_1_6", "t8_1_9", "t5_4_16", "t10_2_32"), caps=(1, 8))
    report.main()
    guesses = [row for row in PredictedSpeedup.read_table() if row.checkpoint == "e009" and row.topk == 1]
    torch = max((row for row in guesses if row.engine == "torch"), key=lambda row: row.preference).shape.name
    served = max((row for row in guesses if row.engine == "sglang"), key=lambda row: row.preference).shape.name
    other = "t8_1_9"
    assert other not in (torch, served)
    edit_params(Path(), {"benchmark": {"checkpoints": ["e009"], "trees": [torch, other]}})
    for tree, speedup in ((torch, 0.67), (other, 1.5)):
        timed_cell(tree, speedup, speedup - 0.05, speedup + 0.05).write()
    trees = {"workloads": ["load"], "checkpoints": ["e009"], "trees": [served, other]}
    edit_params(Path(), {"benchmark_served": trees})
    write_cell(served_cell("load", points=[point(100, cap, 0.01, repeats=3) for cap in (1, 8)]))
    for tree, speedup in ((served, 0.67), (other, 1.5)):
        points = [point(100, cap, 0.01 / speedup, 3.0, repeats=3) for cap in (1, 8)]
        write_cell(served_cell("load", "e009", tree, points))
    capsys.readouterr()
    report.main()
    advised = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Launch ")]
    assert len(advised) == 2 and all(line.startswith(f"Launch {other} with e009") for line in advised)
    assert json.loads(Path("results/metrics.json").read_text())["verdict"]["text"] == advised[0]
    launches = [row for row in read_launch() if row.engine == "sglang"]
    assert all(row.enable and row.measured and row.shape.name == other for row in launches) and len(launches) == 2
    page = words(report.PAGE_FILE.read_text())
    assert re.search(r"Families side by side .* e009EAGLE-3chain8_1_9 [^×]*1\.50× m ", page)


def test_checkpoints_are_compared_over_the_trees_that_all_have(project: schema.Params) -> None:
    """Deep trees have the higher tau: with them, EAGLE-3's mean would rise by trees that the block can't grow."""
    report.main()
    metrics = json.loads(Path("results/metrics.json").read_text())
    assert metrics["best_checkpoint"] == NAME
    replays = {name: ReplayedTree.read(name) for name in project.replay_trees.checkpoints}
    shared = {row.shape for row in replays[NAME]} & {row.shape for row in replays["e009"]}
    means = {name: [row.tau for row in rows if row.shape in shared] for name, rows in replays.items()}
    for name, taus in means.items():
        assert metrics["checkpoints"][name]["mean_replay_tau"] == pytest.approx(sum(taus) / len(taus))
    assert f"over {len(shared)} trees it has the highest mean tau" in words(report.PAGE_FILE.read_text())


def test_a_lookup_is_compared_at_the_chains_that_all_have() -> None:
    """Without a shape in common each checkpoint's mean would be of other trees."""
    trees = {"e009": ("t3_1_4", "t3_2_6", "t5_1_6"), "suffix": ("x8_3", "x16_3", "x8_4")}
    replays = {name: [replayed_tree(tree, 2.0, checkpoint=name) for tree in trees[name]] for name in trees}
    found = {name: [tree.tree for tree in shared] for name, shared in families.select_shared_trees(replays).items()}
    assert found == {"e009": ["t3_1_4"], "suffix": ["x8_3", "x16_3"]}
    kinds = {"e009": DraftKind(), "suffix": DraftKind(SUFFIX)}
    (line,) = (x for x in families.choose_family_lines(replays, kinds, []) if x.checkpoint == "suffix")
    assert (line.kind, line.tree.tree) == ("chain", "x8_3")
