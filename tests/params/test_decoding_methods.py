"""Other decoding methods: their checkpoints in train_draft and their rows in benchmark_methods."""

import pytest

from stages.params import schema
from tests.params.params_edits import MEASURED, SECOND, edit_params_text, list_problems

RIVALS = """e009: {from: e003, epochs: 6}
    ours: {from: e000, epochs: 2, method: eagle}
    heads: {from: e000, epochs: 2, method: medusa, heads: 4}"""
TABLE = {
    "two": "{method: eagle2, checkpoint: ours, tree: t5_2_8}",
    "three": "{method: eagle3, checkpoint: e009, tree: t5_2_8}",
    "fixed": "{method: eagle, checkpoint: ours, depth: 7, nodes: 9}",
    "medusa": "{method: medusa, checkpoint: heads, depth: 4, nodes: 9}",
}
NGRAM, AHEAD = (
    "{method: ngram, longest: 3, shortest: 1, length: 8}",
    "{method: lookahead, window: 5, level: 4, guesses: 5}",
)
FREE = f"{{ngram: {NGRAM}, lookahead: {AHEAD}}}"
EMPTY = "  with_draft: {}", "  without_draft: {}"


def with_methods(*edits: tuple[str, str], rivals: str = RIVALS, free: str = FREE, **rows: str) -> None:
    drafted = "{" + ", ".join(f"{name}: {row}" for name, row in {**TABLE, **rows}.items()) + "}"
    edit_params_text(
        (SECOND, rivals), (EMPTY[0], f"  with_draft: {drafted} "), (EMPTY[1], f"  without_draft: {free} "), *edits
    )


def test_every_method_can_be_named() -> None:
    with_methods()
    found = schema.load_params()
    assert {name: segment.non_eagle3_method for name, segment in found.train_draft.checkpoints.items()} == {
        "e003": None, "e009": None, "ours": "eagle", "heads": "medusa",
    }  # fmt: skip
    kinds = {name: type(found.get_method_row(name)).__name__ for name in [*TABLE, "ngram", "lookahead"]}
    assert kinds == {
        "two": "DynamicRow", "three": "DynamicRow", "fixed": "StaticRow", "medusa": "StaticRow", "ngram": "NgramRow",
        "lookahead": "LookaheadRow",
    }  # fmt: skip
    with pytest.raises(ValueError, match="benchmark_methods has no 'hydra'; it has two, three, fixed"):
        found.get_method_row("hydra")


def test_a_segment_may_say_that_it_is_eagle_3s() -> None:
    edit_params_text((SECOND, "e009: {from: e003, epochs: 6, method: eagle3}"))
    assert schema.load_params().train_draft.checkpoints["e009"].non_eagle3_method is None


BAD_RIVALS = [
    ("method: eagle}", "method: hydra}",
     "train_draft.checkpoints.ours.method: expected 'eagle3', 'eagle', 'medusa', 'dflash', 'dflash2' or 'dspark', found"),
    (", heads: 4}", "}", "train_draft.checkpoints.heads.heads: missing, and it has no default"),
    (", heads: 4}", ", heads: 0}", "train_draft.checkpoints.heads.heads: expected greater than 0, found 0"),
    ("method: eagle}", "method: eagle, heads: 4}",
     "train_draft.checkpoints.ours.heads: unknown key; known keys are from, epochs, method. Correct"),
    (", heads: 4}", ", heads: 4, learning_rate: 0.1}",
     "train_draft.checkpoints.heads.learning_rate: unknown key; known keys are from, epochs, method, heads; train_draft."),
    ("ours: {from: e000", "ours: {from: e003",
     "train_draft: checkpoints.ours is of eagle and starts from e003, which is of eagle3; expected one method: start it"),
    ("heads: {from: e000", "more: {from: heads, epochs: 1, method: medusa, heads: 5}\n    heads: {from: e000",
     "train_draft: checkpoints.more is of 5 heads of medusa and starts from heads, which is of 4 heads of medusa"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "start"), BAD_RIVALS, ids=[row[1] for row in BAD_RIVALS])
def test_segments_of_methods_that_can_not_be_trained(old: str, new: str, start: str) -> None:
    with_methods(rivals=RIVALS.replace(old, new))
    assert any(line.startswith(start) for line in list_problems()), list_problems()


BAD_ROWS = [
    ({"two": "{method: eagle9, checkpoint: ours, tree: t5_2_8}"},
     "benchmark_methods.with_draft.two.method: expected 'eagle3', 'eagle2', 'eagle' or 'medusa', found 'eagle9'"),
    ({"two": "{method: ngram, longest: 2, shortest: 1, length: 4}"},
     "benchmark_methods.with_draft.two.method: expected 'eagle3'"),
    ({"two": "{method: eagle2, checkpoint: ours, tree: t5_2_99}"},
     "benchmark_methods.with_draft.two.tree: t5_2_99 has 98 nodes"),
    ({"two": "{method: eagle2, checkpoint: e009, tree: t5_2_8}"},
     "benchmark_methods.with_draft.two.checkpoint 'e009' is of eagle3, expected one of eagle (ours); correct it, or add one to"),
    ({"three": "{method: eagle3, checkpoint: heads, tree: t5_2_8}"},
     "benchmark_methods.with_draft.three.checkpoint 'heads' is of medusa, expected one of eagle3 (e003, e009, e000)"),
    ({"medusa": "{method: medusa, checkpoint: m5, depth: 4, nodes: 9}"},
     "benchmark_methods.with_draft.medusa.checkpoint 'm5' is no checkpoint, expected one of medusa (heads)"),
    ({"medusa": "{method: medusa, checkpoint: heads, depth: 5, nodes: 9}"},
     "benchmark_methods.with_draft.medusa.depth is 5, expected at most 4, the heads of heads: deeper guesses are not measured"),
    ({"fixed": "{method: eagle, checkpoint: ours, depth: 8, nodes: 9}"},
     "benchmark_methods.with_draft.fixed.depth is 8, expected at most 7, train_draft.ttt_steps"),
    ({"fixed": "{method: eagle, checkpoint: ours, depth: 2, nodes: 1}"},
     "benchmark_methods.with_draft.fixed.nodes: expected greater than or equal to 2, found 1"),
    ({"ngram": "{method: eagle3, checkpoint: e009, tree: t5_2_8}"},
     "benchmark_methods: ngram is in with_draft and in without_draft"),
]  # fmt: skip


def test_a_sweep_is_no_workload_of_methods() -> None:
    """Bug: benchmark_methods took a workload of several answer lengths, and ended by an AssertionError."""
    with_methods(("benchmark|max_new_tokens: 200", "max_new_tokens: [100, 200]"))
    (line,) = list_problems()
    assert line.startswith(
        "benchmark_methods.workload is 'eval', whose max_new_tokens is a sweep, [100, 200]; expected one"
    )


def test_a_window_below_the_steps_of_a_row_of_methods() -> None:
    """Bug: the trees of benchmark_methods.with_draft were not among those that init_draft.sliding_window is compared with."""
    with_methods(
        ("sliding_window: null ", "sliding_window: 11 "), three="{method: eagle3, checkpoint: e009, tree: t12_2_8}"
    )
    (line,) = list_problems()
    assert line.startswith("init_draft.sliding_window is 11, expected at least the most steps asked for, 12")


@pytest.mark.parametrize(("rows", "start"), BAD_ROWS, ids=[row[1] for row in BAD_ROWS])
def test_rows_of_methods_that_can_not_be_measured(rows: dict[str, str], start: str) -> None:
    with_methods(**rows)
    assert any(line.startswith(start) for line in list_problems()), list_problems()


def test_rows_without_a_draft_are_checked_too() -> None:
    wrong = NGRAM.replace("longest: 3, shortest: 1", "longest: 1, shortest: 2"), AHEAD.replace("level: 4", "level: 1")
    with_methods(free="{{ngram: {}, a: {}}}".format(*wrong))
    assert list_problems() == [
        "benchmark_methods.without_draft.ngram: shortest is 2, expected at most longest, 1; lower it",
        "benchmark_methods.without_draft.a.level: expected greater than or equal to 2, found 1",
    ]


def test_the_table_of_methods_asks_what_the_torch_engine_decodes() -> None:
    with_methods(("benchmark_methods|workload: eval", "workload: chat"))
    (line,) = list_problems()
    assert line.startswith(
        "benchmark_methods.workload is 'chat', expected one of benchmark.torch_workloads, eval; correct it"
    )


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (MEASURED, "[heads]", "benchmark.checkpoints"),
        ("[e003, e009]", "[heads]", "replay_trees.checkpoints"),
        ("time_trees|[e000]", "[heads]", "time_trees.checkpoints"),
    ],
)
def test_eagle_and_medusa_checkpoints_are_not_replayed_timed_or_benchmarked_with_trees(
    old: str, new: str, key: str
) -> None:
    with_methods((old, new))
    (line,) = list_problems()
    assert line.startswith(
        f"{key}: 'heads' is of medusa, expected checkpoints of EAGLE-3 or block drafts; name it in benchmark_methods"
    )


ALL = "expected 'eagle3', 'eagle', 'medusa', 'dflash', 'dflash2' or 'dspark'"
KNOWN = "unknown key (did you mean method?); known keys are from, epochs, method. Correct the spelling, or leave the key out"


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


@pytest.mark.parametrize(
    ("table", "row", "line"),
    [
        ("with_draft", "{method: medsa, checkpoint: e009, depth: 4, nodes: 9}",
         ".method: expected 'eagle3', 'eagle2', 'eagle' or 'medusa', found 'medsa' (did you mean medusa?)"),
        ("with_draft", "{methd: medusa, checkpoint: e009, depth: 4, nodes: 9}",
         ".methd: unknown key, and method is missing (did you mean method?); rename it"),
        ("without_draft", "{method: lookahed, window: 5, level: 4, guesses: 5}",
         ".method: expected 'ngram' or 'lookahead', found 'lookahed' (did you mean lookahead?)"),
    ],
)  # fmt: skip
def test_a_misspelt_method_of_a_row_is_one_problem(table: str, row: str, line: str) -> None:
    edit_params_text((f"  {table}: {{}}", f"  {table}: {{x: {row}}}"))
    assert list_problems() == [f"benchmark_methods.{table}.x{line}"]
