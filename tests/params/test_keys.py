"""Missing, unknown, misspelt and earlier keys of params.yaml are named, all in one message."""

from tests.params.params_edits import edit_params_text, list_problems


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
