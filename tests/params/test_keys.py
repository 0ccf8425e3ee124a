"""Missing, unknown, misspelt and earlier keys of params.yaml are named, all in one message."""

from tests.params.params_edits import LEAVES, READ, edit_params_text, list_problems, set_values

NAMED_BY_USER = {
    ("train_draft", "checkpoints"),
    ("benchmark", "workloads"),
    ("prepare_prompts", "sets"),
    ("schedule", "stages"),
    ("benchmark_served", "servers"),  # or the engine's
}
SECTIONS = sorted({key_path[:depth] for key_path in LEAVES for depth in range(len(key_path))} - NAMED_BY_USER)


def test_an_unknown_key_is_named_with_the_known_ones() -> None:
    set_values({(*section, "zebra"): "green" for section in SECTIONS})
    expected = set()
    for section in SECTIONS:
        inside = READ
        for part in section:
            inside = inside[part]
        optional = ["method", "horizon_epochs"] if section[:-1] == ("train_draft", "checkpoints") else []
        key, known = ".".join([*section, "zebra"]), ", ".join([*inside, *optional])
        expected.add(f"{key}: unknown key; known keys are {known}. Correct the spelling, or leave the key out")
    assert set(list_problems()) == expected


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
        "trian_draft: unknown key, and train_draft is missing (did you mean train_draft?); rename it"
    ]
    assert [line.split(";")[0] for line in found if "rename" not in line] == [
        "target.model: missing, and it has no default",
        "check_overfit.min_tua: unknown key (did you mean min_tau?)",
        "benchmark.workloads.eval.colour: unknown key",
        "benchmark.workloads.eval.concurency: unknown key (did you mean concurrency?)",
    ]


def test_every_problem_is_told_at_once() -> None:
    edit_params_text(("seed: 7", "seed: -7"), ("dtype: float32 ", "dtype: float8 "), ("max_chars:", "max_char:"))
    assert [line.split(":")[0] for line in list_problems()] == [
        "target.dtype", "prepare_target.seed", "fix_data.max_char",
    ]  # fmt: skip
