"""A file that can't be read under its name is said to be what it is."""

import gzip
import pickle
import zipfile
from pathlib import Path

import polars as pl
import pytest

from stages.data import file_content, readers


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    frame, path = pl.DataFrame({"a": [1]}), tmp_path / "x.jsonl"
    pl.DataFrame.write_parquet(frame, path)
    assert "Parquet: name it" in file_content.describe_content(path)
    frame.write_ipc(path)
    assert "Arrow IPC" in file_content.describe_content(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    assert "a ZIP archive" in file_content.describe_content(path)
    for data, words in (
        (gzip.compress(b"a"), "gzip"), (pickle.dumps({}, protocol=4), "pickle"), ("a\n".encode("utf-16"), "UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"), (b"", "an empty file"),
        (b"\n<!DOCTYPE html><title>404</title>", "an HTML"), (b"\x00\x01\x02" * 9, "the bytes 00 01 02"),
        ("雨".encode() * 400, "begin with '雨雨"), (b"question,answer\n", r"begin with 'question,answer\n'"),
    ):  # fmt: skip
        path.write_bytes(data)
        assert words in file_content.describe_content(path), words
    assert "can't be opened" in file_content.describe_content(tmp_path / "none")


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
        [row for c in readers.read_all_chunks(tmp_path / name, None, {}) for row in readers.parse_chunk(c)]
