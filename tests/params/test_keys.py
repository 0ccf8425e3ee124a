"""Missing, unknown, misspelt and earlier keys of params.yaml are named, all in one message."""

import pytest

from tests.params.params_edits import LEAVES, READ, edit_params_text, list_problems, set_value

NAMED_BY_USER = {
    ("train_draft", "checkpoints"),
    ("benchmark", "workloads"),
    ("prepare_prompts", "sets"),
    ("schedule", "stages"),
    ("benchmark_served", "servers"),  # or the engine's
}
SECTIONS = sorted({key_path[:depth] for key_path in LEAVES for depth in range(len(key_path))} - NAMED_BY_USER)


@pytest.mark.parametrize("section", SECTIONS, ids=".".join)
def test_an_unknown_key_is_named_with_the_known_ones(section: tuple[str, ...]) -> None:
    """Of a misspelt section DVC would drop the stage without a word."""
    set_value((*section, "zebra"), "green")
    inside = READ
    for part in section:
        inside = inside[part]
    optional = ["method", "horizon_epochs"] if section[:-1] == ("train_draft", "checkpoints") else []
    (line,) = list_problems()
    start, known = ".".join(section), line.partition("known keys are ")[2].partition(". Correct")[0]
    assert line.startswith(f"{start}: unknown key zebra;" if start else "unknown key zebra;")
    assert set(known.split(", ")) == {*inside, *optional}


def test_a_misspelt_key_is_one_line_with_the_missing_one() -> None:
    """Bug: two lines for one mistake, of which one said to write the key and the other to leave it out."""
    edit_params_text(
        ("min_tau:", "min_tua:"),
        ("concurrency: 1 ", "colour: green\n      concurency: 1 "),
        ("  model: builtin", "  # model: builtin"),
    )
    assert [line.split(";")[0] for line in list_problems()] == [
        "target.model: missing, and it has no default",
        "check_overfit: unknown key min_tua (did you mean min_tau?)",
        "benchmark.workloads.eval: unknown key colour, concurency (did you mean concurrency?)",
    ]
    edit_params_text(("train_draft:", "trian_draft:"))
    (line,) = list_problems()
    assert line.startswith("unknown key trian_draft (did you mean train_draft?)")


def test_every_problem_is_told_at_once() -> None:
    edit_params_text(("seed: 7", "seed: -7"), ("dtype: float32 ", "dtype: float8 "), ("max_chars:", "max_char:"))
    assert [line.split(":")[0] for line in list_problems()] == [
        "target.dtype", "prepare_target.seed", "fix_data",
    ]  # fmt: skip
