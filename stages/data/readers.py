"""Raw conversations as rows, whatever they lie in: JSONL, JSON, Parquet, compressed, a folder of those, a hub's dataset.

Rows come in chunks of a few MiB, so that a file of any length needs the memory of some chunks. A chunk of lines is
parsed where it is used, which may be another process. A `.json` that is one array is cut into its elements on the way,
by stages/data/json_stream.py.

A dataset of the Hugging Face Hub is named by a small file, `NAME.hub.yaml`, which stands in `fix_data.raw` or in its
folder like any other: so DVC has a file to track, and the data changes only when its text does.

    dataset: HuggingFaceH4/ultrachat_200k
    name: null                                           # the configuration, where it has several
    split: train_sft
    revision: 8049631c405ae6576f93f445c6b8166f76f5505a   # a commit; a branch is resolved, and the report says to which
"""

import bz2
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import polars as pl
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.data import chat_formats, json_stream, nesting

CHUNK_BYTES, CHUNK_ROWS = 4 << 20, 4096
HUB_PIN_SUFFIX = ".hub.yaml"
HUB_PIN_KEYS = ("dataset", "name", "split", "revision")
DECOMPRESSORS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile, ".zst": lambda path: _open_zstandard(path),
}  # fmt: skip
FILE_KINDS = (".jsonl", ".ndjson", ".json", ".parquet", HUB_PIN_SUFFIX)
ACCEPTED_FILES = "JSONL, JSON (both also as .gz, .bz2, .xz or .zst), Parquet, or NAME.hub.yaml; or a folder of those"


@dataclass(frozen=True)
class ArrowRows:
    """Some rows of a table, as Arrow's bytes: a slice of a data frame holds, and sends, all that it was cut from."""

    data: bytes
    rows: int

    def __len__(self) -> int:
        return self.rows

    @classmethod
    def of(cls, frame: pl.DataFrame) -> "ArrowRows":
        file = io.BytesIO()
        frame.write_ipc(file)
        return cls(file.getvalue(), frame.height)


@dataclass(frozen=True)
class RawChunk:
    source: str  # the file, as seen from the folder that was given
    folder: str | None  # where paths in the rows start; None for a hub's dataset
    first: int  # number of its first row in that file, from 0
    rows: list[bytes] | list[str] | ArrowRows
    shown: str  # the file, for messages


def list_files(path: Path) -> list[Path]:
    """`path` itself, or the data files in it, by name. Raises ValueError where there is none that we read."""
    if path.is_file():
        if detect_file_kind(path) is None:
            raise ValueError(f"{path}: expected {ACCEPTED_FILES}, found a file of another name; rename or convert it")
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and detect_file_kind(file)
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise ValueError(
            f"{path}: expected {ACCEPTED_FILES}, found no such file in the folder; add one or give another path"
        )
    return found


def detect_file_kind(path: Path) -> str | None:
    """Which of KINDS a file is, by its name; None where it is none. Parquet has its own compression."""
    name = path.name.lower()
    bare = re.sub(r"\.(gz|bz2|xz|zst)$", "", name)
    found = next((kind for kind in FILE_KINDS if bare.endswith(kind)), None)
    return None if bare != name and found in (".parquet", HUB_PIN_SUFFIX) else found


def read_chunks(path: Path, source: str, pinned: dict[str, Any]) -> Iterator[RawChunk]:
    """The rows of one file. A hub's dataset adds what it was, its commit among it, to `pinned` under `source`.

    Raises:
        ValueError: naming the file, where it can't be read.
    """
    what = detect_file_kind(path)
    tables: Iterator[ArrowRows] | Iterator[list[bytes]] | Iterator[list[str]]
    folder: str | None
    if what == HUB_PIN_SUFFIX:
        tables, folder = read_hub_dataset(read_hub_pin(path), str(path), source, pinned), None
    else:
        folder = str(path.parent)
        tables = (
            _read_parquet(path) if what == ".parquet" else _read_json(path) if what == ".json" else _read_lines(path)
        )
    first = 0
    try:
        for rows in tables:
            yield RawChunk(source, folder, first, rows, str(path))
            first += len(rows)
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pl.exceptions.PolarsError) as error:
        raise ValueError(
            f"{path}: expected a whole {what} file, found {type(error).__name__} after row {first} ({error}); "
            "copy it again, or give another"
        ) from None


def parse_chunk(chunk: RawChunk) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the object of each row; None for an object nested deeper than the parsers go.

    Raises:
        ValueError: naming file and line, for the first that is no JSON object.
    """
    if isinstance(chunk.rows, ArrowRows):
        yield from enumerate(pl.read_ipc(chunk.rows.data, use_pyarrow=False).to_dicts(), chunk.first)
        return
    lines: list[Any] = chunk.rows
    for number, line in enumerate(lines, chunk.first):
        try:
            row = orjson.loads(line)
        except ValueError:  # orjson refuses half a surrogate pair and NaN too, with which a row can be dropped
            try:
                row = json.loads(line)
            except RecursionError:
                if line.lstrip()[:1] not in (b"{", "{"):
                    raise ValueError(
                        f"{chunk.shown}, line {number + 1}: expected an object, found {abbreviate_row(line)}; mend it, or give "
                        "another file"
                    ) from None
                yield number, None
                continue
            except ValueError as error:  # of JSON or of UTF-8
                raise ValueError(
                    f"{chunk.shown}, line {number + 1}: expected one JSON object per line, found {abbreviate_row(line)} "
                    f"({error}); mend that line, or give another file"
                ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{chunk.shown}, line {number + 1}: expected an object, found {abbreviate_row(line)}; mend it, or give another file"
            )
        yield number, row


def abbreviate_row(line: Any) -> str:
    """A row as a message can hold it."""
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    if not isinstance(text, str) and nesting.is_too_deep(text):
        return "a row that is nested too deep to show"
    text = (text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False)).strip()
    return repr(text if len(text) <= 80 else text[:80] + "…") if text else "an empty line"


def _open_zstandard(path: Path) -> io.BufferedReader:
    import pyarrow  # not in the standard library before Python 3.14; a quarter of a second, and few files are

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _open_decompressed(path: Path) -> Any:
    """The file's bytes, decompressed on the way, without a byte order mark, which is no JSON."""
    file = DECOMPRESSORS.get(path.suffix.lower(), lambda path: path.open("rb"))(path)
    if file.peek(3)[:3] == b"\xef\xbb\xbf":
        file.read(3)
    return file


def _read_lines(path: Path) -> Iterator[list[bytes]]:
    with _open_decompressed(path) as file:
        while lines := file.readlines(CHUNK_BYTES):
            yield lines


def _read_json(path: Path) -> Iterator[list[bytes]] | Iterator[list[str]]:
    """An array of rows, alone or in an object; or, as many exports have it, JSONL under this name."""
    with _open_decompressed(path) as file:
        key = json_stream.find_rows_key(file.read(CHUNK_BYTES).decode(errors="replace"), _is_row)
    return _read_lines(path) if key is None else _read_json_elements(path, key)


def _read_json_elements(path: Path, key: str) -> Iterator[list[str]]:
    """The elements of the array under `key`, or of the file where that is empty, as texts."""
    rows: list[str] = []
    size = 0
    try:
        with _open_decompressed(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            for row in json_stream.iterate_elements(text.read, key, _is_row):
                rows.append(row)
                size += len(row)
                if size >= CHUNK_BYTES:
                    yield rows
                    rows, size = [], 0
    except (json_stream.JsonArrayError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a JSON array of objects ({error}); mend it, or write it as JSONL") from None
    if rows:
        yield rows


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and chat_formats.detect_format(value) is not None


def _read_parquet(path: Path) -> Iterator[ArrowRows]:
    rows = pl.scan_parquet(path, glob=False)
    per_chunk = _count_rows_per_chunk(rows.select(pl.len()).collect().item(), path.stat().st_size)
    for batch in rows.collect_batches(chunk_size=per_chunk, maintain_order=True):
        yield ArrowRows.of(batch)


def _count_rows_per_chunk(rows: int, size: int) -> int:
    """So many that a chunk of them is a few MiB, though each may hold a picture."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * rows // max(size, 1)))


# --- the hub --------------------------------------------------------------------------------------------------------


def read_hub_pin(path: Path) -> dict[str, str | None]:
    """Raises ValueError where it isn't exactly dataset, name, split and revision."""
    try:
        pin = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML ({error}); correct it") from None
    if not isinstance(pin, dict) or set(pin) != set(HUB_PIN_KEYS):
        found = ", ".join(map(str, pin)) if isinstance(pin, dict) else repr(pin)
        raise ValueError(f"{path}: expected the keys {', '.join(HUB_PIN_KEYS)}, found {found}; docs/data.md shows one")
    for key, value in pin.items():
        if not (isinstance(value, str) and value) and not (value is None and key in ("name", "revision")):
            raise ValueError(f"{path}: {key}: expected text, found {value!r}; correct it (a commit in quotes)")
    return pin


def read_hub_dataset(pin: dict[str, Any], shown: str, source: str, pinned: dict[str, Any]) -> Iterator[ArrowRows]:
    """A dataset's rows, as they are stored: pictures stay bytes and are not decoded. `abbreviate_row` names who asks for it.

    Raises:
        ValueError: where there is no such dataset, neither here nor on the Hub.
    """
    import datasets  # takes two seconds, and most runs have no use for it
    from huggingface_hub import HfApi

    name, commit = str(pin["dataset"]), pin["revision"]
    local = Path(name).is_dir()
    try:
        if not local and not re.fullmatch(r"[0-9a-f]{40}", commit or ""):
            commit = HfApi().dataset_info(name, revision=commit).sha
        table = datasets.load_dataset(name, pin["name"], split=pin["split"], revision=None if local else commit)
    except Exception as error:  # hub, cache, network and builders each have their own
        words = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{shown}: dataset {name} (name {pin['name']}, split {pin['split']}, revision {pin['revision']}) is "
            f"neither a folder here nor to be had from the Hub ({type(error).__name__}: {words[0]}); check the "
            "spelling, the network, and HF_TOKEN if it is gated"
        ) from None
    pinned[source] = {**pin, "commit": None if local else commit, "rows": len(table)}
    for batch in table.with_format("arrow").iter(batch_size=_count_rows_per_chunk(len(table), table.data.nbytes)):
        yield ArrowRows.of(pl.DataFrame(pl.from_arrow(batch)))


def read_all_chunks(path: Path, first: str | None, pinned: dict[str, Any]) -> Iterator[RawChunk]:
    """Every file of `path`, the one named `first` before the others."""
    found = list_files(path)
    names = {file: file.name if path.is_file() else file.relative_to(path).as_posix() for file in found}
    order = sorted(found, key=lambda file: names[file] != first)  # stable: the others stay in order
    return itertools.chain.from_iterable(read_chunks(file, names[file], pinned) for file in order)
