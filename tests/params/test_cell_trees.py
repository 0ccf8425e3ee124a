"""Trees that a draft or an engine can't run: one is left out for a checkpoint, a checkpoint without any is refused."""

from typing import Any

from stages.params import schema
from tests.conftest import EAGLE3
from tests.params.params_edits import list_problems, set_values

BLOCKS: dict[str, Any] = {
    "dflash": {"from": "e000", "epochs": 1, "method": "dflash", "layers": 1, "block_size": 8, "anchors": 8},
    "dspark": {
        "from": "e000", "epochs": 1, "method": "dspark", "layers": 1, "block_size": 5, "anchors": 8, "markov_rank": 4,
    },
    "dflash2": {
        "from": "e000", "epochs": 1, "method": "dflash2", "layers": 1, "block_size": 8, "anchors": 8, "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 3,
    },
}  # fmt: skip
ALL = ["e009", *BLOCKS]


def name_cells(
    torch: tuple[list[str], list[str]], served: tuple[list[str], list[str]] | None = None, **more: Any
) -> None:
    """Name checkpoints and trees of both sections; a section without is left as it is."""
    edits: dict[tuple[str, ...], Any] = {
        ("train_draft", "checkpoints"): EAGLE3 | BLOCKS,
        ("benchmark", "checkpoints"): torch[0],
        ("benchmark", "trees"): torch[1],
    }
    if served:
        edits |= {
            ("benchmark_served", "workloads"): ["eval"],
            ("benchmark_served", "checkpoints"): served[0],
            ("benchmark_served", "trees"): served[1],
        }
    set_values(edits | {("benchmark_served", key): value for key, value in more.items()})


def left_out(section: str) -> set[tuple[str, str]]:
    found = schema.load_params().list_left_out_trees()
    return {(one.checkpoint, one.tree) for one in found if one.section == section}


def test_a_tree_deeper_than_a_block_is_left_out_for_that_draft_alone() -> None:
    """Bug: one block draft's depth refused EAGLE-3's trees, which share the list."""
    name_cells((ALL, ["t8_2_16", "t7_1_8", "t5_4_16", "t3_1_4"]))
    assert left_out("benchmark") == {
        ("dflash", "t8_2_16"), ("dspark", "t8_2_16"), ("dflash2", "t8_2_16"), ("dspark", "t7_1_8"), ("dflash2", "t5_4_16"),
    }  # fmt: skip
    lines = schema.load_params().describe_left_out_trees()
    assert "left out of benchmark: t8_2_16 with dflash, dflash2: it is deeper than the 7 drafts of a block" in lines
    assert any(
        line.startswith("left out of benchmark: t5_4_16 with dflash2: its topk is above the 3") for line in lines
    )


def test_checkpoints_that_are_left_without_a_tree_are_refused_all_at_once() -> None:
    """Bug: the message named the first of several drafts."""
    name_cells((ALL, ["t8_2_16", "t6_1_7"]))
    (line,) = list_problems()
    assert "benchmark.trees has t8_2_16, t6_1_7, of which none runs with dspark; expected one" in line
    name_cells((ALL, ["t8_2_16"]))
    for line, name, depth in zip(list_problems(), ("dflash", "dspark", "dflash2"), (7, 5, 7), strict=True):
        assert f"runs with {name}; expected one (it is deeper than the {depth} drafts" in line


def test_the_committed_trees_can_all_be_replayed() -> None:
    """A served tree that the replay's grid doesn't hold could not be compared with its prediction."""
    p = schema.load_params()
    assert set(p.benchmark.trees) <= {tree.name for tree in p.replay_trees.list_trees()}


def test_a_tree_that_one_of_several_engines_runs_is_left_out_for_the_others() -> None:
    served = (["e009"], ["t8_2_16"])
    name_cells((["e009"], ["t8_2_16"]), served, engines=["sglang", "vllm"])
    (line,) = schema.load_params().describe_left_out_trees()
    assert line.startswith("left out of benchmark_served, vllm: t8_2_16 with e009: vLLM drafts chains only")
    name_cells((["e009"], ["t8_2_16"]), served, engines=["vllm"])
    (line,) = list_problems()
    assert line.startswith("benchmark_served.trees has t8_2_16, of which none runs with e009")
