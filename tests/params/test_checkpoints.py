"""Checkpoints that can be trained, imported, replayed and measured, and chains of segments of one draft."""

import pytest

from stages.params import checks
from stages.params.schema import load_params
from tests.params.params_edits import MEASURED, SECOND, edit_params_text, list_problems

PUBLISHED = "{model: AngelSlim/Qwen3-8B_eagle3, revision: null, rope_theta: null}"
NO_NAME = "expected a name (a letter, then letters, digits and _), found"
BAD_CHECKPOINTS = [
    (SECOND, "8_2_16: {from: e003, epochs: 6}", f"train_draft.checkpoints.8216: {NO_NAME} 8216; YAML reads 8_2_16 as"),
    (SECOND, "e-9: {from: e003, epochs: 6}", f"train_draft.checkpoints.e-9: {NO_NAME} 'e-9'"),
    (
        SECOND,
        "e009: {from: e010, epochs: 6}",
        "train_draft.checkpoints.e009.from: no checkpoint 'e010', expected one of e000",
    ),
    ("e003: {from: e000,", "e003: {from: e009,", "train_draft: checkpoints e003 -> e009 -> e003 form a cycle"),
    (
        "init_draft|[e000]",
        "[]",
        "init_draft.checkpoints is [] and train_draft.checkpoints has e003, e009, expected [e000]",
    ),
    ("init_draft|[e000]", "[e001]", "init_draft.checkpoints.0: expected 'e000', found 'e001'"),
    ("train_rows: 220", "train_rows: 0", "sample_target.train_rows is 0 and init_draft.checkpoints [e000]"),
    (SECOND, "e000: {from: e003, epochs: 6}", "train_draft: checkpoints.e000 is made by init_draft"),
    (MEASURED, "[e003, e003]", "benchmark.checkpoints: e003 is listed twice"),
    (MEASURED, "[e003, 9]", "benchmark.checkpoints.1: expected text, found 9; YAML reads"),
    (
        "    e003: {from",
        "    e004: {from",
        "replay_trees.checkpoints, train_draft.checkpoints.e009.from: no checkpoint 'e003'",
    ),
    ("trace_trees: null", "trace_trees: [t3_2_16]", "replay_trees.trace_trees: t3_2_16 has 15 nodes under the root"),
    (
        "  num_steps: [1, 3, 6, 10] ",
        "  num_steps: [1] ",
        "time_trees: num_steps [1], topk [1, 2, 4] and num_draft_tokens",
    ),
    ("import_draft|{}", f"{{e000: {PUBLISHED}}}", "import_draft.checkpoints.e000 is made by another stage"),
    ("sliding_window: null ", "sliding_window: 9 ", "init_draft.sliding_window is 9, expected at least the most steps"),
    ("init_draft|revision: null", "revision: main", "init_draft: revision is 'main', expected null while from"),
    ("min_tau: null", "min_tau: 8.5", "check_overfit.min_tau 8.5 can't be reached"),
]


@pytest.mark.parametrize(("old", "new", "start"), BAD_CHECKPOINTS, ids=[row[1] for row in BAD_CHECKPOINTS])
def test_checkpoints_that_can_not_be_trained_or_measured(old: str, new: str, start: str) -> None:
    edit_params_text((old, new))
    line, *_ = list_problems()
    assert line.startswith(start), line


def test_a_checkpoint_that_nothing_replays_or_measures_is_pointed_out() -> None:
    """Bug: a list of benchmark_served that has no workload counted as a use."""
    edit_params_text((SECOND, f"{SECOND}\n    e010: {{from: e009, epochs: 1}}"), ("benchmark_served|[e009]", "[e010]"))
    assert [line.partition(":")[0] for line in checks.list_remarks(load_params())] == ["e010"]


BLOCKS = """e009: {from: e003, epochs: 6}
    flash: {from: e000, epochs: 2, method: dflash, layers: 2, block_size: 8, anchors: 64}
    more: {from: flash, epochs: 2, method: dflash, layers: 2, block_size: 8, anchors: 32, decay: 3.0}
    spark: {from: e000, epochs: 2, method: dspark, layers: 1, block_size: 7, anchors: 64, markov_rank: 32}
    spark2: {from: spark, epochs: 2, method: dspark, layers: 1, block_size: 7, anchors: 64, markov_rank: 32}"""
MORE, SPARK2 = BLOCKS.split("\n")[2].strip(), BLOCKS.split("\n")[4].strip()


@pytest.mark.parametrize(
    ("segment", "old", "new", "start"),
    [
        (MORE, "layers: 2", "layers: 3", "checkpoints.more.layers is 3, but 2 in flash, which it starts from"),
        (MORE, "anchors: 32", "anchors: 32, mask_token_id: 0", "checkpoints.more.mask_token_id is 0, but null in flash"),
        (SPARK2, "from: spark", "from: flash", "checkpoints.spark2 is of dspark and starts from flash, which is of dflash"),
    ],
)  # fmt: skip
def test_segments_of_a_chain_are_of_one_block_draft(segment: str, old: str, new: str, start: str) -> None:
    edit_params_text((SECOND, BLOCKS.replace(segment, segment.replace(old, new))))
    assert [line for line in list_problems() if line.startswith(f"train_draft: {start}")], list_problems()


def test_a_window_and_q_k_norms_are_what_no_engine_loads_together() -> None:
    edit_params_text(("qk_norm: false ", "qk_norm: true "), ("sliding_window: null ", "sliding_window: 64 "))
    (line,) = list_problems()
    assert line.startswith("init_draft: qk_norm is true and sliding_window is 64, expected one of the two")
