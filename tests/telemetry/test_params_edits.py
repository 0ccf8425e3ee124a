"""A stage that `dvc repro` runs warns at its end of keys of params.yaml that were edited meanwhile."""

from pathlib import Path

import pytest

from stages.telemetry.params_edits import warn_about_params_edits

BEFORE = "train_draft: {learning_rate: 0.0007, checkpoints: {e003: {epochs: 3}}}\nreport: {title: a}\n"
AFTER = (
    "train_draft: {learning_rate: 0.0009, checkpoints: {e003: {epochs: 3}, e009: {epochs: 9}}}\nreport: {title: a}\n"
)


def run_and_edit(text: str) -> None:
    Path("params.yaml").write_text(BEFORE)
    with warn_about_params_edits("train_draft@e003"):
        Path("params.yaml").write_text(text)


@pytest.fixture(autouse=True)
def of_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "train_draft@e003")
    monkeypatch.delenv("AERIE_STARTED_PARAMS", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def test_edited_and_added_keys_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: `dvc repro` recorded a result with values that were edited while the stage was at work, without a word."""
    run_and_edit(AFTER)
    output = capsys.readouterr().err
    assert (
        "edited while train_draft@e003 was at work (train_draft.learning_rate, train_draft.checkpoints.e009)" in output
    )
    assert "run: dvc repro -f -s train_draft@e003" in output


def test_another_comment_or_order_is_no_edit(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = BEFORE.splitlines()
    run_and_edit(f"# a comment\n{second}\n{first}\n")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("variable", ["AERIE_STARTED_PARAMS", "RANK"])
def test_a_stage_with_a_copy_and_a_further_rank_say_nothing(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    run_and_edit(AFTER)
    assert capsys.readouterr().err == ""


def test_a_file_that_is_half_written_fails_no_stage(capsys: pytest.CaptureFixture[str]) -> None:
    run_and_edit("train_draft: {learning_rate: ")
    assert "(train_draft, report)" in capsys.readouterr().err
