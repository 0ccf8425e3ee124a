"""benchmark and time_cycles on a block checkpoint of a tiny target, and what can't be measured with it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from stages import benchmark, prepare_prompts, time_cycles
from stages.cells import timing_grid
from stages.cells.table import TableLine
from stages.draft import checkpoint
from stages.families.block.config import build_block_config
from stages.families.block.files import Files
from stages.families.block.model import BlockDraft
from stages.params import schema
from stages.params.families import BLOCKS
from stages.target import manifest
from tests.conftest import edit_params
from tests.draft.slow_block_draft import METHOD_OPTIONS, SEGMENT_KEYS, random_block_draft
from tests.talking import TREES, WORKLOADS
from tests.test_time_cycles import GRID, write_contexts
from tests.torch_cells import read_line

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4  # dflash drafts 3 tokens, dspark 4


def write_draft(method: str, **options: Any) -> BlockDraft:
    """Write the checkpoint `block` of the tiny target."""
    made = manifest.read_manifest()
    sizes = {"vocab_size": made.vocab_size, "hidden_size": made.hidden_size, "block_size": BLOCK_SIZE}
    sizes |= {"mask_token_id": 3, "feature_layers": (1, 2, 3), "max_position_embeddings": 4096}
    draft = random_block_draft(2, **(METHOD_OPTIONS[method] | sizes | options))[0].float()
    config = build_block_config(draft.config, made.num_layers)
    Files(BLOCKS["dflash"]).write(checkpoint.locate_checkpoint("block"), config, dict(draft.state_dict()))
    return draft


def name_checkpoint(project: Path, method: str, **benchmarked: Any) -> None:
    """Name the checkpoint in params.yaml as one that train_draft has made."""
    segment = {"from": "e000", "epochs": 1, "method": method, "layers": 2, "block_size": BLOCK_SIZE, "anchors": 8}
    segment |= SEGMENT_KEYS[method]
    edit_params(
        project,
        {
            "train_draft": {"checkpoints": {"e003": {"from": "e000", "epochs": 3}, "block": segment}},
            "replay_trees": {"checkpoints": ["e003"]},
            "benchmark": {"checkpoints": ["block"], "trees": TREES, **benchmarked},
            "benchmark_served": {"workloads": []},
            "time_cycles": GRID,
        },
    )


@pytest.fixture
def project(talking_project: Path) -> Path:
    shutil.copytree(Path("drafts").resolve(), "copied")
    Path("drafts").unlink()
    Path("copied").rename("drafts")
    return talking_project


def sample_drafts(project: Path, method: str, temperature: float = 0.8, **more: Any) -> None:
    hot = {**WORKLOADS["eval"], "temperature": temperature, **more}
    chosen = {"draft_sampling": "sampled", "trees": ["t3_1_4"], "torch_workloads": ["eval"]}
    name_checkpoint(project, method, workloads={**WORKLOADS, "eval": hot}, **chosen)
    prepare_prompts.main("eval")


def read_answers(line: TableLine) -> list[tuple[int, int | None, int | None]]:
    return [(row.output_tokens, row.cycles, row.accepted) for row in line.point.requests]


def test_a_cell_of_sampled_drafts_says_so_and_at_temperature_0_is_greedy(project: Path) -> None:
    """One method is enough: tests/engine/test_sampled_drafts.py compares the cycles of each with a slow one's."""
    write_draft("dspark")
    found = {}
    for temperature, draft_sampling in ((0.8, "sampled"), (0.8, "greedy"), (0.0, "sampled"), (0.0, "greedy")):
        sample_drafts(project, "dspark", temperature)
        edit_params(project, {"benchmark": {"draft_sampling": draft_sampling}})
        benchmark.main("eval", "block", "t3_1_4")
        found[temperature, draft_sampling] = read_line("eval", "block", "t3_1_4")
    assert [line.row.draft_sampling for line in found.values()] == ["sampled", "greedy", "greedy", "greedy"]
    assert read_answers(found[0.0, "sampled"]) == read_answers(found[0.0, "greedy"])
    assert read_answers(found[0.8, "sampled"]) != read_answers(found[0.8, "greedy"])
    assert found[0.0, "greedy"].row.identical_share == 1.0
    sampled = found[0.8, "sampled"]
    assert sampled.row.identical_share is None and sum(row.accepted for row in sampled.point.requests) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trees": ["t3_1_4", "t3_2_6"]}, r"trees: t3_2_6 has topk 2, expected chains while draft_sampling is sampled"),
        (
            {"checkpoints": ["e003", "block"]},
            "benchmark.checkpoints: e003 is of EAGLE-3, expected block drafts, or draft_sampling: greedy",
        ),
    ],
)
def test_what_has_no_sampled_drafts_is_refused_before_anything_runs(project: Path, changes: Any, message: str) -> None:
    sample_drafts(project, "dflash")
    schema.load_params()
    edit_params(project, {"benchmark": changes})
    with pytest.raises(ValueError, match=message):
        schema.load_params()
    if "draft_sampling" not in changes:  # where nothing is sampled, nothing is refused
        edit_params(project, {"benchmark": {"workloads": WORKLOADS}})
        schema.load_params()


def test_the_grid_of_a_block_checkpoint(project: Path) -> None:
    """Trees of the grid deeper than the block are left out."""
    depth = write_draft("dspark").config.num_drafts
    name_checkpoint(project, "dspark")
    edit_params(project, {"time_cycles": {"checkpoints": ["block"], "num_steps": [1, 3, 4, 6], "topk": [1, 2]}})
    write_contexts()
    time_cycles.main("torch", "block")
    trees = schema.load_params().time_cycles.list_trees()
    shallow = [(tree.num_steps, tree.topk, tree.num_draft_tokens) for tree in trees if tree.num_steps <= depth]
    found = timing_grid.read_grids("torch", "block", "tiny")[0].grid
    assert [(row["num_steps"], row["topk"], row["num_draft_tokens"]) for row in found] == shallow
    assert (depth, 1, depth + 1) in shallow and len(shallow) < len(trees)
