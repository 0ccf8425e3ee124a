"""Missing, unknown, misspelt and earlier keys of params.yaml are named, all in one message."""

from pathlib import Path

import pytest

from stages.params.section import suggest_name
from tests.params.params_edits import LEAVES, READ, REAL, edit_params_text, list_problems, set_value

every_key = pytest.mark.parametrize("key_path", LEAVES, ids=".".join)


@pytest.mark.parametrize(
    "key_path",
    [
        ("target", "model"),
        ("fix_data", "raw"),
        ("train_draft", "checkpoints"),
        ("benchmark", "workloads", "eval", "prompts"),
    ],
    ids=".".join,
)
def test_a_missing_key_without_a_default_is_named(key_path: tuple[str, ...]) -> None:
    set_value(key_path, ...)
    (line,) = list_problems()
    assert line.startswith(f"{'.'.join(key_path)}: missing, and it has no default; write it")
    assert "docs/params.yaml" in line or "; benchmark.workloads.eval has the keys prompts, " in line


def test_a_missing_key_of_what_the_user_has_named_is_not_looked_for_in_the_last_commit() -> None:
    """Bug: "git show HEAD:params.yaml has one", of a draft that no commit has."""
    set_value(("import_draft", "checkpoints"), {"theirs": {"revision": None}})
    (line,) = list_problems()
    assert line == (
        "import_draft.checkpoints.theirs.model: missing, and it has no default; write it; "
        "import_draft.checkpoints.theirs has the keys model, revision, rope_theta"
    )


NAMED_BY_USER = {
    ("train_draft", "checkpoints"),
    ("benchmark", "workloads"),
    ("prepare_prompts", "sets"),
    ("schedule", "stages"),
}
SECTIONS = sorted({key_path[:depth] for key_path in LEAVES for depth in range(len(key_path))} - NAMED_BY_USER)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: ".".join(section) or "top")
def test_an_unknown_key_is_named_with_the_known_ones(section: tuple[str, ...]) -> None:
    set_value((*section, "zebra"), "green")
    inside = READ
    for part in section:
        inside = inside[part]
    optional = ["method"] if section[:-1] == ("train_draft", "checkpoints") else []
    key, known = ".".join([*section, "zebra"]), ", ".join([*inside, *optional])
    assert list_problems() == [
        f"{key}: unknown key; known keys are {known}. Correct the spelling, or leave the key out"
    ]


def test_a_misspelt_key_is_one_line_with_the_missing_one() -> None:
    """Bug: two lines for one mistake, of which one said to write the key and the other to leave it out.

    Of a misspelt section DVC would drop the stage without a word.
    """
    edit_params_text(
        ("train_draft:", "trian_draft:"),
        ("min_tau:", "min_tua:"),
        ("concurrency: 1 ", "colour: green\n      concurency: 1 "),
        ("  model: builtin", "  # model: builtin"),
    )
    found = list_problems()
    assert [line for line in found if "rename" in line] == [
        "trian_draft: unknown key, and train_draft is missing (did you mean train_draft?); rename it",
    ]
    assert [line.split(";")[0] for line in found if "rename" not in line] == [
        "target.model: missing, and it has no default",
        "check_overfit.min_tua: unknown key (did you mean min_tau?)",
        "benchmark.workloads.eval.colour: unknown key",
        "benchmark.workloads.eval.concurency: unknown key (did you mean concurrency?)",
    ]


def test_two_misspellings_of_one_key_are_not_both_renamed() -> None:
    edit_params_text(("  min_tau: 6.0", "  min_tua: 6.0\n  min_atu: 6.0"))
    assert [line.split(";")[0] for line in list_problems()] == [
        "check_overfit.min_tua: unknown key (did you mean min_tau?)",
        "check_overfit.min_atu: unknown key (did you mean min_tau?)",
    ]


@pytest.mark.parametrize(
    ("found", "nearest"),
    [("lerning_rate", "learning_rate"), ("e0009", "e009"), ("t8_2_61", ""), ("e010", ""), ("colour", "")],
)
def test_the_nearest_name_is_suggested_and_none_with_another_number(found: str, nearest: str) -> None:
    known = ["learning_rate", "warmup_steps", "e003", "e009", "t8_2_16"]
    assert suggest_name(found, known) == (f" (did you mean {nearest}?)" if nearest else "")


def test_a_misspelt_key_gets_the_nearest_known_one() -> None:
    set_value(("train_draft", "lerning_rate"), 0.1)
    assert list_problems()[0].startswith(
        "train_draft.lerning_rate: unknown key (did you mean learning_rate?); known keys are"
    )


def test_a_key_that_is_no_text_is_refused_at_the_top_too() -> None:
    Path("params.yaml").write_text(REAL + "\n5: x\n")
    assert list_problems()[0].startswith(
        "5: expected a name (a letter, then letters, digits and _), found 5; YAML reads"
    )


def test_a_list_for_a_text_gets_no_advice_on_numbers() -> None:
    """Bug: it was told of 8_2_16, which YAML reads as a number."""
    Path("params.yaml").write_text(REAL.replace("raw: data/raw/weather_toon.jsonl", "raw: [a.jsonl]", 1))
    assert list_problems() == ["fix_data.raw: expected text, found ['a.jsonl']"]


def test_every_problem_is_told_at_once() -> None:
    edit_params_text(("seed: 7", "seed: -7"), ("dtype: float32 ", "dtype: float8 "), ("max_chars:", "max_char:"))
    assert [line.split(":")[0] for line in list_problems()] == [
        "target.dtype", "prepare_target.seed", "fix_data.max_char",
    ]  # fmt: skip
