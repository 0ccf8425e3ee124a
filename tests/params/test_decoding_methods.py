"""Families of drafts besides EAGLE-3: their segments in train_draft, those without weights, and the shapes of their cells."""

import re

import pytest

from tests.params.params_edits import MEASURED, SECOND, edit_params_text, list_problems

RIVALS = """e009: {from: e003, epochs: 6}
    ours: {from: e000, epochs: 2, method: eagle}
    heads: {from: e000, epochs: 2, method: medusa, heads: 4}"""
IMPORTED = "import_draft|checkpoints: {}"
CHECKPOINTS = "[e009, ours, heads, lookup]"


def with_families(rivals: str = RIVALS, trees: str = "[t5_2_8, s4_9, n3_1_8]", checkpoints: str = CHECKPOINTS) -> None:
    edit_params_text(
        (SECOND, rivals), (IMPORTED, "checkpoints: {lookup: {model: builtin/ngram}}"), (MEASURED, checkpoints),
        ("benchmark|trees: [t8_1_9, t5_1_6, t5_2_8, t8_2_16, t8_3_16, t5_4_16, t10_2_32, t10_3_32]", f"trees: {trees}"),
    )  # fmt: skip


MORE_HEADS = "more: {from: heads, epochs: 1, method: medusa, heads: 5}\n    heads: {from: e000"
BAD_RIVALS = [
    ("method: eagle}", "method: hydra}", "ours.method: expected one of eagle3, dflash, dflash2, dspark, eagle, medusa"),
    (", heads: 4}", "}", "heads.heads: missing, and it has no default"),
    ("method: eagle}", "method: eagle, heads: 4}", "ours.heads: unknown key; known keys are from, epochs, method"),
    ("ours: {from: e000", "ours: {from: e003", "ours is of eagle and starts from e003, which is of eagle3"),
    ("heads: {from: e000", MORE_HEADS, "more.heads is 5, but 4 in heads, which it starts from"),
]


@pytest.mark.parametrize(("old", "new", "start"), BAD_RIVALS, ids=[row[1] for row in BAD_RIVALS])
def test_segments_of_methods_that_can_not_be_trained(old: str, new: str, start: str) -> None:
    with_families(RIVALS.replace(old, new))
    assert any(f"checkpoints.{start}" in line for line in list_problems()), list_problems()


@pytest.mark.parametrize(
    ("trees", "start"),
    [
        ("[t5_2_8, s5_9, n3_1_8]", "benchmark.trees has t5_2_8, s5_9, n3_1_8, of which none runs with heads"),
        ("[t5_2_8, s4_9, n3_1_8, l5_4_5]", "benchmark.trees: l5_4_5 can't run with any of benchmark.checkpoints"),
        ("[t5_2_8, s4_9, n1_2_8]", "benchmark.trees: n1_2_8: the shortest n-gram is of 2 tokens, expected at most the"),
        ("[t5_2_8, s4_9, l5_1_5]", "benchmark.trees: l5_1_5: level is 1, expected n-grams of 2 tokens or more"),
        ("[t5_2_8, s4_4, n3_1_8]", "benchmark.trees: s4_4: a tree of depth 4 has more than 4 nodes"),
        ("[t5_2_8, s4, n3_1_8]", "benchmark.trees: 's4' is no shape; write s<depth>_<nodes>"),
    ],
)  # fmt: skip
def test_shapes_that_no_checkpoint_drafts(trees: str, start: str) -> None:
    with_families(trees=trees)
    assert any(line.startswith(start) for line in list_problems()), list_problems()


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("[e003, e009]", "[heads]", "replay_trees.checkpoints"),
        ("time_trees|[e000]", "[heads]", "time_trees.checkpoints"),
    ],
)
def test_what_servers_do_not_run_is_not_replayed_or_timed(old: str, new: str, key: str) -> None:
    edit_params_text((SECOND, RIVALS), (old, new))
    (line,) = list_problems()
    assert line.startswith(f"{key}: 'heads' is of medusa, expected checkpoints of EAGLE-3 or block drafts")


SEGMENTS = {
    "method: dflsh, layers: 2, block_size: 8, anchors: 64": ".method: expected one of .* found 'dflsh' .did you mean dflash",
    "methd: dflash, layers: 2, block_size: 8, anchors: 64": ".methd: unknown key .did you mean method",
}


@pytest.mark.parametrize("segment", SEGMENTS)
def test_a_misspelt_method_of_a_segment_is_one_problem(segment: str) -> None:
    """Bug: each key of the method meant was a problem too, as no key of the method that it was taken for."""
    edit_params_text((SECOND, f"{SECOND}\n    x: {{from: e000, epochs: 1, {segment}}}"))
    (line,) = list_problems()
    assert re.match(rf"train_draft\.checkpoints\.x{SEGMENTS[segment]}", line)
