"""Read raw conversations as chunks of rows: JSONL, JSON, Parquet, compressed, a folder of those, a dataset of the Hub.

A chunk is a few MiB, so a file of any length needs the memory of some chunks. Chunks of JSON are parsed where they are used,
which may be another process. A `.json` file with one array is cut into its elements by json_stream.py.

A dataset of the Hugging Face Hub is named by a small file `NAME.hub.yaml`, which is `fix_data.raw` or in its folder: DVC
tracks that file, and the data changes only when its text does.

    dataset: HuggingFaceH4/ultrachat_200k
    name: null                                           # the configuration, where it has several
    split: train_sft
    revision: 8049631c405ae6576f93f445c6b8166f76f5505a   # a commit; a branch is resolved, and its commit reported
"""

import bz2
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
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
FILE_KINDS = (".jsonl", ".ndjson", ".json", ".parquet", HUB_PIN_SUFFIX)
ACCEPTED_FILES = "JSONL, JSON (both also as .gz, .bz2, .xz or .zst), Parquet, or NAME.hub.yaml; or a folder of those"


@dataclass(frozen=True)
class HubPin:
    """A dataset of the Hugging Face Hub, as a NAME.hub.yaml file has it."""

    dataset: str  # id, or a local folder
    name: str | None  # configuration, where it has several
    split: str | None
    revision: str | None  # a commit or a branch; None: the default branch


@dataclass(frozen=True)
class HubRecord(HubPin):
    """The commit and the number of rows that were read of a dataset, for the report."""

    commit: str | None  # that the revision was resolved to; None for a local folder
    rows: int


@dataclass(frozen=True)
class ArrowRows:
    """Rows of a table as Arrow IPC bytes: a slice of a data frame would be pickled with the whole frame."""

    data: bytes
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    @classmethod
    def from_frame(cls, frame: pl.DataFrame) -> "ArrowRows":
        file = io.BytesIO()
        frame.write_ipc(file)
        return cls(file.getvalue(), frame.height)


@dataclass(frozen=True)
class RawChunk:
    """Consecutive rows of one file, not parsed yet."""

    source: str  # the file, relative to the folder that was given
    folder: str | None  # where relative paths in the rows start; None for a dataset of the Hub
    first_row: int  # row number in that file, from 0
    rows: list[bytes] | list[str] | ArrowRows
    display_name: str  # the file, for messages


def list_files(path: Path) -> list[Path]:
    """Return `path` itself, or the data files in it, sorted. Raise ValueError where there is no readable file."""
    if path.is_file():
        if detect_file_kind(path) is None:
            raise ValueError(f"{path}: expected {ACCEPTED_FILES}, found a file of another name; rename or convert it")
        return [path]
    known = (file for file in path.rglob("*") if file.is_file() and detect_file_kind(file))
    files = [file for file in known if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(
            f"{path}: expected {ACCEPTED_FILES}, found no such file in the folder; add one or give another path"
        )
    return sorted(files)


def detect_file_kind(path: Path) -> str | None:
    """Return which of FILE_KINDS a file is, by its name; None for another. Parquet has its own compression."""
    name = path.name.lower()
    bare = re.sub(r"\.(gz|bz2|xz|zst)$", "", name)
    kind = next((kind for kind in FILE_KINDS if bare.endswith(kind)), None)
    return None if bare != name and kind in (".parquet", HUB_PIN_SUFFIX) else kind


def read_chunks(path: Path, source: str, hub_records: dict[str, HubRecord]) -> Iterator[RawChunk]:
    """Yield the rows of one file in chunks. A dataset of the Hub adds its record to `hub_records` under `source`.

    Raises:
        ValueError: naming the file, where it can't be read.
    """
    kind = detect_file_kind(path)
    tables: Iterator[ArrowRows] | Iterator[list[bytes]] | Iterator[list[str]]
    if kind == HUB_PIN_SUFFIX:
        tables = read_hub_dataset(read_hub_pin(path), str(path), source, hub_records)
    else:
        tables = {".parquet": _read_parquet, ".json": _read_json}.get(str(kind), _read_lines)(path)
    folder, first = None if kind == HUB_PIN_SUFFIX else str(path.parent), 0
    try:
        for rows in tables:
            yield RawChunk(source, folder, first, rows, str(path))
            first += len(rows)
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pl.exceptions.PolarsError) as error:
        raise ValueError(
            f"{path}: expected a whole {kind} file, found {type(error).__name__} after row {first} ({error}); "
            "copy it again, or give another"
        ) from None


def parse_chunk(chunk: RawChunk) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (row number, object); None for an object nested deeper than the JSON parsers go.

    Raises:
        ValueError: naming file and line of the first row that is no JSON object.
    """
    if isinstance(chunk.rows, ArrowRows):
        yield from enumerate(pl.read_ipc(chunk.rows.data, use_pyarrow=False).to_dicts(), chunk.first_row)
        return
    lines: list[Any] = chunk.rows
    for number, line in enumerate(lines, chunk.first_row):
        try:
            row = orjson.loads(line)
        except ValueError:  # orjson also refuses half a surrogate pair and NaN; such a row is read and may be dropped
            try:
                row = json.loads(line)
            except RecursionError:
                if line.lstrip()[:1] not in (b"{", "{"):
                    raise _make_no_object_error(chunk, number, line) from None
                yield number, None
                continue
            except ValueError as error:  # of JSON or of UTF-8
                raise ValueError(
                    f"{chunk.display_name}, line {number + 1}: expected one JSON object per line, found {abbreviate_row(line)} "
                    f"({error}); mend that line, or give another file"
                ) from None
        if not isinstance(row, dict):
            raise _make_no_object_error(chunk, number, line)
        yield number, row


def _make_no_object_error(chunk: RawChunk, number: int, line: bytes | str) -> ValueError:
    found = abbreviate_row(line)
    return ValueError(
        f"{chunk.display_name}, line {number + 1}: expected an object, found {found}; mend it, or give another file"
    )


def abbreviate_row(line: Any) -> str:
    """Return a row, parsed or not, in at most 80 characters, for messages."""
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    if not isinstance(text, str) and nesting.is_too_deep(text):
        return "a row that is nested too deep to show"
    text = (text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False)).strip()
    return repr(text if len(text) <= 80 else text[:80] + "…") if text else "an empty line"


def _open_decompressed(path: Path) -> Any:
    """Return a binary file of the decompressed bytes, behind a byte order mark, which is no JSON."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # takes 0.25 s; the standard library has zstd from Python 3.14 on

        file: Any = io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    else:
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        file = openers.get(suffix, open)(path, "rb")
    if file.peek(3)[:3] == b"\xef\xbb\xbf":
        file.read(3)
    return file


def _read_lines(path: Path) -> Iterator[list[bytes]]:
    with _open_decompressed(path) as file:
        while lines := file.readlines(CHUNK_BYTES):
            yield lines


def _read_json(path: Path) -> Iterator[list[bytes]] | Iterator[list[str]]:
    """Yield the rows of an array, alone or in an object; or of JSONL under this name, as many exports have it."""
    with _open_decompressed(path) as file:
        key = json_stream.find_rows_key(file.read(CHUNK_BYTES).decode(errors="replace"), _is_row)
    return _read_lines(path) if key is None else _read_json_elements(path, key)


def _read_json_elements(path: Path, key: str) -> Iterator[list[str]]:
    """Yield the elements of the array under `key`, or of the file where `key` is empty, as texts."""
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
        yield ArrowRows.from_frame(batch)


def _count_rows_per_chunk(rows: int, size: int) -> int:
    """Return how many rows make a chunk of a few MiB; a row may contain an image."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES * rows // max(size, 1)))


# --- the Hub ---------------------------------------------------------------------------------------------------------


def read_hub_pin(path: Path) -> HubPin:
    """Return the pin in a NAME.hub.yaml. Raise ValueError where its keys are not exactly those of HubPin."""
    keys = [field.name for field in dataclasses.fields(HubPin)]
    try:
        pin = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML ({error}); correct it") from None
    if not isinstance(pin, dict) or set(pin) != set(keys):
        found = ", ".join(map(str, pin)) if isinstance(pin, dict) else repr(pin)
        raise ValueError(f"{path}: expected the keys {', '.join(keys)}, found {found}; docs/data.md shows one")
    for key, value in pin.items():
        if not (isinstance(value, str) and value) and not (value is None and key in ("name", "revision")):
            raise ValueError(f"{path}: {key}: expected text, found {value!r}; correct it (a commit in quotes)")
    return HubPin(**pin)


def read_hub_dataset(
    pin: HubPin, display_name: str, source: str, hub_records: dict[str, HubRecord]
) -> Iterator[ArrowRows]:
    """Yield a dataset's rows as stored: images stay bytes. `display_name` is the file or parameter that names it.

    Raises:
        ValueError: where the dataset is neither a local folder nor on the Hub.
    """
    import datasets  # takes two seconds, and most runs do not need it
    from huggingface_hub import HfApi

    name, commit = pin.dataset, pin.revision
    is_local = Path(name).is_dir()
    try:
        if not is_local and not re.fullmatch(r"[0-9a-f]{40}", commit or ""):
            commit = HfApi().dataset_info(name, revision=commit).sha
        table = datasets.load_dataset(name, pin.name, split=pin.split, revision=None if is_local else commit)
    except Exception as error:  # the Hub, the cache, the network and dataset builders each raise their own
        words = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{display_name}: dataset {name} (name {pin.name}, split {pin.split}, revision {pin.revision}) is "
            f"neither a folder here nor to be had from the Hub ({type(error).__name__}: {words[0]}); check the "
            "spelling, the network, and HF_TOKEN if it is gated"
        ) from None
    hub_records[source] = HubRecord(**vars(pin), commit=None if is_local else commit, rows=len(table))
    for batch in table.with_format("arrow").iter(batch_size=_count_rows_per_chunk(len(table), table.data.nbytes)):
        yield ArrowRows.from_frame(pl.DataFrame(pl.from_arrow(batch)))


def read_all_chunks(path: Path, first: str | None, hub_records: dict[str, HubRecord]) -> Iterator[RawChunk]:
    """Yield the chunks of every file of `path`, starting with the file named `first`."""
    files = list_files(path)
    names = {file: file.name if path.is_file() else file.relative_to(path).as_posix() for file in files}
    files.sort(key=lambda file: names[file] != first)  # stable: the others stay in order
    return itertools.chain.from_iterable(read_chunks(file, names[file], hub_records) for file in files)
