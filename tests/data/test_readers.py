"""Every supported kind of file returns its rows; every broken file is refused by name."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from stages.data import readers

ROWS: list[dict[str, Any]] = [
    {
        "id": str(n),
        "messages": [{"role": "user", "content": f"Zürich {n}? 🌧"}, {"role": "assistant", "content": "a\r\nb"}],
    }
    for n in range(50)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, indent=1).encode()
WRAPPED = json.dumps({"version": 1, "data": ROWS, "tags": ["x"]}, ensure_ascii=False).encode()


def zstd(data: bytes) -> bytes:
    """Compress with Arrow, an independent writer of .zst."""
    return pa.compress(data, codec="zstd", asbytes=True)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


def rows_of(path: Path, first: str | None = None) -> list[tuple[str, int, dict[str, Any]]]:
    return [
        (c.source, index, row)
        for c in readers.read_all_chunks(path, {}, lambda source: source == first)
        for index, row in readers.parse_chunk(c)
    ]


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl", LINES), ("a.ndjson", LINES), ("a.json", LINES), ("a.json", ARRAY), ("a.json", WRAPPED)],
    ids=["jsonl", "ndjson", "lines called json", "json", "in an object"],
)  # fmt: skip
def test_a_file_gives_its_rows(tmp_path: Path, name: str, data: bytes, packed: str) -> None:
    path = tmp_path / (name + packed)
    path.write_bytes(PACKERS[packed](data))
    assert rows_of(path) == [(path.name, n, row) for n, row in enumerate(ROWS)]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_an_array_on_one_line_is_never_whole_in_memory(tmp_path: Path, packed: str) -> None:
    """Bug: a .json was read and parsed whole; 1 GiB took 6 GiB of memory."""
    one = json.dumps({"prompt": "x" * 5_000, "answer": "y"})
    path = tmp_path / ("a.json" + packed)
    path.write_bytes(PACKERS[packed](b'{"rows": [' + ", ".join([one] * 20_000).encode() + b"]}"))  # 100 MiB
    tracemalloc.start()
    before = psutil.Process().memory_info().rss
    most = before
    try:
        chunks = 0
        for chunk in readers.read_all_chunks(path, {}):
            chunks += len(chunk.rows)
            most = max(most, psutil.Process().memory_info().rss)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chunks == 20_000 and peak < 32 << 20 and most - before < 64 << 20


def test_a_folder_is_its_files_by_name_the_given_one_first(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.jsonl", "deep/a.jsonl", ".hidden/c.jsonl", ".d.jsonl"):
        (tmp_path / name).write_text(json.dumps({"from": name}) + "\n")
    (tmp_path / "sky.png").write_bytes(b"\x89PNG")
    (tmp_path / "README.md").write_text("words")
    assert [s for s, _, _ in rows_of(tmp_path)] == ["b.jsonl", "deep/a.jsonl"]
    assert [s for s, _, _ in rows_of(tmp_path, "deep/a.jsonl")] == ["deep/a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("name", ["rows.md", "rows.parquet.gz", "rows", "rows.hub.yaml.gz"])
def test_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"expected JSONL, .* or a folder of those, found"):
        readers.list_files(tmp_path / name)
    with pytest.raises(ValueError, match="found no such file in the folder"):
        readers.list_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [(f"a.jsonl{packed}", pack(LINES)[:-40]) for packed, pack in PACKERS.items() if packed]
    + [("a.parquet", b"PAR1 and no more"), ("a.jsonl.gz", LINES), ("a.jsonl.xz", LINES), ("a.jsonl.bz2", LINES)],
)
def test_a_truncated_or_misnamed_file_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}: expected a whole .* file"):
        rows_of(tmp_path / name)


def test_half_a_surrogate_pair_and_nan_are_read_as_python_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d"}\n{"a": NaN}\n')
    assert [list(row) for _, _, row in rows_of(tmp_path / "a.jsonl")] == [["a"], ["a"]]


# --- the Hub ---------------------------------------------------------------------------------------------------------

COMMIT = "8049631c405ae6576f93f445c6b8166f76f5505a"


def pin(path: Path, **changes: Any) -> Path:
    keys = {"dataset": "someone/talk", "name": None, "split": "train", "revision": None} | changes
    path.write_text(json.dumps(keys))  # which is YAML too
    return path


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_dataset_goes_through_datasets(tmp_path: Path, offline_cache: Path) -> None:
    """A local folder in place of an id: the same loader without a download."""
    folder = tmp_path / "talk"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(LINES)
    (folder / "test.jsonl").write_bytes(LINES[: LINES.index(b"\n") + 1])
    path = pin(tmp_path / "talk.hub.yaml", dataset=str(folder))
    hub_records: dict[str, Any] = {}
    found = [row for c in readers.read_all_chunks(path, hub_records) for row in readers.parse_chunk(c)]
    assert found == list(enumerate(ROWS))
    assert asdict(hub_records["talk.hub.yaml"]) == {
        "dataset": str(folder), "name": None, "split": "train", "revision": None, "commit": None, "rows": 50,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"talk\.hub\.yaml: dataset .* split nowhere"):
        rows_of(pin(path, dataset=str(folder), split="nowhere"))


def test_a_stream_that_breaks_says_after_which_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows() -> Any:
        yield from ({"prompt": "q", "answer": "a"} for _ in range(6000))
        raise ConnectionError("line cut")

    monkeypatch.setattr(readers, "_check_data_files", lambda *arguments: None)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.IterableDataset.from_generator(rows))
    with pytest.raises(ValueError, match=r"to be had from the Hub after row 4096 \(ConnectionError: line cut\)"):
        rows_of(pin(tmp_path / "talk.hub.yaml", revision=COMMIT))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: a/b", "expected the keys dataset, name, split, revision, and .*, found dataset"),
        ("[1]", r"found \[1\]"),
        ("a: [", "is not valid YAML"),
        ("{dataset: a/b, name: null, split: null, revision: null}", "split: expected text, found None"),
        ("{dataset: a/b, name: null, split: train, revision: 8049631}", "revision: expected text, found 8049631"),
        ("{dataset: a/b, name: null, split: train, revision: null, rows: 0}", "rows: expected a number of rows from 1"),
        (
            "{dataset: a/b, name: null, split: train, revision: null, columns: {answer: q}}",
            "columns: names columns for answer",
        ),
        (
            "{dataset: a/b, name: null, split: train, revision: null, columns: {ask: q}}",
            "columns: has the key ask, expected some of prompt",
        ),
    ],
)
def test_an_incomplete_pin(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.hub.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "a.hub.yaml")
