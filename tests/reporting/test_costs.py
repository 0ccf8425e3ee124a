"""The report's part on costs: the page, the terminal's lines and the files, of a project whose results are made up."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stages import report
from stages.cells import (
    prediction,
    prediction_check,
    replay_records,
    served_records,
    served_table,
    timing_grid,
    torch_records,
)
from stages.cells.prediction import PredictedSpeedup
from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.reporting import costs as shown
from stages.serving import engine_flags
from tests import costs
from tests.cells.test_cost_served import plain_s, torch_cell
from tests.conftest import EVAL, edit_params
from tests.reporting.made_up_results import (
    ELSEWHERE,
    PICTURE,
    PLOTS,
    made_up_project,
    make_up_import,
    make_up_spent,
    replayed,
    words,
)
from tests.served_cells import made_up as served_cell
from tests.served_cells import point

Row = dict[str, Any]
CHAINS = ("t3_1_4", "t5_1_6", "t8_1_9")
TREES = ("t5_2_8", "t8_2_16", "t5_4_16", "t10_2_32")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Params:
    return made_up_project(tmp_path, monkeypatch)


def decode(checkpoint: str, tree: str, slow: float = 1.0, off: float = 1.0) -> None:
    """Give a torch cell the rows of a decoding: a cycle `slow` times the timed one, a tau `off` times the replayed."""
    found = torch_records.read_torch_cell("eval", checkpoint, tree).model_dump()
    made = torch_cell(tree, off * replayed(tree, checkpoint), slow * costs.seconds(TreeShape.parse(tree)))
    prompts = [row | made["prompts"][0] for row in found["prompts"]]
    torch_records.write_torch_cell(found | {"prompts": prompts, "metrics": found["metrics"] | made["metrics"]})


def serve(caps: list[int], dear: float, cheap: tuple[str, ...] = (*CHAINS, *TREES)) -> None:
    """Cells of a sweep on SGLang, whose cycles cost what those of the grid do, times `dear` at the largest concurrency."""
    workloads = {"eval": EVAL, "sweep": {**EVAL, "concurrency": caps, "repeats": 2}}
    edit_params(Path(), {"benchmark": {"workloads": workloads}})
    make_up_spent("prepare_prompts@sweep")
    edit_params(Path(), {"benchmark_served": {"workloads": ["sweep"], "checkpoints": ["e009"], "trees": list(cheap)}})
    plain = [point(200, cap, plain_s(cap), requests=max(8, cap), seed=cap, repeats=2) for cap in caps]
    served_records.write_served_cell(served_cell("sweep", points=plain))
    for tree in cheap:
        points = []
        for cap in caps:
            cycle = costs.seconds(TreeShape.parse(tree), cap) * (dear if cap == max(caps) else 1)
            points.append(
                point(200, cap, cycle / replayed(tree), replayed(tree), tree, requests=max(8, cap), seed=cap, repeats=2)
            )
        served_records.write_served_cell(served_cell("sweep", "e009", tree, points))


def table(path: Path) -> list[Row]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_replayed_tree_is_predicted_but_those_outside_the_grid(project: schema.Params) -> None:
    report.main()
    rows = table(PredictedSpeedup.TABLE)
    trees = project.replay_trees.list_trees()
    within = [t for t in trees if t.num_steps <= 10 and t.topk <= 4 and t.num_draft_tokens <= 64]
    assert len(rows) == len(within) * len(project.replay_trees.checkpoints) > 300
    for row in rows[::37]:
        tree = TreeShape(
            num_steps=int(row["num_steps"]), topk=int(row["topk"]), num_draft_tokens=int(row["num_draft_tokens"])
        )
        by_hand = replayed(tree.name, row["checkpoint"]) * costs.PLAIN_S / costs.seconds(tree)
        assert float(row["speedup"]) == pytest.approx(by_hand)
        assert float(row["low"]) < float(row["speedup"]) < float(row["high"])


def test_trees_that_were_left_out_are_counted_on_the_page(project: schema.Params) -> None:
    timing_grid.write_timing_grid(costs.made_up(points=costs.grid([t for t in costs.TREES if t.num_steps <= 6])))
    report.main()
    trees = project.replay_trees.list_trees()
    far = sum(t.num_steps > 6 for t in trees)
    page = words(report.PAGE_FILE.read_text())
    assert (
        f"torch engine: {far} of {len(trees)} trees of e009 lie outside what was timed (num_steps 1 to 6, topk 1 to 4"
        in page
    )


def test_the_flags_are_those_a_server_is_started_with(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = simulate([*CHAINS, *TREES], (1, 8))
    report.main()
    printed = capsys.readouterr().out
    launch = json.loads(prediction.LAUNCH_FILE.read_text())["launch"]
    assert [(row["engine"], row["concurrency"]) for row in launch] == [("sglang", 1), ("sglang", 8)]
    for row in launch:
        shape = row["num_steps"], row["topk"], row["num_draft_tokens"]
        draft = engine_flags.ServedDraft(f"drafts/{row['checkpoint']}/draft", "EAGLE3", *shape)
        assert row["enable"] and row["flags"] == engine_flags.build_speculation_flags(row["engine"], draft, grid.draft)
    report.main("--launch")
    alone = capsys.readouterr().out
    assert alone.partition("verdict, by")[0].strip() in printed and "--speculative-num-steps" in alone
    assert "--speculative-eagle-topk" in words(report.PAGE_FILE.read_text())


def test_where_a_cycle_costs_more_than_it_brings_speculation_is_not_proposed(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [row.model_copy(update={"cycle_s": 5 * row.cycle_s}) for row in costs.grid()]
    timing_grid.write_timing_grid(costs.made_up(points=points))
    report.main()
    assert prediction.read_launch() == [] and "--speculative" not in capsys.readouterr().out


def test_an_untimed_import_has_no_prediction_and_a_reason(project: schema.Params) -> None:
    theirs = {"model": "someone/theirs", "revision": None, "rope_theta": None}
    edit_params(Path(), {"import_draft": {"checkpoints": {"theirs": theirs}}})
    edit_params(Path(), {"replay_trees": {"checkpoints": ["e003", "e009", "theirs"]}})
    make_up_import("theirs")
    text = Path("results/replay/e009.csv").read_text().replace("e009", "theirs")
    Path("results/replay/theirs.csv").write_text(text)
    replay_records.TreeBucket.write_csv(replay_records.locate_tree_statistics("theirs"), [])
    report.main()
    assert {row["checkpoint"] for row in table(PredictedSpeedup.TABLE)} == {"e003", "e009"}
    assert "theirs: the torch engine has timed no draft of its shapes" in words(report.PAGE_FILE.read_text())
    edit_params(Path(), {"time_trees": {"checkpoints": ["e000", "theirs"]}})
    timing_grid.write_timing_grid(costs.made_up("theirs", points=costs.grid(truth=costs.TRUTH | {"step": 1e-3})))
    report.main()
    chain = {
        row["checkpoint"]: row
        for row in table(PredictedSpeedup.TABLE)
        if row["num_steps"] == "8" and row["topk"] == "1"
    }
    assert (
        float(chain["theirs"]["C"]) > 1.2 * float(chain["e009"]["C"]) == pytest.approx(1.2 * float(chain["e003"]["C"]))
    )


def test_a_missing_cost_and_one_of_another_target_are_explained(project: schema.Params) -> None:
    timing_grid.write_timing_grid(costs.made_up(model="Qwen/Qwen3-8B"))
    with pytest.raises(
        ValueError, match=r"has timed drafts of the target Qwen/Qwen3-8B, expected builtin/weather-tiny"
    ):
        report.main()
    timing_grid.locate_timing_grid("torch", "e000").unlink()
    with pytest.raises(ValueError, match=r"torch-e000\.json not found; run: dvc repro time_trees@e000"):
        report.main()


DEAR_TOKENS = costs.TRUTH | {"token": 0.09e-3}  # at 32 at once no tree pays


def simulate(trees: list[str], caps: tuple[int, ...] = (1, 8, 32)) -> timing_grid.TimingGrid:
    """Write what serving_costs would have timed of workload `load` on SGLang."""
    workload = {
        **EVAL,
        "prompts": "random",
        "input_tokens": 64,
        "ignore_eos": True,
        "concurrency": list(caps),
        "num_prompts": 64,
    }
    edit_params(Path(), {"benchmark": {"workloads": {"eval": EVAL, "load": workload}}})
    make_up_spent("prepare_prompts@load")
    edit_params(Path(), {"serving_costs": {"workloads": ["load"], "trees": trees}})
    points = costs.grid([TreeShape.parse(tree) for tree in trees], caps, truth=DEAR_TOKENS)
    plain = [{"batch": cap, "step_s": plain_s(cap), "error": 0.005, "samples": 10} for cap in caps]
    grid = costs.made_up(
        engine="sglang", workload="load", max_new_tokens=100, points=points, plain=plain,
        settings={"context": 100, "repeats": 2, "temperature": 0.0, "simulated_accept_length": 3.0},
    )  # fmt: skip
    timing_grid.write_serving_costs("load", [grid])
    return grid


def test_simulated_costs_say_which_tree_to_launch_at_each_concurrency(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate([*CHAINS, *TREES])
    report.main()
    printed = capsys.readouterr().out
    rows = [row for row in table(PredictedSpeedup.TABLE) if row["engine"] == "sglang"]
    assert {(row["workload"], row["max_new_tokens"], row["concurrency"]) for row in rows} == {
        ("load", "100", cap) for cap in ("1", "8", "32")
    }
    for row in rows[::23]:
        tree, cap = (
            TreeShape(int(row["num_steps"]), int(row["topk"]), int(row["num_draft_tokens"])),
            int(row["concurrency"]),
        )
        by_hand = replayed(tree.name, row["checkpoint"]) * plain_s(cap) / costs.seconds(tree, cap, DEAR_TOKENS)
        assert float(row["speedup"]) == pytest.approx(by_hand)
    mine = [row for row in prediction.read_launch() if row.engine == "sglang"]
    for row in mine:
        at = [
            float(r["speedup"])
            for r in rows
            if int(r["concurrency"]) == row.concurrency and r["num_draft_tokens"] > r["num_steps"]
        ]
        assert row.speedup == pytest.approx(max(at))
    assert [(row.concurrency, row.enable) for row in mine] == [(1, True), (8, True), (32, False)]
    (limit,) = json.loads(prediction.LAUNCH_FILE.read_text())["limits"]
    assert (limit["workload"], limit["enabled"], limit["off_above"]) == ("load", [1, 8], 8)
    line = "sglang, load, 100 tokens: turn speculation off above 8 at once: at 32 no tree's interval lies above 1"
    page = words(report.PAGE_FILE.read_text())
    assert line in printed and line.replace("'", "&#39;") in page.replace("'", "&#39;")
    assert "Speedup by tree and concurrency" in page and "acceptance was simulated, 3.0 tokens a cycle" in page


def test_costs_of_simulated_acceptance_go_before_those_of_served_cells_of_the_checkpoint_itself() -> None:
    """Bug: with cells of e009 the costs of serving_costs, timed with e000, gave way to those of three trees."""
    simulated = costs.made_up("e000", settings={"simulated_accept_length": 3.0})
    served, other = costs.made_up("e009"), costs.made_up("dflash8")
    same = {("e000", "e009"), ("e009", "e009")}
    grids = [served, other, simulated]
    assert shown._find_cost("e009", grids, lambda a, b: (a, b) in same) is simulated
    assert shown._find_cost("e009", [served, other], lambda a, b: (a, b) in same) is served
    assert shown._find_cost("dflash8", grids, lambda a, b: (a, b) in same) is other
    assert shown._find_cost("medusa", grids, lambda a, b: (a, b) in same) is None


def test_served_points_are_compared_with_simulated_costs_that_no_cell_was_fitted_to(project: schema.Params) -> None:
    """One tree and concurrency was served 1.5 times as slowly as predicted; one of a tree outside the grid is not compared."""
    grid = simulate(["t3_1_4", "t8_1_9", "t5_2_8", "t8_2_16"], (1, 8))
    edit_params(
        Path(), {"benchmark_served": {"workloads": ["load"], "checkpoints": ["e009"], "trees": ["t5_2_8", "t5_4_16"]}}
    )
    caps = (1, 8)
    plain = [point(100, cap, plain_s(cap), requests=8, seed=cap, repeats=2) for cap in caps]
    served_records.write_served_cell(served_cell("load", points=plain))
    for tree in ("t5_2_8", "t5_4_16"):
        times = {cap: costs.seconds(TreeShape.parse(tree), cap, DEAR_TOKENS) * (1.5 if cap == 8 else 1) for cap in caps}
        points = [
            point(100, cap, times[cap] / replayed(tree), replayed(tree), tree, requests=8, seed=cap, repeats=2)
            for cap in caps
        ]
        served_records.write_served_cell(served_cell("load", "e009", tree, points))
    report.main()
    p = schema.load_params()
    replays = {"e009": replay_records.read_replay("e009")}
    cells = served_table.read_served_cells(["load"], ["e009"], ["t5_2_8", "t5_4_16"])
    lines = served_table.join_lines(cells, replays, [])
    here = grid.model_copy(update={"hardware": cells[0].hardware})
    compared, ids = prediction_check.compare_simulated_lines([here], lines, replays, p.have_same_shapes)
    assert [(row.tree, row.concurrency) for row in compared] == [("t5_2_8", 1), ("t5_2_8", 8)] and len(ids) == 2
    assert [row.measured.C / row.predicted.C for row in compared] == pytest.approx([1.0, 1.5], rel=0.02)
    assert prediction_check.compare_simulated_lines([grid], lines, replays, p.have_same_shapes) == (
        [],
        set(),
    )  # another machine


def test_predictions_stand_beside_measurements(project: schema.Params) -> None:
    for checkpoint in project.benchmark.checkpoints:
        for tree in project.benchmark.trees:
            decode(checkpoint, tree)
    decode("e009", "t8_2_16", slow=1.6)
    report.main()
    page = report.PAGE_FILE.read_text()
    text = words(page)
    count = len(project.benchmark.checkpoints) * len(project.benchmark.trees)
    assert f"Of {count} cells, predictions are" in text
    assert "1 of them disagree beyond both intervals: 8_2_16 at e009 (mostly C)." in text
    assert page.count('<tr class="off">') == 1 and page.count(PICTURE) == PLOTS + 1
    assert not re.search(ELSEWHERE, page)


def test_cells_of_another_machine_are_not_held_against_predictions(project: schema.Params) -> None:
    for tree in project.benchmark.trees:
        decode("e009", tree, slow=3)
    timing_grid.write_timing_grid(costs.made_up(hardware=costs.HARDWARE | {"cpu": "Another CPU"}))
    report.main()
    text = words(report.PAGE_FILE.read_text())
    assert "Predicted against measured" not in text
    assert (
        "its cells ran on another machine than the timing grid, cpu (Another CPU against Made-up CPU, 2 cores)" in text
    )


def test_served_cells_tell_at_which_concurrency_to_speculate(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine's own cells are its costs; the torch engine's advise no other."""
    serve([1, 8, 64], dear=2.0)
    report.main()
    launch = prediction.read_launch()
    proposed = [(row["engine"], row["concurrency"], row["enable"]) for row in launch]
    assert proposed[0] == ("sglang", 1, True) and proposed[-1] == ("sglang", 64, False) and len(proposed) == 3
    made = json.loads(prediction.LAUNCH_FILE.read_text())["costs"]
    assert [(one["engine"], one["workload"], len(one["grid"])) for one in made] == [
        ("torch", None, 36),
        ("sglang", "sweep", 21),
    ]
    rows = [row for row in table(PredictedSpeedup.TABLE) if row["engine"] == "sglang"]
    assert {row["concurrency"] for row in rows} == {"1", "8", "64"}
    assert {
        (int(row["num_steps"]) >= 3, int(row["num_draft_tokens"]) >= 4, int(row["num_draft_tokens"]) <= 32)
        for row in rows
    } == {(True,) * 3}
    assert {row["checkpoint"] for row in rows} == {"e003", "e009"}  # of the same shapes, so of the same cost
    text = words(report.PAGE_FILE.read_text())
    assert (
        "sglang engine, sweep, 200 tokens with the draft of e009, 21 points:" in text
        and "Of 21 cells, predictions are" in text
    )


def test_too_few_served_cells_say_why_there_is_no_cost(project: schema.Params) -> None:
    serve([1], dear=1.0, cheap=CHAINS[:2])
    report.main()
    assert "sweep, e009, 200 tokens: a timing grid has 2 points, expected at least 3" in words(
        report.PAGE_FILE.read_text()
    )


def test_nothing_to_launch_is_no_table(project: schema.Params, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown.format_launch_table([]) == []
    prediction.write_launch([], [])
    report.main("--launch")
    assert capsys.readouterr().out.startswith("no serving engine was timed")


def test_one_conversation_has_no_interval_anywhere_on_the_page(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: with one prompt the ends were equal, and the page and the terminal showed a certainty."""
    none = {"tau_low": None, "tau_high": None}
    for checkpoint in project.replay_trees.checkpoints:
        replay_records.ReplayedTree.write_csv(
            replay_records.locate_replay(checkpoint),
            [row.model_copy(update=none) for row in replay_records.read_replay(checkpoint)],
        )
    for checkpoint in project.benchmark.checkpoints:
        for tree in project.benchmark.trees:
            decode(checkpoint, tree)
            found = torch_records.read_torch_cell("eval", checkpoint, tree).model_dump()
            ends = none | {"speedup_low": None, "speedup_high": None}
            torch_records.write_torch_cell(found | {"metrics": found["metrics"] | ends})
    report.main()
    printed = capsys.readouterr().out
    assert "one prompt" in printed and "No speedup is sure" in printed
    text = words(report.PAGE_FILE.read_text())
    assert "one prompt" in text and "are undecided: the prediction or the cell has no interval" in text
    assert not any(row["enable"] for row in prediction.read_launch())
