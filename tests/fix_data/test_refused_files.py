"""Raw files that stop fix_data: every error says where, what was expected and what to do."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stages import fix_data
from stages.data import readers
from stages.data.tables.table_schema import load_table_file
from tests.fix_data.raw_rows import (
    ASK,
    CUT,
    RAW,
    TABLE,
    nested,
    outcome,
    questions,
    row,
    set_lines,
    set_params,
    write_raw,
)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"id": "a", "conversations": [', '\'{"id": "a", "conversations": [\''),
        ("[1, 2]", "'[1, 2]'"),
        ('{"messages": []}', "'{\"messages\": []}'"),
        ('{"conversations": "hello"}', '\'{"conversations": "hello"}\''),
    ],
)
def test_a_line_that_is_no_conversation_stops_the_stage(home: Path, line: str, found: str) -> None:
    set_params(format="sharegpt")
    write_raw([*questions(4), line, *questions(2)])
    with pytest.raises(ValueError, match="line 5: expected") as error:
        fix_data.main()
    assert str(RAW) in str(error.value) and f"found {found}" in str(error.value) and "fix" in str(error.value)
    assert not fix_data.TRAIN_FILE.exists() and not fix_data.REPORT.exists()


def test_all_broken_lines_are_named_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a file with several broken lines stopped the stage once for each of them, with two "line"s in the message."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2_000)  # the second and third are in later chunks
    cut = json.dumps(row("Cut?", TABLE))[:-3]
    write_raw([*questions(4), cut, *questions(30), "[1]", "7", *questions(3)])
    with pytest.raises(ValueError, match="line 5: expected one JSON object per line") as error:
        fix_data.main()
    message = str(error.value)
    assert (
        re.search(r"found '\{.*…' \(Expecting ',' delimiter at character \d+\); ", message)
        and message.count("line ") == 1
    )
    assert "3 of 40 lines are broken: 5, 36, 37; fix them, or write a copy without: sed '5d;36d;37d' " in message
    command = message.rpartition("without: ")[2].removesuffix(", and put that in its place")
    subprocess.run(command, shell=True, check=True)
    Path(f"{RAW}.whole").replace(RAW)
    assert outcome()[2]["rows_in"] == 37


def test_blank_lines_are_no_rows(home: Path) -> None:
    """Bug: a blank last line, as many files have, was a broken one."""
    write_raw([*questions(20), " ", *questions(20), "", ""])
    assert outcome()[2]["rows_in"] == 40


def test_one_broken_line_is_enough(home: Path) -> None:
    write_raw([*questions(4), '{"a": 1,}'])
    with pytest.raises(ValueError, match=r"line 5: .* at character \d+\); fix that line, or write a copy") as error:
        fix_data.main()
    assert "lines are broken" not in str(error.value)


def test_a_broken_schema_stops_the_stage_before_any_work(home: Path) -> None:
    outcome()
    before = fix_data.TRAIN_FILE.read_bytes()
    Path("data/tables/weather.yaml").write_text("keys: {place: {type: txt}}")
    load_table_file.cache_clear()
    with pytest.raises(ValueError, match=r"weather\.yaml: keys\.place: unknown type txt \(did you mean text\?\)"):
        fix_data.main()
    assert fix_data.TRAIN_FILE.read_bytes() == before and not fix_data.WAITING_FOLDER.exists()
    load_table_file.cache_clear()
    Path("data/tables/weather.yaml").unlink()
    with pytest.raises(ValueError, match=r"fix_data\.tables is data/tables/weather\.yaml, which does not exist"):
        fix_data.main()


@pytest.mark.parametrize("first", [True, False])
def test_a_file_in_latin1_is_to_be_converted_and_loses_no_row(home: Path, first: bool) -> None:
    """Bug: the advice was `sed '1d'`, which drops the row."""
    lines = [json.dumps(one, ensure_ascii=False) for one in [row("Café?", TABLE), *questions(39)]]
    lines = lines if first else lines[::-1]
    RAW.write_bytes("".join(f"{line}\n" for line in lines).encode("latin1"))
    with pytest.raises(ValueError, match=rf"line {1 if first else 40}: expected one JSON object per line") as error:
        fix_data.main()
    message = str(error.value)
    assert "sed" not in message and "1 of 40 lines are no UTF-8: " in message
    command, then = re.findall(r"convert the file: (.*), and put that in its place( \(.*\)$)", message)[0]
    assert command == f"iconv -f cp1252 -t utf-8 {RAW} > {RAW}.utf8" and "-f latin1" in then
    subprocess.run(command, shell=True, check=True)
    Path(f"{RAW}.utf8").replace(RAW)
    assert outcome()[2]["rows_in"] == 40


def test_a_damaged_line_of_a_file_in_utf8_is_not_to_be_converted(home: Path) -> None:
    """A conversion from Latin-1 would damage the lines that are whole."""
    whole = json.dumps(row("Café?", TABLE), ensure_ascii=False).encode()
    RAW.write_bytes(whole + b"\n" + whole.replace(b"\xc3", b"") + b"\n")
    with pytest.raises(ValueError, match=r"line 2: .*; fix that line, or write a copy without: sed '2d' "):
        fix_data.main()


@pytest.mark.parametrize(
    ("name", "text"), [("z.csv", "prompt,answer\nCafé?,ja\n"), ("z.json", '[{"prompt": "Café?", "answer": "ja"}]')]
)
def test_tables_and_arrays_in_latin1_are_to_be_converted(home: Path, name: str, text: str) -> None:
    """Bug: of an array the advice was to fix it, or to write it as JSONL."""
    set_params(raw=name, answers="text")
    Path(name).write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=rf"convert the file: iconv -f cp1252 -t utf-8 {name} > {name}\.utf8, and put"):
        fix_data.main()


@pytest.mark.parametrize(
    ("name", "text"),
    [("z.csv", "prompt,answer\nCafé?,schön\n"), ("z.json", '[{"prompt": "Café?", "answer": "schön"}]')],
)
def test_a_damaged_table_or_array_in_utf8_is_not_to_be_converted(home: Path, name: str, text: str) -> None:
    """Bug: a conversion from Latin-1 was advised, which would have spoilt every character beyond ASCII without a word."""
    set_params(raw=name, answers="text")
    Path(name).write_bytes(text.encode().replace("é".encode(), b"\xe9"))
    with pytest.raises(
        ValueError, match=r"; fix it at that byte, since its other characters are UTF-8, or give"
    ) as error:
        fix_data.main()
    assert "iconv" not in str(error.value)
    Path(name).write_bytes(b"\xff\xfe" + text.encode("utf-16-le"))
    with pytest.raises(ValueError, match="save it as UTF-8") as error:
        fix_data.main()
    assert "iconv" not in str(error.value)


def test_lines_that_are_broken_otherwise_are_named_too(home: Path) -> None:
    """Bug: of a file in Latin-1 only the lines that are no UTF-8 were named."""
    whole = json.dumps(row("Café?", TABLE), ensure_ascii=False).encode("latin1")
    RAW.write_bytes(whole + b"\n[1]\n" + json.dumps(row("Tea?", TABLE)).encode() + b"\n")
    with pytest.raises(ValueError, match=r"1 of 3 lines are no UTF-8: 1; 1 of 3 lines are broken: 2; convert"):
        fix_data.main()


def test_a_missing_raw_file_is_named_with_its_key(home: Path) -> None:
    RAW.unlink()
    with pytest.raises(ValueError, match=f"fix_data.raw is {RAW}, which does not exist"):
        fix_data.main()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"it has no lines\); add some, or give another path$"),
        ([row(ASK, "I don't know."), row(ASK, CUT)], "row_width 1.*set fix_data.answers: text"),
        ([row(ASK, CUT, status="error", error="timeout")], r"marked_error 1\); fix the data \(.*\), first .* row 0: 'timeout'"),
        ([nested(100_000)] * 2 + [row(ASK, CUT)], r"nested_too_deep 2, row_width 1\); fix the data \(.*\), first .* row 0$"),
        ([{"Frage": "a"}] * 2 + [row(ASK, CUT)], r"unknown_format 2, .*\); 2 rows are of no known format, first .* row 0: "),
    ],
)  # fmt: skip
def test_a_file_without_one_usable_row_says_why(home: Path, rows: list[Any], message: str) -> None:
    """Bug: whatever the most rows were dropped for, the advice was on TOON answers."""
    write_raw(rows)
    with pytest.raises(ValueError, match=f"found none .*{message}"):
        fix_data.main()


def test_an_error_in_another_process_is_the_same_message(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2_000)
    write_raw([*questions(40), "no json", *questions(40)])
    with pytest.raises(ValueError, match="line 41: expected one JSON object per line, found 'no json'"):
        fix_data.main()
    assert not fix_data.WAITING_FOLDER.exists() and not fix_data.TRAIN_FILE.exists()


def test_rows_of_no_known_format_say_which_formats_there_are(home: Path) -> None:
    write_raw([{"Frage": "a", "Antwort": "b"}] * 3)
    with pytest.raises(
        ValueError, match=r"row 0: .*Frage.* sharegpt: a list 'conversations'; .* fix_data.columns, as"
    ) as e:
        fix_data.main()
    assert "toon" not in str(e.value).lower().replace("weather_toon.jsonl", "")


def test_a_datasets_id_as_raw_says_how_it_is_read(home: Path) -> None:
    set_lines(raw="HuggingFaceH4/ultrachat_200k")
    with pytest.raises(
        ValueError, match=r"for the dataset HuggingFaceH4/ultrachat_200k of the Hub write a file NAME\.hub\.yaml"
    ):
        fix_data.main()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_brackets_without_end_are_no_rows(home: Path, name: str) -> None:
    Path("data/deep").mkdir()
    Path("data/deep", name).write_text("[" * 100_000 + "\n")
    set_params(raw="data/deep")
    with pytest.raises(ValueError, match=rf"data/deep/{name}.*expected"):
        fix_data.main()


def test_a_process_that_is_killed_is_one_message(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a process killed by the kernel for memory ended in a traceback."""

    class Pool(fix_data.ProcessPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            return super().submit(os._exit, 9)

    monkeypatch.setattr(fix_data, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(fix_data.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2_000)
    write_raw(questions(40))
    with pytest.raises(ValueError, match=r"one of 2 processes was killed, expected .* fewer cores"):
        fix_data.main()
    assert not fix_data.WAITING_FOLDER.exists()
