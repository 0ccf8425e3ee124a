"""CSV and TSV give what the csv module and pandas' convention wrote; a broken one is refused by its line."""

import csv
import io
import random
from pathlib import Path
from typing import Any

import pytest

from stages.data import readers

NAMED = {"prompt": "Frage", "answer": "Antwort"}


def rows_of(path: Path, columns: dict[str, str] | None = None) -> list[dict[str, Any]]:
    return [
        row or {}
        for c in readers.read_all_chunks(path, {}, choose_columns=lambda file: columns)
        for _, row in readers.parse_chunk(c)
    ]


@pytest.mark.parametrize(
    ("name", "delimiter"), [("a.csv", ","), ("a.csv", ";"), ("a.csv", "|"), ("a.tsv", "\t"), ("a.tab", "\t")]
)
@pytest.mark.parametrize("ends", ["\r\n", "\n"])
def test_what_csv_writes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, delimiter: str, ends: str
) -> None:
    monkeypatch.setattr(readers, "CHUNK_ROWS", 7)
    rng = random.Random(delimiter)
    texts = ["".join(rng.choices("a雨\"\n\t,;|' ", k=rng.randrange(1, 30))) for _ in range(120)]
    wanted = [{"question": q, "answer": a, "other": ""} for q, a in zip(texts[::2], texts[1::2], strict=True)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(wanted[0]), delimiter=delimiter, lineterminator=ends)
    writer.writeheader()
    writer.writerows(wanted)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + buffer.getvalue().encode())
    assert rows_of(tmp_path / name) == wanted


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        ("Frage,Antwrt\na,b\n", NAMED, r"a\.csv: expected the columns Antwort \(did you mean Antwrt\?\) \(for answer\), as"),
        ("Frage,Antwort\na,b\n", None, r"a\.csv: expected columns of a known format .* found the columns Frage, Antwort; say"),
        ("hello\nworld\n", None, r"found the columns hello; say which"),
        ("prompt,answer\na,b\nc\n", None, r"a\.csv, line 3: expected 2 fields, as the header has columns, found 1: 'c'; write"),
        ('prompt,answer\n"a\nb",c\n"d,e\n', None, r"a\.csv, line 4: expected a record of quoted or plain fields"),
        ("prompt,answer\ncaf\xe9,b\n", None, r"a\.csv: expected UTF-8, found the byte 0xe9"),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_message(tmp_path: Path, data: str, columns: dict[str, str] | None, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(data.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "a.csv", columns)


@pytest.mark.parametrize("columns", [None, {"messages": "messages"}])
def test_turns_may_be_json_in_a_cell(tmp_path: Path, columns: dict[str, str] | None) -> None:
    turns = '"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""assistant"", ""content"": ""b""}]"'
    (tmp_path / "a.csv").write_text(f"id,messages\n1,{turns}\n2,[no list\n")
    found = rows_of(tmp_path / "a.csv", columns)
    wanted = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert found == [{"id": "1", "messages": wanted}, {"id": "2", "messages": "[no list"}]
