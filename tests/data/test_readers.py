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
import pyarrow.parquet as pq
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


WRITTEN = pa.BufferOutputStream()
pq.write_table(pa.table({"prompt": ["Nile"]}), WRITTEN, compression="none")
PARQUET = WRITTEN.getvalue().to_pybytes()
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


def test_an_array_on_one_line_is_never_whole_in_memory(tmp_path: Path) -> None:
    """Bug: a .json was read and parsed whole; 1 GiB took 6 GiB of memory."""
    one = json.dumps({"prompt": "x" * 5_000, "answer": "y"})
    path = tmp_path / "a.json"
    path.write_text('{"rows": [' + ", ".join([one] * 20_000) + "]}")  # 100 MiB
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
    + [("a.parquet", b"PAR1 and no more"), ("a.parquet", PARQUET.replace(b"Nile", b"N\xffle")), ("a.jsonl.gz", LINES)],
)
def test_a_truncated_or_misnamed_file_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name}: expected a whole .* file"):
        rows_of(tmp_path / name)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{dataset: a/b, name: null, split: train, revision: 8049631}",
            "revision: Input should be a valid string, found 8049631",
        ),
        (
            "{dataset: a/b, name: null, split: t, revision: null, columns: {ask: q}}",
            "columns: has the key ask, expected some of",
        ),
    ],
)
def test_an_incomplete_pin(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.hub.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / "a.hub.yaml")


# --- traps -----------------------------------------------------------------------------------------------------------


def test_a_link_out_of_the_folder_is_refused_without_a_word_of_its_content(tmp_path: Path) -> None:
    """Bug: the lines of a private file became rows, and went to the cache, the remote and the target's server."""
    (tmp_path / "key").write_text("secret\n")
    raw = tmp_path / "raw"
    (raw / "more").mkdir(parents=True)
    (raw / "q.txt").symlink_to(tmp_path / "key")
    for path in (raw, raw / "q.txt"):
        with pytest.raises(
            ValueError, match=r"q\.txt: expected a file in .* found one that is outside of its folder"
        ) as error:
            readers.list_files(path)
        assert "secret" not in str(error.value)
    (raw / "q.txt").unlink()
    stored = tmp_path / "cache/files/md5/ab" / ("c" * 30)  # as DVC links its cache
    stored.parent.mkdir(parents=True)
    stored.write_bytes(LINES)
    for link, target in (("a.jsonl", stored), ("more/b.jsonl", "../a.jsonl")):
        (raw / link).symlink_to(target)
    (tmp_path / "linked").symlink_to(raw)  # the folder that params.yaml names may be a link itself
    assert [len(rows_of(path)) for path in (raw, tmp_path / "linked")] == [100, 100]


def test_a_pin_reads_no_other_folder_and_no_file_that_a_card_names(tmp_path: Path, offline_cache: Path) -> None:
    """Bug: a pin's dataset might be any folder, and the card of a dataset might name any file of this machine."""
    raw, private = tmp_path / "raw", tmp_path / "private"
    for folder in (raw / "talk", private):
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_bytes(LINES)
    with pytest.raises(ValueError, match="is a folder outside of"):
        rows_of(pin(raw / "a.hub.yaml", dataset=str(private)))
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {private}/train.jsonl\n---\n"
    (raw / "talk/README.md").write_text(card)
    with pytest.raises(ValueError, match=r"its card names .*, expected files of its own"):
        rows_of(pin(raw / "a.hub.yaml", dataset=str(raw / "talk")))


def test_carriage_returns_end_lines(tmp_path: Path) -> None:
    """Bug: a file of old Macs' line ends was one broken line, a .txt one question."""
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\r{"prompt": "b"}\r\n\r{"prompt": "c"}\n{"prompt": "d"}\r')
    assert [row["prompt"] for _, _, row in rows_of(tmp_path / "a.jsonl")] == ["a", "b", "c", "d"]
    (tmp_path / "a.txt").write_bytes(b"a\rb\r\nc")
    assert [row["prompt"] for _, _, row in rows_of(tmp_path / "a.txt")] == ["a", "b", "c"]
    (tmp_path / "a.csv").write_bytes(b"prompt,answer\ra,b\rc,d")
    assert [row["prompt"] for _, _, row in rows_of(tmp_path / "a.csv")] == ["a", "c"]
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\r{"prompt: "b"}\r')
    with pytest.raises(ValueError, match=r"line 2: expected .*; fix it, or give another file"):
        rows_of(tmp_path / "a.jsonl")


def repeat(value: Any, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


TRAPS: dict[str, Callable[[Path], Any]] = {
    "b.parquet": lambda path: pq.write_table(
        pa.table({"prompt": ["q"], "history": pa.ListArray.from_arrays([0, 10**6], repeat("z" * 2000, 10**6))}), path
    ),
    "d.parquet": lambda path: pq.write_table(pa.table({"prompt": ["x" * (65 << 20)]}), path, compression="brotli"),
    "a.json.gz": lambda path: path.write_bytes(gzip.compress(b'[{"prompt": "' + b"x" * (80 << 20), 1)),
    "a.csv.gz": lambda path: path.write_bytes(
        gzip.compress(b"prompt\n" + (b'"' + b"x" * 996 + b'\n",') * (80 << 10), 1)
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_small_file_that_decodes_to_gigabytes_is_refused_in_time(tmp_path: Path, name: str) -> None:
    """Bug: 484 bytes of Parquet took 3.9 GiB, 1,971 bytes 9.4 GiB and a panic; a .json.gz 3.6 GiB before it was refused."""
    TRAPS[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size < 1 << 21
    before = psutil.Process().memory_info().rss
    used: list[int] = []
    with pytest.raises(ValueError, match=rf"{name}.* expected "):
        used.extend(psutil.Process().memory_info().rss - before for _ in readers.read_all_chunks(tmp_path / name, {}))
    assert max([*used, psutil.Process().memory_info().rss - before]) < 1 << 30
