"""Families of drafts besides EAGLE-3: their segments in train_draft, those without weights, and the shapes of their cells."""

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


BAD_RIVALS = [
    ("method: eagle}", "method: hydra}",
     "train_draft.checkpoints.ours.method: expected one of eagle3, dflash, dflash2, dspark, eagle, medusa, found"),
    (", heads: 4}", "}", "train_draft.checkpoints.heads.heads: missing, and it has no default"),
    (", heads: 4}", ", heads: 0}", "train_draft.checkpoints.heads.heads: expected greater than 0, found 0"),
    ("method: eagle}", "method: eagle, heads: 4}",
     "train_draft.checkpoints.ours.heads: unknown key; known keys are from, epochs, method, horizon_epochs. Correct"),
    (", heads: 4}", ", heads: 4, learning_rate: 0.1}",
     "train_draft.checkpoints.heads.learning_rate: unknown key; known keys are from, epochs, method, horizon_epochs, heads"),
    ("ours: {from: e000", "ours: {from: e003",
     "train_draft: checkpoints.ours is of eagle and starts from e003, which is of eagle3; expected one method: start it"),
    ("heads: {from: e000", "more: {from: heads, epochs: 1, method: medusa, heads: 5}\n    heads: {from: e000",
     "train_draft: checkpoints.more.heads is 5, but 4 in heads, which it starts from; expected one draft"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "start"), BAD_RIVALS, ids=[row[1] for row in BAD_RIVALS])
def test_segments_of_methods_that_can_not_be_trained(old: str, new: str, start: str) -> None:
    with_families(RIVALS.replace(old, new))
    assert any(line.startswith(start) for line in list_problems()), list_problems()


@pytest.mark.parametrize(
    ("trees", "start"),
    [
        ("[t5_2_8, n3_1_8]", "benchmark.trees has t5_2_8, n3_1_8, of which none runs with heads; expected one for each"),
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


def test_an_unknown_family_without_weights_is_told() -> None:
    edit_params_text((IMPORTED, "checkpoints: {lookup: {model: builtin/ngrams}}"))
    (line,) = list_problems()
    assert line == (
        "import_draft.checkpoints.lookup.model: is builtin/ngrams (did you mean builtin/ngram?), expected builtin/ngram or "
        "builtin/lookahead, or a published draft"
    )


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
    assert line.startswith(
        f"{key}: 'heads' is of medusa, expected checkpoints of EAGLE-3 or block drafts; name it in benchmark.checkpoints"
    )


ALL = "expected one of eagle3, dflash, dflash2, dspark, eagle, medusa"
KNOWN = (
    "unknown key (did you mean method?); known keys are from, epochs, method, horizon_epochs. Correct the spelling, or leave "
    "the key out"
)


@pytest.mark.parametrize(
    ("segment", "line"),
    [
        (
            "method: dflsh, layers: 2, block_size: 8, anchors: 64",
            f".method: {ALL}, found 'dflsh' (did you mean dflash?)",
        ),
        ("method: dspak, layers: 2, heads: 8", f".method: {ALL}, found 'dspak' (did you mean dspark?)"),
        ("method: medua, heads: 4", f".method: {ALL}, found 'medua' (did you mean medusa?)"),
        ("method: hydra, heads: 4", f".method: {ALL}, found 'hydra'"),
        ("methd: dflash, layers: 2, block_size: 8, anchors: 64", f".methd: {KNOWN}"),
    ],
)
def test_a_misspelt_method_of_a_segment_is_one_problem(segment: str, line: str) -> None:
    """Bug: each key of the method meant was a problem too, as no key of the method that it was taken for."""
    edit_params_text((SECOND, f"{SECOND}\n    x: {{from: e000, epochs: 1, {segment}}}"))
    assert list_problems() == [f"train_draft.checkpoints.x{line}"]
