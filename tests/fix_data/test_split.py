"""Which rows are for training and which for evaluation, and which are dropped as like another."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stages import fix_data
from tests.fix_data.raw_rows import RAW, TABLE, outcome, pairs, questions, row, set_lines, set_params, write_raw


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


def altered(r: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a nearly equal conversation."""
    return {**r, "answer": r["answer"][:200] + "#" + r["answer"][201:], **more}


def test_the_first_of_near_duplicates_is_kept(home: Path) -> None:
    rows = pairs(60)
    write_raw([*rows, *(altered(r, id=f"near {r['id']}") for r in rows[:20])])
    set_lines()
    _, _, report = outcome()
    assert report["rows_out"] == 80 and report["near_duplicates"] is None and report["overlap"]["near"] is None
    set_lines(near_duplicate_threshold="0.8")
    train, evaluation, report = outcome()
    # The question, and so the split, is that of the first.
    assert report["dropped_reasons"] == {"near_duplicate": 20} and report["near_duplicates"]["dropped"] == 20
    assert not any(name.startswith("near") for name in [*train["id"], *evaluation["id"]])
    examples = report["near_duplicates"]["examples"]
    assert all(0.8 <= e["likeness"] < 1 and e["first"] != e["second"] for e in examples)
    numbers = [
        [int(e[column].removeprefix(f"{RAW.name}, row ")) for column in ("first_origin", "second_origin")]
        for e in examples
    ]
    assert numbers and all(second == first + 60 for first, second in numbers)
    assert all(e["first"].startswith(rows[first]["prompt"]) for e, (first, _) in zip(examples, numbers, strict=True))


@pytest.mark.parametrize("policy", ["remove", "keep"])
def test_near_duplicates_across_the_hash_split(home: Path, policy: str) -> None:
    """The questions differ by a letter, so the hash may assign the two to different splits: the eval row is kept."""
    rows = pairs(100)
    twins = [{**r, "id": f"near {r['id']}", "prompt": r["prompt"] + "!"} for r in rows]
    write_raw([*rows, *twins])
    set_lines()
    train, evaluation, _ = outcome()
    side = dict.fromkeys(train["id"], "train") | dict.fromkeys(evaluation["id"], "eval")
    apart = sum(side[r["id"]] != side[f"near {r['id']}"] for r in rows)
    assert apart > 5
    set_lines(near_duplicate_threshold="0.8", eval_overlap=policy)
    train, evaluation, report = outcome()
    assert report["overlap"] == {"policy": policy, "exact": 0, "near": apart}
    if policy == "remove":
        assert report["dropped_reasons"] == {"near_duplicate": 100 - apart, "near_eval": apart}
        assert report["rows_out"] == 100
    else:
        assert report["dropped_reasons"] == {"near_duplicate": 100 - apart} and report["rows_out"] == 100 + apart
    assert set(evaluation["id"]) >= {r["id"] for r in rows if side[r["id"]] == "eval"}


@pytest.mark.parametrize("policy", ["remove", "keep"])
def test_a_given_eval_file_wins_over_training_rows_that_come_before_it(home: Path, policy: str) -> None:
    folder = Path("data/both")
    folder.mkdir()
    rows = pairs(90)
    near = {**rows[3], "id": "near", "prompt": "Please: " + rows[3]["prompt"]}
    for name, some in (("a_train.jsonl", [*rows[:10], near, *rows[30:]]), ("z_test.jsonl", [*rows[:30], rows[0]])):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in some))
    set_lines(raw="data/both", eval_file="z_test.jsonl", eval_overlap=policy, near_duplicate_threshold="0.8")
    train, evaluation, report = outcome()
    assert evaluation["id"].to_list() == [r["id"] for r in rows[:30]]
    assert (
        report["rows_in"] == 102 and report["overlap"] == {"policy": policy, "exact": 10, "near": 1}
    ) or policy == "keep"
    if policy == "remove":
        assert train["id"].to_list() == [r["id"] for r in rows[30:]]
        assert report["dropped_reasons"] == {"duplicate": 1, "in_eval": 10, "near_eval": 1}
    else:
        assert report["overlap"]["exact"] == 10 and train.height >= 60
    assert set(evaluation["source"]) == {"z_test.jsonl"}
