"""One row, one verdict: clean, repaired by named rules, or dropped for one reason that is counted."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stages import fix_data
from tests.fix_data.raw_rows import ASK, CUT, RAW, TABLE, nested, outcome, questions, row, set_params, write_raw

SAY_HELLO = {"from": "gpt", "value": "Hello! Which place?"}
ROWS = [
    ("clean", row(ASK, TABLE), "clean"),
    ("no system message", row(ASK, TABLE, system=None), "clean"),
    ("fenced", row(ASK, f"```toon\n{TABLE}\n```"), "repaired:fence"),
    ("first answer cut", row(ASK, CUT, "1 more day?", TABLE), "row_width"),
    ("second answer cut", row(ASK, TABLE, "1 more day?", CUT), "row_width"),
    ("another horizon than asked", row("Forecast for Oslo, 2 days.", TABLE), "row_count"),
    ("empty answer in the middle", row(ASK, "", ASK, TABLE), "empty_turn"),
    ("ends in a question", row(ASK, TABLE, "1 more day?"), "clean"),
    ("ends in a blank question", row(ASK, TABLE, " "), "repaired:blank_question"),
    ("begins with a greeting", {"conversations": [SAY_HELLO, *row(ASK, TABLE, system=None)["conversations"]]},
     "repaired:opening_answer"),
    ("system in the middle", {"conversations": row(ASK, TABLE)["conversations"] + row(ASK, TABLE)["conversations"]},
     "wrong_turns"),
    ("no format at all", {"text": "Once upon a time"}, "unknown_format"),
    ("too long", row(ASK + "!" * 8_000, TABLE), "too_long"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "verdict"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_verdict_of_a_row(home: Path, raw: dict[str, Any], verdict: str) -> None:
    write_raw([*questions(30), raw])
    train, evaluation, report = outcome()
    kept = pl.concat([train, evaluation]).filter(pl.col("source_row") == 30)
    assert report["rows_in"] == 31 and report["rows_out"] == 30 + kept.height
    if verdict == "clean" or verdict.startswith("repaired"):
        assert kept["verdict"].to_list() == [verdict] and report["dropped_reasons"] == {}
        assert [m["content"] for m in kept["messages"].to_list()[0] if m["role"] == "assistant"][-1] == TABLE
    else:
        assert kept.height == 0 and report["dropped_reasons"] == {verdict: 1}


def test_duplicates_are_found_after_repair(home: Path) -> None:
    write_raw([*questions(30), *questions(30)[:2], row(ASK, TABLE), row(ASK, f"```\n{TABLE}\n```"), row(ASK, CUT)])
    _, _, report = outcome()
    assert report["dropped_reasons"] == {"duplicate": 3, "row_width": 1} and report["rules"] == {}


@pytest.mark.parametrize("levels", [900, 100_000])
@pytest.mark.parametrize("kind", ["tools", "tools as text", "calls", "parts"])
def test_a_row_that_is_nested_too_deep_is_dropped_by_that_reason(home: Path, kind: str, levels: int) -> None:
    """Bug: tools nested 900 deep ended the stage by RecursionError."""
    deep = nested(levels)
    messages = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    image_turn = f'{{"role": "user", "content": [{{"type": "image_url", "image_url": {deep}}}]}}'
    called = f'{{"role": "assistant", "content": null, "tool_calls": [{deep}]}}'
    line = {
        "tools": f'{{"messages": {messages}, "tools": [{deep}]}}',
        "tools as text": f'{{"messages": {messages}, "tools": {json.dumps(deep)}}}',
        "calls": f'{{"messages": [{{"role": "user", "content": "a"}}, {called}]}}',
        "parts": f'{{"messages": [{image_turn}, {{"role": "assistant", "content": "b"}}]}}',
    }[kind]
    write_raw([*questions(30), line])
    set_params(answers="text")
    _, _, report = outcome()
    reason = "image_missing" if kind == "parts" and levels == 900 else "nested_too_deep"
    assert report["dropped_reasons"] == {reason: 1} and report["rows_out"] == 30
    assert report["dropped_first"] == {reason: "weather_toon.jsonl, row 30"}


def test_too_many_dropped_rows_stop_the_stage_with_reasons(home: Path) -> None:
    """Other tools drop half the data with a line in a log, and train the draft on the rest."""
    write_raw([*questions(30), *[row(f"{n} {ASK}", CUT) for n in range(9)], *[{"text": "once"}] * 11])
    train, _, _ = outcome()  # 40% lost
    set_params(max_dropped_share="0.39")
    before = fix_data.TRAIN_FILE.read_bytes()
    with pytest.raises(ValueError, match=r"20 of 50 rows \(40%\) are dropped, expected at most 39%") as error:
        fix_data.main()
    lines = str(error.value).splitlines()
    assert lines[1] == f'  unknown_format 11, first {RAW.name}, row 39: \'{{"text": "once"}}\''
    assert lines[2].startswith(f"  row_width 9, first {RAW.name}, row 30: 'place: Oslo")
    assert "raise max_dropped_share" in lines[3]
    assert fix_data.TRAIN_FILE.read_bytes() == before and not fix_data.WAITING_FOLDER.exists()
    for passes in ("0.4", "null"):
        set_params(max_dropped_share=passes)
        assert outcome()[0].height == train.height
