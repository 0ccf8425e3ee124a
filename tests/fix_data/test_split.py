"""Which rows are for training and which for evaluation, and which are dropped as like another."""

import json
from pathlib import Path

import polars as pl
import pytest

from stages import fix_data
from tests.fix_data.raw_rows import TABLE, outcome, pairs, questions, row, set_lines, set_params, write_raw


def test_no_prompt_is_in_both_splits(home: Path) -> None:
    """The prompts of a conversation are its prefixes up to a question: none may be in both splits."""

    def prompts(table: pl.DataFrame) -> set[str]:
        return {
            json.dumps(messages[: index + 1])
            for messages in table["messages"].to_list()
            for index, message in enumerate(messages)
            if message["role"] == "user"
        }

    # The same questions with other answers and other second turns, which alone would hash differently.
    rows = questions(200)
    twins = [
        row(r["conversations"][1]["value"], TABLE, f"And the next 1 days? ({i})", TABLE) for i, r in enumerate(rows)
    ]
    write_raw([item for pair in zip(rows, twins, strict=True) for item in pair])
    train, evaluation, report = outcome()
    assert report["rows_out"] == 400 and not prompts(train) & prompts(evaluation)


@pytest.mark.parametrize(("share", "split", "change"), [("0.000001", "eval", "raise"), ("0.999999", "train", "lower")])
def test_an_empty_split_names_the_key(home: Path, share: str, split: str, change: str) -> None:
    write_raw(questions(20))
    set_params(eval_share=share)
    with pytest.raises(ValueError, match=f"fix_data.eval_share is .* the {split} split of 20 rows empty; {change} it"):
        fix_data.main()
    assert not fix_data.TRAIN_FILE.exists() and not fix_data.EVAL_FILE.exists()


def test_a_given_eval_file_wins_over_training_rows_that_come_before_it(home: Path) -> None:
    folder = Path("data/both")
    folder.mkdir()
    rows = pairs(90)
    for name, some in (("a_train.jsonl", [*rows[:10], *rows[30:]]), ("z_test.jsonl", [*rows[:30], rows[0]])):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in some))
    set_lines(raw="data/both", eval_file="z_test.jsonl")
    train, evaluation, report = outcome()
    assert evaluation["id"].to_list() == [r["id"] for r in rows[:30]]
    assert report["rows_in"] == 101 and train["id"].to_list() == [r["id"] for r in rows[30:]]
    assert report["dropped_reasons"] == {"duplicate": 1, "in_eval": 10}
    assert set(evaluation["source"]) == {"z_test.jsonl"}
