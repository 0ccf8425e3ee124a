"""Read CSV and TSV as tables of text, a few MiB at a time.

The first line names the columns. Fields that hold the delimiter, a quote or a line break are quoted, as spreadsheets and
csv writers do it. Not polars' and pyarrow's readers: neither names the line of a broken record.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import polars as pl

from stages.data.json_lines import MAX_ROW_BYTES

DELIMITERS = {".csv": ",;\t|", ".tsv": "\t", ".tab": "\t"}  # of .csv the one that splits the header into most columns
MAX_HEADER_CHARACTERS = 1 << 20


def read_tables(text: TextIO, path: Path, kind: str, chunk_bytes: int, chunk_rows: int) -> Iterator[pl.DataFrame]:
    """Yield the records of an open file as columns of strings; an empty first table where there are none.

    `text` is opened with newline="". Blank lines are no records.

    Raises:
        ValueError: naming the file and the line of a header or record that can't be read.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    header, delimiter, line_before = _read_header(text, path, kind)
    schema = dict.fromkeys(header, pl.String)
    rows: list[list[str]] = []
    size = 0
    yield pl.DataFrame(schema=schema)
    records = _read_records(_RecordLines(text), delimiter, path, line_before)
    for start, record in records:
        if len(record) != len(header):
            shown, advice = " | ".join(record), "quote fields that hold the delimiter, a quote or a line break"
            if len(record) < len(header):
                advice = "write the missing fields, if only as delimiters, or take the line out"
            raise ValueError(
                f"{path}, line {start}: expected {len(header)} fields, as the header has columns, found {len(record)}: "
                f"{shown[:80] + '…' * (len(shown) > 80)!r}; {advice}"
            )
        rows.append(record)
        size += sum(map(len, record))
        if size >= chunk_bytes or len(rows) >= chunk_rows:
            yield pl.DataFrame(rows, schema=schema, orient="row")
            rows, size = [], 0
    if rows:
        yield pl.DataFrame(rows, schema=schema, orient="row")


def _read_header(text: TextIO, path: Path, kind: str) -> tuple[list[str], str, int]:
    """Return (names of the columns, the delimiter, number of lines read)."""
    delimiters, line, lines = DELIMITERS[kind], text.readline(MAX_HEADER_CHARACTERS), 1
    if named := re.fullmatch(r"sep=(.)\s*", line):  # how spreadsheets name the delimiter
        delimiters, line, lines = named[1], text.readline(MAX_HEADER_CHARACTERS), 2
    if len(line) == MAX_HEADER_CHARACTERS:
        raise ValueError(f"{path}: expected a first line that names the columns, found one of {len(line):,} characters")
    if not line.strip():
        raise ValueError(f"{path}: expected a first line that names the columns, found an empty one; add it")
    try:
        fields = [(next(csv.reader([line], delimiter=one, strict=True)), one) for one in delimiters]
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines}: expected the names of the columns ({error}); fix that line") from None
    header, delimiter = max(fields, key=lambda found: len(found[0]))
    header = [name.strip() for name in header]
    if repeated := sorted(name for name, count in Counter(header).items() if count > 1):
        raise ValueError(f"{path}: expected each column named once, found {repeated[0]!r} twice; rename one")
    return header, delimiter, lines


class _RecordLines:
    """The lines of a text, until those of one record have too many characters: a quote is missing, or the file is a trap."""

    def __init__(self, text: TextIO) -> None:
        self._text, self.characters = text, 0

    def __iter__(self) -> "_RecordLines":
        return self

    def __next__(self) -> str:
        line = self._text.readline(MAX_ROW_BYTES)
        self.characters += len(line)
        if self.characters >= MAX_ROW_BYTES:
            raise csv.Error(f"it has more than {MAX_ROW_BYTES:,} characters")
        if not line:
            raise StopIteration
        return line


def _read_records(lines: _RecordLines, delimiter: str, path: Path, line_before: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (the line on which a record starts, its fields)."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start, lines.characters = line_before + reader.line_num + 1, 0
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {start}: expected a record of quoted or plain fields ({error}); double each quote inside a "
                "quoted field, and close the last one"
            ) from None
        if record:
            yield start, record
