"""A file that can't be read under its name is said to be what it is."""

from pathlib import Path

import pytest

from stages.data import readers


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"question,answer\nq,a\n", r"a\.jsonl, line 1: .*holds 20 bytes that begin with 'question,answer.*CSV, TSV"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "run git lfs pull"),
        ("a.json", b"<html>", "a failed download"),
        ("a.xlsx", b"PK\x03\x04", r"a\.xlsx: expected JSONL, JSON, CSV.* of another name with 4 bytes that are a ZIP"),
        ("a.parquet", b"question,answer\n", "expected a whole .parquet file, found .* in 16 bytes that begin with 'question"),
    ],
)  # fmt: skip
def test_an_unreadable_file_says_what_was_read_where_and_what_can_be(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    """Bug: a CSV named .jsonl was "expected one JSON object per line", without what it is and what could be read."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        [row for c in readers.read_all_chunks(tmp_path / name, {}) for row in readers.parse_chunk(c)]
