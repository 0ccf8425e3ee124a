"""Parse one row of JSON, and say which lines of a file are none: all of them at once, not one a run."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import IO, Any

import orjson

from stages.params.units import list_first

MAX_LEVELS = 100  # real tool schemas have about ten; Python's recursion limit is reached at about 500
STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
BRACKET_PATTERN = re.compile(r"[\[\]{}]")


def is_too_deep(value: Any) -> bool:
    """Return whether lists and dicts are nested more than MAX_LEVELS deep. Iterative, so that any depth can be checked."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        if depth > MAX_LEVELS:
            return True
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return False


def is_text_too_deep(text: str) -> bool:
    """Return the same for a text that may be JSON, by its brackets outside strings."""
    if text.count("[") + text.count("{") <= MAX_LEVELS:
        return False
    brackets = BRACKET_PATTERN.findall(STRING_PATTERN.sub("", text))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > MAX_LEVELS


MAX_ROW_BYTES = 1 << 26  # of a row of any file: parsed, it may take twenty times as many
SHOWN_LINES = 5  # broken lines that a message explains or names
MAX_LINES = 1 << 16  # at once: short ones take more memory than they have bytes


class BrokenRowError(Exception):
    """A line that is no JSON object; the argument says what was expected and found."""


def describe_numbers(numbers: Sequence[int | str], total: int, what: str) -> str:
    """Return `3 of 40 lines are broken: 5, 36, 37`, the first few numbers of many."""
    return f"{len(numbers):,} of {total:,} {what}: {list_first(numbers, SHOWN_LINES)}"


def parse_row(line: bytes | str) -> dict[str, Any] | None:
    """Return the object in a line; None for one that is nested deeper than the JSON parsers go.

    Raises:
        BrokenRowError: where the line is no JSON object.
    """
    try:
        row = orjson.loads(line)
    except ValueError:  # orjson also refuses half a surrogate pair and NaN; such a row is read and may be dropped
        try:
            row = json.loads(line)
        except RecursionError:
            if line.lstrip()[:1] in (b"{", "{"):
                return None
            raise BrokenRowError(f"expected an object, found {abbreviate_row(line)}") from None
        except json.JSONDecodeError as error:
            found = abbreviate_row(line)
            raise BrokenRowError(
                f"expected one JSON object per line, found {found} ({error.msg} at character {error.pos + 1})"
            ) from None
        except UnicodeDecodeError as error:
            byte = f"the byte 0x{error.object[error.start]:02x} at {error.start + 1} is no UTF-8"
            raise BrokenRowError(f"expected one JSON object per line, found {abbreviate_row(line)} ({byte})") from None
    if not isinstance(row, dict):
        raise BrokenRowError(f"expected an object, found {abbreviate_row(line)}")
    return row


def read_lines(file: IO[bytes], block_bytes: int) -> Iterator[list[bytes]]:
    """Yield the lines of a file, a few MiB at a time. They end in a line feed, in a carriage return or in both.

    Raises:
        BrokenRowError: for a line of more than MAX_ROW_BYTES, without reading more of it.
    """
    rest, is_end = b"", False
    while not is_end:
        block = file.read(wanted := max(block_bytes, len(rest)))
        is_end = len(block) < wanted
        lines = (rest + block).splitlines(keepends=True)
        rest = b"" if is_end or not lines else lines.pop()  # it may go on, if only by the line feed of \r\n
        if max(map(len, [rest, *lines[-1:]])) > MAX_ROW_BYTES:
            raise BrokenRowError(f"expected lines of at most {MAX_ROW_BYTES:,} bytes, found a longer one")
        for first in range(0, len(lines), MAX_LINES):
            yield lines[first : first + MAX_LINES]


def is_blank(line: bytes | str) -> bool:
    """Return whether a line is no row: as in CSV, many files end in an empty one."""
    return not line.strip()


def find_broken_lines(lines: Iterable[bytes]) -> tuple[list[int], int]:
    """Return (the numbers, from 1, of all lines of a file that are no JSON objects; the number of lines)."""
    numbers, total = list[int](), 0
    for line in lines:
        total += 1
        try:
            if not is_blank(line):
                parse_row(line)
        except BrokenRowError:
            numbers.append(total)
    return numbers, total


def abbreviate_row(line: Any) -> str:
    """Return a row, parsed or not, in at most 80 characters, for messages."""
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    if not isinstance(text, str) and is_too_deep(text):
        return "a row that is nested too deep to show"
    text = (text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False)).strip()
    return repr(text if len(text) <= 80 else text[:80] + "…") if text else "an empty line"


JSON_TYPES: dict[type, str] = {
    str: "a text", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number",
}  # fmt: skip


def is_text(value: Any) -> bool:
    """Return whether `value` is a string that UTF-8 can encode: exports that cut inside an emoji leave half a surrogate pair."""
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:
        return False


def describe_value(value: Any) -> str:
    """Return the JSON type of a value, and its beginning, both without characters that can't be printed."""
    kind = JSON_TYPES.get(type(value), f"of the type {type(value).__name__}")
    return "null" if value is None else f"{kind}, {abbreviate_row(value)}"
