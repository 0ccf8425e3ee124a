"""Families side by side: a page of made-up replays of EAGLE-3 and of a block draft, and what is offered for launch."""

import json
import re
from pathlib import Path

import pytest

from stages import report
from stages.cells import prediction, replay_records
from stages.cells.prediction import PredictedSpeedup
from stages.cells.replay_records import ReplayedTree
from stages.params import schema
from stages.params.families import DFLASH, TORCH_ONLY, DraftKind
from stages.params.tree_shape import TreeShape
from stages.reporting import families
from tests.reporting.made_up_block_draft import CHAIN, NAME, add_block_draft, add_timing, measure_block_trees
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


def read_table(page: str, heading: str = "Families side by side") -> list[list[str]]:
    part = page[page.index(heading) :]
    part = part[: part.index("</table>")]
    return [[words(cell).strip() for cell in re.split("</t[dh]>", row)] for row in part.split("<tr>")[2:]]


def test_without_a_timing_grid_of_its_own_a_block_has_no_prediction_and_a_reason(project: schema.Params) -> None:
    report.main()
    page = report.PAGE_FILE.read_text()
    assert (
        f"{NAME}: the torch engine has timed no draft of its shapes, so there are no predictions by its costs and no flags; "
        "add it to time_trees.checkpoints"
    ) in words(page)
    rows = [row for row in read_table(page) if row[0].startswith(NAME)]
    assert rows and all("–" in row for row in rows)
    assert all(row.checkpoint != NAME for row in prediction.read_launch())


def test_families_stand_side_by_side(project: schema.Params) -> None:
    add_timing()
    report.main()
    table = read_table(report.PAGE_FILE.read_text())
    by_family = {row[0]: row[1] for row in table}
    assert by_family == {"e003": "EAGLE-3", "e009": "EAGLE-3", NAME: "DSpark"}
    own = [row for row in table if row[0] == NAME]
    assert own[0][2] == "chain" and own[0][3].startswith("5_1_6") and own[0][6] == "SGLang, vLLM"
    assert len(own) > 1 and {row[6] for row in own[1:]} == {TORCH_ONLY}
    assert {row[6] for row in table if row[0] == "e009" and row[2] != "chain"} == {"SGLang"}
    assert all("×" in row[5] for row in own)
    assert prediction.read_launch() == []  # no serving engine was timed


def test_measured_trees_that_no_engine_runs_are_marked_and_not_advised(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_block_trees(project)
    report.main()
    printed, page = capsys.readouterr().out, report.PAGE_FILE.read_text()
    assert f"checkpoint {NAME} (DSpark)" in printed and "checkpoint e003\n" in printed
    assert re.search(r"^3_2_8 \+ ", printed, re.M) and re.search(r"^5_1_6 \(5_1_5\)  ", printed, re.M)
    reason = (
        "torch engine only: of a DSpark draft, SGLang and vLLM run the chain of the whole block alone, 5_1_6 (5_1_5)"
    )
    assert f"+ {reason}\n" in printed and printed.count("torch engine only") == 1 and f"{reason}." in words(page)
    results = page[page.index(f"Results of {NAME} on eval") :]
    cells = [words(row).split("–")[0] for row in results[: results.index("</table>")].split("<tr>")[2:4]]
    assert [("torch engine only" in row, row.split()[0][:5]) for row in cells] == [(False, "5_1_6"), (True, "3_2_8")]
    trees = page[page.index(f"All trees of {NAME}") :]
    lines = {
        words(line).split()[0]: "torch engine only" in line
        for line in trees[: trees.index("</table>")].split("<tr>")[2:]
    }
    marks = {name.removesuffix("torch"): marked for name, marked in lines.items()}
    assert marks.pop("5_1_6") is False and all(marks.values()) and len(marks) > 5
    verdict = json.loads(Path("results/metrics.json").read_text())["verdict"]["text"]
    assert f"Launch {CHAIN.name} with {NAME}: measured 1.60x" in verdict and "t3_2_8" not in verdict
    assert f"no serving engine runs this tree with this draft: t3_2_8 with {NAME}, measured 2.20x" in words(page)


def test_a_tree_of_eagle3_that_no_engine_runs_has_its_own_reason() -> None:
    """Bug: one sentence for all said that neither engine runs the tree, not which ones they run."""
    chain, narrow = TreeShape(8, 1, 9), TreeShape(8, 2, 8)
    reason = DraftKind().explain_torch_only([chain, narrow])
    assert (
        reason
        and "SGLang (from 0.5.17 on) runs trees of at least num_steps + 1 draft tokens, and vLLM chains" in reason
    )
    assert DraftKind().explain_torch_only([chain]) is None
    assert DraftKind(DFLASH, 8).explain_torch_only([chain]) is None
    assert "the chain of the whole block alone, 7_1_8" in str(DraftKind(DFLASH, 7).explain_torch_only([chain]))


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


def test_replays_that_share_no_tree_are_shown_without_a_duel(project: schema.Params) -> None:
    rows = [row for row in replay_records.read_replay(NAME) if row.shape == CHAIN]
    far = [row.model_copy(update={"num_steps": 31, "num_draft_tokens": 32}) for row in rows]
    ReplayedTree.write_csv(replay_records.locate_replay(NAME), far)
    report.main()
    assert "Families side by side" in report.PAGE_FILE.read_text()
