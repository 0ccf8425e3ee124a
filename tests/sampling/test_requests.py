"""Requests: one per assistant message, in order; tools, calls and reasoning in the form of templates and servers."""

import json
from pathlib import Path
from typing import Any

import polars as pl

from stages.data import conversations
from stages.sampling import requests

CALL = {"id": "abc", "type": "function", "function": {"name": "sky", "arguments": '{"at": "Oslo", "b": 1}'}}


def row(name: str, turns: str, **changes: Any) -> dict[str, Any]:
    """Return a row whose `turns` are letters (u, a, t); the content of message n is "n"."""
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": roles[letter], "content": str(n)} for n, letter in enumerate(turns)]
    empty = dict.fromkeys(("tools", "tool_calls", "reasoning", "trained", "images"))
    return {"id": name, "messages": messages, "source": "x", "source_row": 0, "verdict": "clean", **empty, **changes}


def read_all(
    tmp_path: Path, rows: list[dict[str, Any]], most: int | None = None, is_even: bool = False
) -> list[list[requests.TargetRequest]]:
    path = tmp_path / "train.parquet"
    conversations.write_table(path, pl.DataFrame(rows, schema=conversations.FIXED_SCHEMA), conversations.FIXED_SCHEMA)
    return list(requests.read_requests(path, requests.select_requests(path, most, is_even)))


def names_of(found: list[list[requests.TargetRequest]]) -> set[str]:
    return {q.id for group in found for q in group}


def rows_of(source: str, count: int) -> list[dict[str, Any]]:
    """Return conversations of one turn whose texts name their source."""
    rows = [row(f"{source}-{n}", "ua", source=source, source_row=n) for n in range(count)]
    for n, one in enumerate(rows):
        one["messages"][0]["content"] = f"question {n} of {source}"
    return rows


def test_one_request_for_each_answer_in_order(tmp_path: Path) -> None:
    """Also for a question alone, and none for an answer that is not to be learned (two bugs: each had the other number)."""
    untrained = row("w", "uauau", trained=[True, False, True, True, True])
    rows = [row("x", "uaua"), row("open", "u"), untrained, row("z", "uaua")]
    found = read_all(tmp_path, rows)
    assert [[(q.position, q.id, q.answer_index) for q in group] for group in found] == [
        [(0, "x.0", 1), (1, "x.1", 3)], [(2, "open.0", 1)], [(3, "w.0", 3), (4, "w.1", 5)], [(5, "z.0", 1), (6, "z.1", 3)],
    ]  # fmt: skip
    assert [q.num_earlier_answers for q in found[2]] == [1, 2] and found[1][0].answer is None
    for most in range(9):
        some = read_all(tmp_path, rows, most)
        assert sum(map(len, some)) == min(most, 7)
        assert [q.position for group in some for q in group] == list(range(min(most, 7)))


def test_more_data_replaces_few_rows_and_more_rows_none(tmp_path: Path) -> None:
    """A file with a tenth more rows replaces about a tenth of the selected ones."""
    rows = rows_of("a.jsonl", 400)
    before = names_of(read_all(tmp_path, rows, 100))
    after = names_of(read_all(tmp_path, rows_of("0.jsonl", 40) + rows, 100))
    assert {name for name in after if name.startswith("a")} < before
    assert len(before & after) >= 80
    assert before < names_of(read_all(tmp_path, rows, 150))


def test_images_are_content_parts_in_order(tmp_path: Path) -> None:
    """The forms of templates and servers, and the images before each answer."""
    rows = [row("x", "uaua", images=["a.png", "b.png", "c.png"]), row("y", "ua"), row("z", "ua", images=["d.png"])]
    rows[0]["messages"][0]["content"] = "<image><image>which?"
    rows[0]["messages"][2]["content"] = "and <image> now"
    rows[1]["messages"][0]["content"] = "a text with <image> in it"
    rows[2]["messages"][1]["content"] = "so: <image>"
    (first, second), (text,), (answer,) = read_all(tmp_path, rows)
    assert first.messages[0]["content"] == [
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": "which?"},
    ]
    assert [part.get("text") for part in first.messages[2]["content"]] == ["and ", None, " now"]
    assert (first.images, second.images) == (["a.png", "b.png"], ["a.png", "b.png", "c.png"])
    assert text.messages[0]["content"] == "a text with <image> in it" and not text.images
    assert (first.unusable_reason, text.unusable_reason, answer.unusable_reason) == (None, None, "image_in_answer")
    sent = requests.convert_to_openai(first.messages, lambda path: f"data:{path}")
    assert sent[2]["content"] == [
        {"type": "text", "text": "and "},
        {"type": "image_url", "image_url": {"url": "data:c.png"}},
        {"type": "text", "text": " now"},
    ]
    assert sent[1] is first.messages[1] and "image" in first.messages[0]["content"][0]


def test_a_result_belongs_to_the_call_that_it_names(tmp_path: Path) -> None:
    """Bug: results were matched with calls by position, so one that came first was the answer to another call."""
    calls = json.dumps([{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in ("paris", "rome")])
    named = [json.dumps({"tool_call_id": name, "name": "clock"}) for name in ("rome", "paris")]
    ((request,),) = read_all(
        tmp_path, [row("x", "uattu", tool_calls=[None, calls, *named, None], trained=[True, False] + [True] * 3)]
    )
    assert [m.get("tool_call_id") for m in request.messages] == [None, None, "rome", "paris", None]
    assert request.messages[2]["name"] == "clock"


def test_a_few_requests_are_from_every_file(tmp_path: Path) -> None:
    """Bug: train_rows and eval_rows took the first rows: with a folder of two files, all were of the first."""
    rows = rows_of("a.jsonl", 300) + rows_of("b.jsonl", 100)
    found = names_of(read_all(tmp_path, rows, 100))
    assert len(found) == 100
    assert 15 <= sum(name.startswith("b") for name in found) <= 35
    selection = requests.select_requests(tmp_path / "train.parquet", 100)
    assert list(selection.sources) == ["a.jsonl", "b.jsonl"]
    assert selection.num_requests == sum(share.asked for share in selection.sources.values()) == 100
    assert selection.num_unrequested == 300
    assert selection.sources["b.jsonl"].asked == sum(name.startswith("b") for name in found)
    assert selection.sources["b.jsonl"].asked + selection.sources["b.jsonl"].not_asked == 100
    rows += rows_of("c.jsonl", 20)
    for most, asked in ((100, [40, 40, 20]), (250, [130, 100, 20])):
        names = names_of(read_all(tmp_path, rows, most, is_even=True))
        assert [sum(name.startswith(source) for name in names) for source in "abc"] == asked
