"""Tree names and grids: what can be built, counted by an expansion of its own, and what to write instead of the rest."""

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
    ("8_2_16", "benchmark.trees.3: expected text, found 8216; YAML reads 8_2_16 as the number 8216"),
    ("'8_1_8'", "benchmark.trees: 8_1_8: .*; write t8_1_9"),
    ("t8_2_32", "benchmark.trees: t8_2_32 .*; use at most t8_2_31"),
    ("t0_2_16", "benchmark.trees: t0_2_16: expected num_steps and topk of 1 or more"),
    ("t08_2_16", "benchmark.trees: 't08_2_16' is not the name of a tree; write t8_2_16"),
    ("t٨_2_16", "benchmark.trees: 't٨_2_16' is not a tree"),
    ("t8_2", "benchmark.trees: 't8_2' is not a tree"),
    ("t8_2_16, t8_2_16", "benchmark.trees: t8_2_16 is listed twice"),
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
    assert line.startswith("replay_trees: no tree of num_steps [1], topk [2] and num_draft_tokens [6, ")
