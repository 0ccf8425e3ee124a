"""Missing, unknown, misspelt and earlier keys of params.yaml are named, all in one message."""

from tests.params.params_edits import edit_params_text, list_problems


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
