"""Tree names and grids: what can be built, counted by an expansion of its own, and what to write instead of the rest."""

import random
import re

import pytest

from stages.params import schema
from tests.params.params_edits import edit_params_text, list_problems


def test_the_committed_trees_can_all_be_built_and_replayed() -> None:
    """A served tree that the replay's grid doesn't hold could not be compared with its prediction."""
    p = schema.load_params()
    grid = {tree.name for tree in p.replay_trees.list_trees()}
    assert set(p.benchmark.trees) <= grid


BAD_TREES = [
    (
        "8_2_16",
        "benchmark.trees.3: expected text, found 8216; YAML reads 8_2_16 as the number 8216, so begin a name with",
    ),
    ("'8_2_16'", "benchmark.trees: '8_2_16' is not the name of a tree; write t8_2_16"),
    (
        "'8_1_8'",
        "benchmark.trees: 8_1_8: at topk 1 a tree is a chain of num_steps drafts and the root, .*; write t8_1_9",
    ),
    (
        "t8_1_8",
        "benchmark.trees: t8_1_8: at topk 1 a tree is a chain of num_steps drafts and the root, .*; write t8_1_9",
    ),
    ("t8_1_10", "benchmark.trees: t8_1_10: at topk 1 .*; write t8_1_9"),
    ("t8_2_32", "benchmark.trees: t8_2_32 has 31 nodes .* = 30 candidates .*; use at most t8_2_31"),
    ("t1_4_6", "benchmark.trees: t1_4_6 has 5 nodes .* = 4 candidates .*; use at most t1_4_5"),
    (
        "t0_2_16",
        "benchmark.trees: t0_2_16: expected num_steps and topk of 1 or more, and num_draft_tokens of 2 or more",
    ),
    ("t8_0_16", "benchmark.trees: t8_0_16: expected num_steps and topk of 1 or more"),
    ("t8_2_1", "benchmark.trees: t8_2_1: .* num_draft_tokens of 2 or more"),
    ("t08_2_16", "benchmark.trees: 't08_2_16' is not the name of a tree; write t8_2_16"),
    ("t٨_2_16", "benchmark.trees: 't٨_2_16' is not a tree; write t<num_steps>_<topk>_<num_draft_tokens>, as t8_2_16"),
    ("t8_-2_16", "benchmark.trees: 't8_-2_16' is not a tree"),
    ("t8_2", "benchmark.trees: 't8_2' is not a tree"),
    ("t8_2_16_1", "benchmark.trees: 't8_2_16_1' is not a tree"),
    ("tree", "benchmark.trees: 'tree' is not a tree"),
    ("t8_2_16, t8_2_16", "benchmark.trees: t8_2_16 is listed twice; list each name once"),
]


@pytest.mark.parametrize(("tree", "message"), BAD_TREES, ids=[row[0] for row in BAD_TREES])
def test_a_tree_that_can_not_be_is_told_what_to_write(tree: str, message: str) -> None:
    """Bug: t08_2_16 and digits of other scripts were read as t8_2_16: a cell then bore another name than its tree."""
    edit_params_text(("t8_2_16,", f"{tree},"))
    (line,) = list_problems()
    assert re.match(message, line)


def test_a_grid_without_one_tree_is_refused() -> None:
    """Bug: it was accepted, and replay_trees then wrote an empty table."""
    edit_params_text(
        ("num_steps: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "num_steps: [1]"),
        ("topk: [1, 2, 3, 4]", "topk: [2]"),
        ("[4, 6,", "[6,"),
    )
    (line,) = list_problems()
    assert (
        line.startswith("replay_trees: no tree of num_steps [1], topk [2] and num_draft_tokens [6, ")
        and "write smaller num_draft_tokens" in line
    )


def expansion(steps: int, topk: int) -> list[tuple[int, ...]]:
    """Every node recorded while a tree grows as SGLang's does: the topk best of a level have topk children each."""
    rng, score = random.Random(0), {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    recorded: list[tuple[int, ...]] = []
    for _ in range(steps):
        children = [(*node, child) for node in frontier for child in range(topk)]
        score |= {child: score[child[:-1]] + rng.random() for child in children}
        recorded += children
        frontier = sorted(children, key=lambda node: score[node])[-topk:]
    return recorded
