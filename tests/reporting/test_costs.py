"""The report's part on costs: the page, the terminal's lines and the files, of a project whose results are made up."""

import csv
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import report
from stages.cells import prediction, timing_grid
from stages.cells.cell import CELLS_FOLDER
from stages.cells.prediction import PredictedSpeedup
from stages.measuring import measured_server
from stages.measuring.server_setup import ServedWorkload
from stages.params import schema
from stages.params.tree_shape import TreeShape
from tests import costs
from tests.cells.test_cycle_times import plain_s
from tests.conftest import EVAL, edit_params
from tests.reporting import made_up_block_draft
from tests.reporting.made_up_results import made_up_project, make_up_spent, replayed, words, write_cell
from tests.served_cells import made_up as served_cell
from tests.served_cells import point

Row = dict[str, Any]
CHAINS = ("t3_1_4", "t5_1_6", "t8_1_9")
TREES = ("t5_2_8", "t8_2_16", "t5_4_16", "t10_2_32")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Params:
    return made_up_project(tmp_path, monkeypatch)


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


def simulate(
    engine: str = "sglang", trees: tuple[str, ...] = CHAINS, caps: tuple[int, ...] = (1, 8, 32)
) -> timing_grid.TimingGrid:
    """Write what time_cycles would have timed of workload `load` on an engine."""
    workload = {**EVAL, "prompts": "random", "input_tokens": 64, "ignore_eos": True, "num_prompts": 64}
    workload |= {"concurrency": [*caps]}
    edit_params(Path(), {"benchmark": {"workloads": {"eval": EVAL, "load": workload}}})
    make_up_spent("prepare_prompts@load")
    edit_params(Path(), {"time_cycles": {"engines": ["torch", engine], "workload": "load", "trees": [*trees]}})
    points = costs.grid([TreeShape.parse(tree) for tree in trees], caps)
    plain = [{"batch": cap, "step_s": plain_s(cap), "error": 0.005, "samples": 10} for cap in caps]
    grid = costs.made_up(
        engine=engine, workload="load", max_new_tokens=100, points=points, plain=plain,
        settings={"context": 100, "repeats": 2, "temperature": 0.0, "simulated_accept_length": 3.0},
    )  # fmt: skip
    timing_grid.write_grids([grid])
    return grid


WINDOW = {"sliding_window": 64, "use_sliding_window": True, "is_causal": False}
CONFIGS: dict[str, Row] = {
    "eagle3": {"model_type": "llama", "sliding_window": 64},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "block_size": 6, **WINDOW},
}


ADVISED = [("eagle3", "vllm"), ("eagle3", "llama.cpp"), ("dflash2", "sglang")]


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
        edit_params(Path(), {"time_cycles": {"checkpoints": [name]}})
        timing_grid.write_grids([costs.made_up(name, draft=CONFIGS[family])])
    edit_params(Path(), {"benchmark_served": {"engines": [engine]}})
    simulated = simulate(engine, caps=(1, 2, 4, 8, 12, 16, 24, 32))
    if family == "eagle3":
        timing_grid.write_grids([costs.made_up(draft=CONFIGS[family])])
    else:
        timing_grid.write_grids([simulated.model_copy(update={"checkpoint": name})])
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


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"process_share": 0.34}, "another process had the CPU: this one computed 34% of the wall time"),
        ({"spread": 0.8}, "its plain step took 80% longer in one round than in another"),
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
    timing_grid.write_grids([costs.made_up().model_copy(update=odd)])
    report.main()
    printed = capsys.readouterr().out
    assert bool(table(PredictedSpeedup.TABLE)) == (not reason) == printed.startswith("Launch")
    command = "again: dvc repro -fs time_cycles@torch-e000"
    assert (f"! the timing grid of e000 (torch) predicts nothing: {reason}; {command}" in printed) == bool(reason)
    assert (command in words(report.PAGE_FILE.read_text())) == bool(reason)
