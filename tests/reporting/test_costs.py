"""The report's part on costs: the page, the terminal's lines and the files, of a project whose results are made up."""

import csv
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import report
from stages.cells import prediction, replay_records, timing_grid
from stages.cells.cell import CELLS_FOLDER
from stages.cells.prediction import PredictedSpeedup
from stages.measuring import measured_server
from stages.measuring.server_setup import ServedWorkload
from stages.params import schema
from stages.params.engines import SERVED
from stages.params.tree_shape import TreeShape
from tests import costs
from tests.cells.test_cycle_times import decoded_cell, plain_s
from tests.conftest import EVAL, edit_params
from tests.reporting import made_up_block_draft
from tests.reporting.made_up_results import (
    ELSEWHERE,
    PICTURE,
    PLOTS,
    made_up_project,
    make_up_import,
    make_up_spent,
    replayed,
    words,
    write_cell,
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
    cycle_s = slow * costs.seconds(TreeShape.parse(tree))
    decoded_cell(tree, off * replayed(tree, checkpoint), cycle_s, checkpoint=checkpoint).write()


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


def test_an_untimed_import_has_no_prediction_and_a_reason(project: schema.Params) -> None:
    theirs = {"model": "someone/theirs", "revision": None, "rope_theta": None}
    edit_params(Path(), {"import_draft": {"checkpoints": {"theirs": theirs}}})
    edit_params(Path(), {"replay_trees": {"checkpoints": ["e003", "e009", "theirs"]}})
    make_up_import("theirs")
    text = Path("results/replay/e009.csv").read_text().replace("e009", "theirs")
    Path("results/replay/theirs.csv").write_text(text)
    replay_records.TreeBucket.write_csv(replay_records.locate_tree_statistics("theirs"), [])
    replay_records.GroupTau.write_csv(replay_records.locate_group_taus("theirs"), [])
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


DEAR_TOKENS = costs.TRUTH | {"token": 0.09e-3}  # at 32 at once no tree pays


def simulate(trees: list[str], caps: tuple[int, ...] = (1, 8, 32), engine: str = "sglang") -> timing_grid.TimingGrid:
    """Write what serving_costs would have timed of workload `load` on an engine."""
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
        engine=engine, workload="load", max_new_tokens=100, points=points, plain=plain,
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


WINDOW = {"sliding_window": 64, "use_sliding_window": True, "is_causal": False}
CONFIGS: dict[str, Row] = {
    "eagle3": {"model_type": "llama", "sliding_window": 64},
    "dflash": {"architectures": ["DFlashDraftModel"], "block_size": 6, **WINDOW},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "block_size": 6, **WINDOW},
    "dspark": {"architectures": ["Qwen3DSparkModel"], "block_size": 5, **WINDOW},
}


ADVISED = [
    *(("eagle3", engine) for engine in SERVED),
    *((family, "sglang") for family in CONFIGS if family != "eagle3"),
]


@pytest.mark.parametrize(("family", "engine"), ADVISED)
def test_the_advised_command_is_the_measured_one(
    project: schema.Params, family: str, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: advice took every draft for EAGLE-3, so a block draft with a window was advised a flag that no cell was run with;
    of llama.cpp the report ended in a traceback (target.dtype is not declared).
    """
    name = made_up_block_draft.NAME
    if family != "eagle3":
        made_up_block_draft.add_block_draft(project)
        edit_params(Path(), {"time_trees": {"checkpoints": ["e000", name]}})
        timing_grid.write_timing_grid(costs.made_up(name, draft=CONFIGS[family]))
    edit_params(Path(), {"benchmark_served": {"engines": [engine]}})
    simulated = simulate([*CHAINS], engine=engine)
    if family == "eagle3":
        timing_grid.write_timing_grid(costs.made_up(draft=CONFIGS[family]))
    else:
        timing_grid.write_serving_costs("load", [simulated.model_copy(update={"checkpoint": name})])
    report.main()
    advised = next(row for row in prediction.read_launch() if row.flags)
    name = advised.checkpoint
    context: Any = SimpleNamespace(params=schema.load_params(), engine=engine)
    measured = measured_server.configure_server(ServedWorkload(context, CONFIGS[family]), name, advised.shape)
    draft = {f"drafts/{name}/draft", f"gguf/{name}-f32.gguf", str(Path(f"drafts/{name}/draft").absolute())}

    def leave_path_out(flags: list[str]) -> list[str]:
        return [functools.reduce(lambda text, path: text.replace(path, "DRAFT"), sorted(draft), word) for word in flags]

    assert leave_path_out(advised.flags) == leave_path_out(measured.speculation_flags)
    assert "DRAFT" in " ".join(leave_path_out(advised.flags))
    # Cells make a file of llama.cpp's for themselves; the advice names the user's, and what writes it.
    made = [
        f"aerie export {name} --type f32" in text for text in (capsys.readouterr().out, report.PAGE_FILE.read_text())
    ]
    assert made == [engine == "llama.cpp"] * 2


def test_a_measured_speedup_goes_before_a_predicted_one_of_the_same_tree_and_load(
    project: schema.Params, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: `aerie launch` advised a tree by its prediction, 1.67x, where a cell of that load had measured 0.67x."""
    grid = simulate([*CHAINS, *TREES], (1, 8))
    report.main()
    first = {row.concurrency: row for row in prediction.read_launch()}
    assert first[1].enable and not first[1].measured
    edit_params(
        Path(),
        {"benchmark_served": {"workloads": ["load"], "checkpoints": ["e009", "e003"], "trees": [first[1].shape.name]}},
    )
    write_cell(served_cell("load", points=[point(100, 1, 0.01, repeats=3), point(100, 8, 0.01, repeats=3)]))
    for name in ("e009", "e003"):
        slow = [point(100, cap, 0.015, first[1].tau, repeats=3) for cap in (1, 8)]
        write_cell(served_cell("load", name, first[1].shape.name, slow))
    capsys.readouterr()
    report.main()
    assert all(row.shape != first[1].shape or not row.enable for row in prediction.read_launch())
    rows = [row for row in PredictedSpeedup.read_table() if row.engine == grid.engine and row.shape == first[1].shape]
    assert max(row.speedup for row in rows) == pytest.approx(first[1].speedup), "what was predicted is still told"
    page = words(report.PAGE_FILE.read_text())
    assert "predicted or measured (m)" in page and "× m" in page


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


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"process_share": 0.34}, "another process had the CPU: this one computed 34% of the wall time"),
        ({"spread": 0.8}, "its plain step took 80% longer in one round than in another"),
        ({"fit": 0.6}, "its fit is 60% off the trees left out"),
        ({"process_share": 0.95, "spread": 0.1}, ""),
    ],
)
def test_a_grid_that_was_timed_beside_other_work_advises_nothing(
    project: schema.Params, odd: Row, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a grid whose plain step took 207 ms, where 70 was right, had the verdict launch a tree that loses."""
    for cell in CELLS_FOLDER.rglob("*.json"):
        cell.unlink()
    edit_params(
        Path(), {"benchmark": {"torch_workloads": []}, "benchmark_served": {"workloads": ["eval"], "checkpoints": []}}
    )
    write_cell(served_cell("eval", points=[point(200, 64, 0.02, repeats=3)]))
    made = costs.made_up()
    fit = {"fit": made.fit.model_copy(update={"error": odd["fit"]})} if "fit" in odd else {}
    timing_grid.write_timing_grid(made.model_copy(update=odd | fit))
    report.main()
    printed = capsys.readouterr().out
    assert bool(table(PredictedSpeedup.TABLE)) == (not reason) == printed.startswith("Launch")
    command = "again: dvc repro -fs time_trees@e000"
    assert (f"! the timing grid of e000 (torch) predicts nothing: {reason}; {command}" in printed) == bool(reason)
    assert (command in words(report.PAGE_FILE.read_text())) == bool(reason)
