"""Say what a file holds by its first bytes, for messages about files that can't be read under their name."""

import itertools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
MAGIC_BYTES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs.github.com", "a pointer of Git LFS in place of the data: run git lfs pull"),
    (b"PAR1", "Parquet: name it NAME.parquet"),
    (b"\x1f\x8b", "gzip: name it NAME.jsonl.gz, or after what is in it"),
    (b"\x28\xb5\x2f\xfd", "Zstandard: name it NAME.jsonl.zst, or after what is in it"),
    (b"BZh", "bzip2: name it NAME.jsonl.bz2, or after what is in it"),
    (b"\xfd7zXZ", "xz: name it NAME.jsonl.xz, or after what is in it"),
    (b"PK\x03\x04", "a ZIP archive, as .zip, .xlsx and .docx are: unpack it, or save the sheet as CSV (UTF-8)"),
    (b"\xd0\xcf\x11\xe0", "an old Office document: save the sheet as CSV (UTF-8)"),
    (b"ARROW1", "Arrow IPC: save it as Parquet"),
    (b"\xff\xff\xff\xff", "perhaps Arrow IPC, as datasets' save_to_disk writes: save it with to_parquet or to_json"),
    (b"SQLite format 3", "an SQLite database: export the table as CSV"),
    (b"\x89HDF", "HDF5: save it as Parquet"),
    (b"\x93NUMPY", "a NumPy array: conversations are text"),
    (b"%PDF", "a PDF document: conversations can't be read from it"),
    (b"\x80\x04", "perhaps a Python pickle, which is never loaded: save it as Parquet"),
    *((mark, "UTF-16 text: save it as UTF-8") for mark in UTF16_MARKS),
)
HTML_PATTERN = re.compile(rb"\s*<(!doctype html|html|\?xml)", re.IGNORECASE)
SHOWN_BYTES = 60
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
# cp1252 has every character of Latin-1, and fails at bytes that it does not have.
OTHER_ENCODING = "(-f latin1, or what it was written in, where that fails or its characters are wrong)"
UTF8_CHARACTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")


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
    return f"{size:,} bytes that are {found}" if found else f"{size:,} bytes that begin with {_show_start(start)}"


def advise_conversion(path: Path) -> str:
    """Return how to write a copy of a text in UTF-8, under no name that a folder of data would be read with."""
    if path.suffix.lower() in COMPRESSED_SUFFIXES:
        return f"convert its text: iconv -f cp1252 -t utf-8 {OTHER_ENCODING}"
    name, copy = shlex.quote(str(path)), shlex.quote(f"{path}.utf8")
    return f"convert the file: iconv -f cp1252 -t utf-8 {name} > {copy}, and put that in its place {OTHER_ENCODING}"


def advise_on_undecodable(path: Path, chunks: Iterable[bytes], error: UnicodeDecodeError) -> str:
    """Return what to do with a text, of these chunks, that is no UTF-8.

    One with characters of UTF-8 beyond ASCII, or that ends inside one, is damaged: a conversion would spoil all of them.
    """
    remaining = iter(chunks)
    first = next(remaining, b"")
    if first.startswith(UTF16_MARKS):
        return "save it as UTF-8"
    if error.reason == "unexpected end of data" or any(map(UTF8_CHARACTER.search, itertools.chain([first], remaining))):
        return "fix it at that byte, since its other characters are UTF-8, or give another file"
    return advise_conversion(path)


def _show_start(start: bytes) -> str:
    """Return the first characters of a text, or the first bytes of anything else."""
    text = start.decode("utf-8", errors="ignore")  # a character may be cut at the end of `start`
    if len(text.encode()) < len(start) - 3 or any(ord(c) < 32 and c not in "\t\r\n\f" for c in text):
        return f"the bytes {start[:16].hex(' ')}"
    return repr(text[:SHOWN_BYTES] + ("…" if len(text) > SHOWN_BYTES else ""))
