"""Read raw conversations as chunks of rows: JSONL, JSON, CSV, Parquet, compressed, a folder of those, a dataset of the Hub.

A .txt file has a question a line. It is read where it is fix_data.raw, or where a folder holds nothing else: beside data it is
likely a note.

A chunk is a few MiB, so a file of any length needs the memory of some chunks. Chunks of JSON are parsed where they are used,
which may be another process. A `.json` file with one array is cut into its elements by json_stream.py.
"""

import bz2
import gzip
import io
import itertools
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import orjson
import polars as pl

from stages.data import (
    chat_formats,
    column_names,
    delimited_text,
    hub_datasets,
    json_lines,
    json_stream,
    parquet_rows,
    request_logs,
)
from stages.data.hub_datasets import CHUNK_BYTES, CHUNK_ROWS, HubRecord
from stages.params.units import list_first
from stages.runtime import foreign_paths
from stages.runtime.guarded_files import is_parser_error

MAX_EXPANSION, FREE_BYTES = 200, 1 << 30  # of a compressed file; text seldom shrinks to a fiftieth
MAX_NAMED, MAX_ERROR = 5, 300  # files in a message; characters of a decoder's
HUB_PIN_SUFFIX = ".hub.yaml"
TEXT_KIND = ".txt"
FILE_KINDS = (".jsonl", ".ndjson", ".json", *delimited_text.DELIMITERS, ".parquet", HUB_PIN_SUFFIX, TEXT_KIND)
ACCEPTED_FILES = (
    "JSONL, JSON, CSV, TSV, .txt with a question a line (all also as .gz, .bz2, .xz or .zst), Parquet, or NAME.hub.yaml; or a "
    "folder of those"
)


@dataclass(frozen=True)
class ArrowRows:
    """Rows of a table as Arrow IPC bytes: a slice of a data frame would be pickled with the whole frame."""

    data: bytes
    num_rows: int
    names: tuple[str, ...]  # of the columns

    def __len__(self) -> int:
        return self.num_rows

    @classmethod
    def from_frame(cls, frame: pl.DataFrame) -> "ArrowRows":
        file = io.BytesIO()
        frame.write_ipc(file)
        return cls(file.getvalue(), frame.height, tuple(frame.columns))


Rows = ArrowRows | list[bytes] | list[str]


@dataclass(frozen=True)
class RawChunk:
    """Consecutive rows of one file, not parsed yet."""

    source: str  # the file, relative to the folder that was given
    folder: str | None  # where relative paths in the rows start; None for a dataset of the Hub
    first_row: int  # row number in that file, from 0
    rows: Rows
    display_name: str  # the file, for messages
    columns: dict[str, str] | None = None  # the file's map in fix_data.columns: the rows are renamed by it


def list_files(path: Path) -> list[Path]:
    """Return `path` itself, or the data files in it, sorted.

    Raises:
        ValueError: where there is no readable file, or a link leads out of the folder.
    """
    if path.is_file():
        if detect_file_kind(path) is None:
            raise ValueError(
                f"{path}: expected {ACCEPTED_FILES}, found a file of another name with "
                f"{describe_content(path)}; rename or convert it"
            )
        files = [path]
    else:
        known = (file for file in path.rglob("*") if file.is_file() and detect_file_kind(file))
        files = sorted(file for file in known if not _is_hidden(file, path))
        files = [file for file in files if detect_file_kind(file) != TEXT_KIND] or files
    if not files:
        raise ValueError(
            f"{path}: expected {ACCEPTED_FILES}, found no such file in the folder; add one or give another path"
        )
    root = path.parent if path.is_file() else path
    for file in files:
        try:
            foreign_paths.resolve_file(file, [root])
        except foreign_paths.ForeignPathError as error:
            raise ValueError(
                f"{file}: expected a file in {root}, links followed, since its rows go to the cache, to remotes and to servers; "
                f"found one that {error}; copy it there, or name the file that it links to"
            ) from None
    return files


def describe_ignored_files(path: Path) -> str | None:
    """Return a note on the files of a folder that are not read, but for images, which rows may name; None without any."""
    known = set(list_files(path))
    others = [file for file in path.rglob("*") if file.is_file() and file not in known and not _is_hidden(file, path)]
    ignored = sorted(name_source(file, path) for file in others if not (guess_type(file)[0] or "").startswith("image/"))
    if not ignored:
        return None
    return f"note: not read in {path}: {list_first(ignored, MAX_NAMED)}; what can be read: {ACCEPTED_FILES}"


def name_source(file: Path, path: Path) -> str:
    """Return the name by which rows have a file of `path`: the path in that folder, or the name of the only file."""
    return file.name if path.is_file() else file.relative_to(path).as_posix()


def _is_hidden(file: Path, path: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(path).parts)


def detect_file_kind(path: Path) -> str | None:
    """Return which of FILE_KINDS a file is, by its name; None for another. Parquet has its own compression."""
    name = path.name.lower()
    bare = re.sub(r"\.(gz|bz2|xz|zst)$", "", name)
    kind = next((kind for kind in FILE_KINDS if bare.endswith(kind)), None)
    return None if bare != name and kind in (".parquet", HUB_PIN_SUFFIX) else kind


def read_chunks(
    path: Path, source: str, hub_records: dict[str, HubRecord], columns: dict[str, str] | None = None
) -> Iterator[RawChunk]:
    """Yield the rows of one file in chunks. A dataset of the Hub adds its record to `hub_records` under `source`.

    `columns` is the file's map in fix_data.columns; a NAME.hub.yaml may have its own.

    Raises:
        ValueError: naming the file, where it can't be read or lacks a named column.
    """
    kind, first = str(detect_file_kind(path)), 0
    folder: str | None = str(path.parent)
    with _naming(path, kind, lambda: f"after row {first} "):
        if kind == HUB_PIN_SUFFIX:
            pin, folder = hub_datasets.read_hub_pin(path), None
            columns = pin.columns or columns
            found = hub_datasets.read_hub_dataset(pin, str(path), source, hub_records, path.parent, stream=True)
            tables: Iterator[Rows] = map(ArrowRows.from_frame, found)
        else:
            readers: dict[str, Callable[[Path], Iterator[Rows]]] = {
                ".parquet": _read_parquet, ".json": _read_json, TEXT_KIND: _read_questions,
                **dict.fromkeys(delimited_text.DELIMITERS, _read_csv),
            }  # fmt: skip
            tables = readers.get(kind, _read_lines)(path)
        for rows in tables:
            if isinstance(rows, ArrowRows):
                column_names.check_table_columns(rows.names, columns, str(path), kind in delimited_text.DELIMITERS)
            if len(rows):
                yield RawChunk(source, folder, first, rows, str(path), columns)
            first += len(rows)


@contextmanager
def _naming(path: Path, kind: str, where: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn errors of a file's decoder into a ValueError that names it; those that name it pass, and what the machine lacks."""
    try:
        yield
    except BaseException as error:
        if not is_parser_error(error) or (isinstance(error, ValueError) and str(error).startswith(str(path))):
            raise
        words = " ".join(str(error).split())[:MAX_ERROR]
        raise ValueError(
            f"{path}: expected a whole {kind} file, found {type(error).__name__} {where()}({words}) in "
            f"{describe_content(path)}; copy it again, or give another"
        ) from None


def parse_chunk(chunk: RawChunk) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (row number, object); None for an object nested deeper than the JSON parsers go.

    Raises:
        ValueError: naming file and line of the first row that is no JSON object, or lacks a named column.
    """
    rows = _parse_table(chunk.rows, chunk.first_row) if isinstance(chunk.rows, ArrowRows) else _parse_lines(chunk)
    for number, row in rows:
        if row is not None and chunk.columns is not None:
            where = f"{chunk.display_name}, line {number + 1}"
            row = column_names.select_columns(row, chunk.columns, where)
        yield number, row


def _parse_table(table: ArrowRows, first_row: int) -> Iterator[tuple[int, dict[str, Any]]]:
    frame = pl.read_ipc(table.data, use_pyarrow=False)
    texts = [
        name for name in frame.columns if name in column_names.TURN_LIST_COLUMNS and frame[name].dtype == pl.String
    ]
    for number, row in enumerate(frame.to_dicts(), first_row):
        yield number, row | {name: column_names.parse_turn_list(row[name]) for name in texts} if texts else row


def _parse_lines(chunk: RawChunk) -> Iterator[tuple[int, dict[str, Any] | None]]:
    assert not isinstance(chunk.rows, ArrowRows), chunk.source
    lines: list[Any] = [*chunk.rows]
    for number, line in enumerate(lines, chunk.first_row):
        if json_lines.is_blank(line):
            continue
        try:
            yield number, json_lines.parse_row(line)
        except json_lines.BrokenRowError as error:
            raise ValueError(
                f"{chunk.display_name}, line {number + 1}: {error}{_advise(chunk, number, line)}"
            ) from None


def _advise(chunk: RawChunk, number: int, line: bytes | str) -> str:
    """Return which other lines of the file are broken and what to do; of a first line that is no JSON what the file is."""
    path = Path(chunk.display_name)
    if isinstance(line, str) or not path.is_file():  # an element of an array
        return "; fix it, or give another file"
    try:
        with _open_decompressed(path) as file:
            blocks = json_lines.read_lines(file, CHUNK_BYTES)
            broken, total = json_lines.find_broken_lines(itertools.chain.from_iterable(blocks))
    except Exception:
        return f"; the file is damaged further on: copy it again. What can be read is {ACCEPTED_FILES}"
    more = f"; {json_lines.describe_numbers(broken, total, 'lines are broken')}" if len(broken) > 1 else ""
    advice = f"{more}; fix {'them' if more else 'it'}, or give another file"
    if number:
        return advice
    content = describe_content(path)
    return f"{advice}: {path.name} holds {content}. What can be read is {ACCEPTED_FILES}"


class _Decompressed(io.RawIOBase):
    """The bytes of a compressed file, unless they are so many that the file was made to fill the memory."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file, self._left = path, file, _count_most_bytes(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._file.readinto(buffer))
        self._left -= count
        if self._left < 0:
            raise ValueError(_describe_too_large(self._path))
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _count_most_bytes(path: Path) -> int:
    """Return how many bytes a file may have once it is decoded."""
    return FREE_BYTES + MAX_EXPANSION * path.stat().st_size


def _describe_too_large(path: Path) -> str:
    return (
        f"{path}: expected at most {MAX_EXPANSION} times its size when decompressed, and rows of {json_lines.MAX_ROW_BYTES:,} "
        "bytes, found more; if it is what it should be, give it as JSONL, decompressed"
    )


def _open_decompressed(path: Path) -> Any:
    """Return a binary file of the decompressed bytes, behind a byte order mark, which is no JSON.

    Reading a broken file raises errors of many types (`_naming`); one that grows without measure ValueError.
    """
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # takes 0.25 s; the standard library has zstd from Python 3.14 on

        file: Any = pyarrow.input_stream(str(path), compression="zstd")
    else:
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        file = openers.get(suffix, open)(path, "rb")
    if suffix in (".gz", ".bz2", ".xz", ".zst"):
        file = io.BufferedReader(_Decompressed(path, file), 1 << 20)
    if file.peek(3)[:3] == b"\xef\xbb\xbf":
        file.read(3)
    return file


def _read_lines(path: Path) -> Iterator[list[bytes]]:
    with _open_decompressed(path) as file:
        yield from json_lines.read_lines(file, CHUNK_BYTES)


def _read_questions(path: Path) -> Iterator[list[bytes]]:
    """Yield the lines of a text as rows with a prompt; a blank line is no row."""
    for lines in _read_lines(path):
        try:
            texts = [line.decode().strip() for line in lines]
        except UnicodeDecodeError as error:
            raise _explain_undecodable(path, error) from None
        yield [orjson.dumps({"prompt": text}) if text else b"" for text in texts]


def _read_csv(path: Path) -> Iterator[ArrowRows]:
    kind = str(detect_file_kind(path))
    with _open_decompressed(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        try:
            for table in delimited_text.read_tables(text, path, kind, CHUNK_BYTES, CHUNK_ROWS):
                yield ArrowRows.from_frame(table)
        except UnicodeDecodeError as error:
            raise _explain_undecodable(path, error) from None


def _explain_undecodable(path: Path, error: UnicodeDecodeError) -> ValueError:
    return ValueError(
        f"{path}: expected UTF-8, found the byte 0x{error.object[error.start]:02x} ({error.reason}) in "
        f"{describe_content(path)}; save it as UTF-8, as iconv -f cp1252 -t utf-8 does"
    )


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
    except json_stream.JsonArrayError as error:
        raise ValueError(f"{path}: expected a JSON array of objects ({error}); fix it, or write it as JSONL") from None
    except UnicodeDecodeError as error:
        raise _explain_undecodable(path, error) from None
    if rows:
        yield rows


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and chat_formats.detect_format(request_logs.unwrap_log(value)) is not None


def _read_parquet(path: Path) -> Iterator[ArrowRows]:
    try:
        for table in parquet_rows.read_tables(path, _count_most_bytes(path), CHUNK_BYTES, CHUNK_ROWS):
            yield ArrowRows.from_frame(table)
    except parquet_rows.ParquetSizeError:
        raise ValueError(_describe_too_large(path)) from None


def read_all_chunks(
    path: Path,
    hub_records: dict[str, HubRecord],
    is_first: Callable[[str], bool] = lambda source: False,
    choose_columns: Callable[[Path], dict[str, str] | None] = lambda file: None,
) -> Iterator[RawChunk]:
    """Yield the chunks of every file of `path`, starting with those whose source `is_first`.

    `choose_columns` returns the column map of a file, as `read_chunks` takes it.
    """
    files = list_files(path)
    names = {file: name_source(file, path) for file in files}
    files.sort(key=lambda file: not is_first(names[file]))  # stable: the others stay in order
    return itertools.chain.from_iterable(
        read_chunks(file, names[file], hub_records, choose_columns(file)) for file in files
    )


# What a file holds that can't be read under its name, by its first bytes.
MAGIC_BYTES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs.github.com", "a pointer of Git LFS in place of the data: run git lfs pull"),
    (b"PAR1", "Parquet: name it NAME.parquet"),
    (b"\x1f\x8b", "gzip: name it NAME.jsonl.gz, or after what is in it"),
    (b"\x28\xb5\x2f\xfd", "Zstandard: name it NAME.jsonl.zst, or after what is in it"),
    (b"BZh", "bzip2: name it NAME.jsonl.bz2, or after what is in it"),
    (b"\xfd7zXZ", "xz: name it NAME.jsonl.xz, or after what is in it"),
    (b"PK\x03\x04", "a ZIP archive, as .zip, .xlsx and .docx are: unpack it, or save the sheet as CSV (UTF-8)"),
    (b"%PDF", "a PDF document: conversations can't be read from it"),
    (b"\x80\x04", "perhaps a Python pickle, which is never loaded: save it as Parquet"),
    (b"\xff\xfe", "UTF-16 text: save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text: save it as UTF-8"),
)
HTML_PATTERN = re.compile(rb"\s*<(!doctype html|html|\?xml)", re.IGNORECASE)
SHOWN_BYTES = 60


def describe_content(path: Path) -> str:
    """Return what `path` holds, with its size, such as "1,024 bytes that are gzip: ..."."""
    try:
        with path.open("rb") as file:
            start = file.read(512)
        size = path.stat().st_size
    except OSError as error:
        return f"a file that can't be opened ({error.strerror})"
    if not start:
        return "an empty file"
    found = next((words for magic, words in MAGIC_BYTES if start.startswith(magic)), None)
    if found is None and HTML_PATTERN.match(start):
        found = "an HTML or XML page, as a failed download leaves it: fetch the file itself"
    return f"{size:,} bytes that are {found}" if found else f"{size:,} bytes that begin with {start[:SHOWN_BYTES]!r}"
