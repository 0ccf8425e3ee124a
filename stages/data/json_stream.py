"""Iterate over the elements of a JSON array of any length, in the memory of its largest element.

json.JSONDecoder.raw_decode parses a value from a given position and returns where it ends, so a window over the text is
enough. Elements are yielded as text for another process to parse: pickling the parsed objects takes several times as long.

Not ijson 3.6 (yajl2_c): half the speed to twice it, but it turns half a surrogate pair into "?" without an error, and ends a
file at NaN, at 1e400 and at an integer of more than 64 bits.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

from stages.data import json_lines

READ_CHARACTERS = 1 << 20  # characters per read
CUT_MARGIN = 12  # an error or a value this near the window's end may be an effect of the cut: tru, \ud8, or 1 of 1.5e9
WHITESPACE = re.compile(r"[ \t\n\r]*")
parse_value = json.JSONDecoder().raw_decode


class JsonArrayError(Exception):
    """The text is no array of values; the message has the position and the reason."""


class JsonWindow:
    """A window over a text. `read(n)` returns up to n more characters, and "" at the end."""

    def __init__(self, read: Callable[[int], str]) -> None:
        self._read, self._text = read, ""
        self._position = 0  # in the window
        self._consumed = 0  # characters before the window
        self._at_end = False

    def peek(self) -> str:
        """Return the next character that is no white space, without consuming it; "" at the end."""
        while (position := WHITESPACE.match(self._text, self._position).end()) == len(self._text) and self._read_more():  # type: ignore[union-attr]
            pass
        self._position = position
        return self._text[position : position + 1]

    def expect(self, characters: str) -> str:
        """Return the next character without consuming it; raise JsonArrayError unless it is one of `characters`."""
        found = self.peek()
        if not found or found not in characters:
            self._fail(f"expected {' or '.join(characters)}, found {found or 'the end'}", self._position)
        return found

    def take(self, characters: str) -> str:
        """Consume and return the next character; raise JsonArrayError unless it is one of `characters`."""
        found = self.expect(characters)
        self._position += 1
        return found

    def take_value(self) -> tuple[Any, str]:
        """Consume the next value and return (value, its text)."""
        self.peek()
        while True:
            try:
                value, end = parse_value(self._text, self._position)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - CUT_MARGIN
                if cut and self._read_more():
                    continue
                self._fail(error.msg, error.pos)
            except RecursionError:
                self._fail("nested too deep", self._position)
            if end >= len(self._text) - CUT_MARGIN and self._read_more():
                continue
            text, self._position = self._text[self._position : end], end
            return value, text

    def _read_more(self) -> bool:
        """Extend the window and drop what is consumed; return False at the end.

        The window at least doubles, so that a long value is parsed a few times only.
        """
        length = len(self._text) - self._position
        if length > json_lines.MAX_ROW_BYTES:
            self._fail(f"found a value of more than {json_lines.MAX_ROW_BYTES:,} characters", self._position)
        wanted = max(READ_CHARACTERS, min(length, json_lines.MAX_ROW_BYTES - length))
        more = "" if self._at_end else self._read(wanted)
        if not more:
            self._at_end = True
            return False
        self._text, self._consumed = self._text[self._position :] + more, self._consumed + self._position
        self._position = 0
        return True

    def _fail(self, message: str, position: int) -> NoReturn:
        raise JsonArrayError(f"{message}, at character {self._consumed + position}")


def find_rows_key(start: str, is_row: Callable[[Any], bool]) -> str | None:
    """Return the key under which a file that begins with `start` has its rows: "" for an array, None for neither.

    An object has them in its first list, if that begins with a row. A row has lists too, but of turns.
    """
    window = JsonWindow(io.StringIO(start).read)
    try:
        if window.peek() == "[":
            return ""
        for key in _iterate_keys(window):
            if window.peek() == "[":
                return key if any(is_row(value) for value, _ in islice(_iterate_values(window), 1)) else None
            window.take_value()
    except JsonArrayError:  # perhaps JSON longer than `start`
        return None
    return None


def iterate_elements(read: Callable[[int], str], key: str, is_row: Callable[[Any], bool]) -> Iterator[str]:
    """Yield the text of each element of the array, or of the array under `key`; `read(n)` returns the next n characters.

    Raises:
        JsonArrayError: also where another list has rows too, which would be lost.
    """
    window = JsonWindow(read)
    if not key:
        yield from (text for _, text in _iterate_values(window))
    else:
        for name in _iterate_keys(window):
            if window.peek() != "[":
                window.take_value()
            elif name == key:
                yield from (text for _, text in _iterate_values(window))
            elif any(is_row(value) for value, _ in _iterate_values(window)):
                raise JsonArrayError(f"found rows under {key!r} and under {name!r}")
    if more := window.peek():
        raise JsonArrayError(f"found {more!r} after its end")


def _iterate_keys(window: JsonWindow) -> Iterator[str]:
    """Yield the keys of an object; the caller consumes each value before the next key."""
    for _ in _iterate_members(window, "{}"):
        window.expect('"')
        key, _ = window.take_value()
        window.take(":")
        yield key


def _iterate_values(window: JsonWindow) -> Iterator[tuple[Any, str]]:
    """Yield (element, its text) of an array."""
    return (window.take_value() for _ in _iterate_members(window, "[]"))


def _iterate_members(window: JsonWindow, brackets: str) -> Iterator[None]:
    """Consume the punctuation of an array or object; the caller consumes each member before the next."""
    window.take(brackets[0])
    if window.peek() == brackets[1]:
        window.take(brackets[1])
        return
    yield
    while window.take(f",{brackets[1]}") == ",":
        yield
