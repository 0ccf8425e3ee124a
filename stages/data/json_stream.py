"""The elements of a JSON array, one by one, of a file of any length in the memory of its largest element.

The standard library parses a value that starts at a given place and says where it ends, so a window over the text is
enough: it grows while a value may go on behind it, and forgets what was read. An element comes as text, which another
process may parse again: that is a fraction of what sending it as objects takes.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

READ_CHARACTERS = 1 << 20  # characters read at a time
CUT_MARGIN = 12  # what is read so near the window's end may be the cut's doing: tru, \ud8, or a 1 that is 1.5e9
WHITESPACE = re.compile(r"[ \t\n\r]*")
parse_value = json.JSONDecoder().raw_decode


class JsonArrayError(Exception):
    """The text is no array of values; the message says where and why."""


class JsonWindow:
    """A text that is read as it is needed; `read(n)` gives up to n characters more, and none at its end."""

    def __init__(self, read: Callable[[int], str]) -> None:
        self._read, self._text, self._at, self._gone, self._whole = read, "", 0, 0, False

    def peek(self) -> str:
        """The next character that is no white space; nothing at the end."""
        while (place := WHITESPACE.match(self._text, self._at).end()) == len(self._text) and self._more():  # type: ignore[union-attr]
            pass
        self._at = place
        return self._text[place : place + 1]

    def expect(self, characters: str) -> str:
        """The next character, which must be one of these."""
        found = self.peek()
        if not found or found not in characters:
            self._fail(f"expected {' or '.join(characters)}, found {found or 'the end'}", self._at)
        return found

    def take(self, characters: str) -> str:
        """`expect`, and go on behind it."""
        found = self.expect(characters)
        self._at += 1
        return found

    def value(self) -> tuple[Any, str]:
        """The next value, and its text."""
        self.peek()
        while True:
            try:
                value, end = parse_value(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - CUT_MARGIN
                if cut and self._more():
                    continue
                self._fail(error.msg, error.pos)
            except RecursionError:
                self._fail("nested too deep", self._at)
            if end >= len(self._text) - CUT_MARGIN and self._more():
                continue
            text, self._at = self._text[self._at : end], end
            return value, text

    def _more(self) -> bool:
        """Read on, at least as much as there is, so that a long value is not parsed over and over. False at the end."""
        more = "" if self._whole else self._read(max(READ_CHARACTERS, len(self._text) - self._at))
        if not more:
            self._whole = True
            return False
        self._text, self._gone, self._at = self._text[self._at :] + more, self._gone + self._at, 0
        return True

    def _fail(self, message: str, place: int) -> NoReturn:
        raise JsonArrayError(f"{message}, at character {self._gone + place}")


def find_rows_key(start: str, is_row: Callable[[Any], bool]) -> str | None:
    """Under which key the file that starts so holds its rows: "" where it is an array itself, None where it is neither.

    An object holds them in the first list that begins with a row. A row has lists too, but of turns.
    """
    window = JsonWindow(io.StringIO(start).read)
    try:
        if window.peek() == "[":
            return ""
        for key in _iterate_keys(window):
            if window.peek() != "[":
                window.value()
            elif any(is_row(value) for value, _ in islice(_iterate_values(window), 1)):
                return key
            else:
                return None
    except JsonArrayError:  # or it is JSON, and longer than what we were given
        return None
    return None


def iterate_elements(read: Callable[[int], str], key: str, is_row: Callable[[Any], bool]) -> Iterator[str]:
    """The elements of the array, or with a key of the array under it; `read(n)` gives the text bit by bit.

    Raises:
        NotJson: also where another list holds rows as well, which would be lost.
    """
    window = JsonWindow(read)
    if not key:
        yield from (text for _, text in _iterate_values(window))
    else:
        for name in _iterate_keys(window):
            if window.peek() != "[":
                window.value()
            elif name == key:
                yield from (text for _, text in _iterate_values(window))
            elif any(is_row(value) for value, _ in _iterate_values(window)):
                raise JsonArrayError(f"found rows under {key!r} and under {name!r}")
    if more := window.peek():
        raise JsonArrayError(f"found {more!r} after its end")


def _iterate_keys(window: JsonWindow) -> Iterator[str]:
    """The keys of an object; whoever asks for the next has taken the value."""
    window.take("{")
    if window.peek() == "}":
        window.take("}")
        return
    while True:
        window.expect('"')
        key, _ = window.value()
        window.take(":")
        yield key
        if window.take(",}") == "}":
            return


def _iterate_values(window: JsonWindow) -> Iterator[tuple[Any, str]]:
    """The elements of an array, each with its text."""
    window.take("[")
    if window.peek() == "]":
        window.take("]")
        return
    while True:
        yield window.value()
        if window.take(",]") == "]":
            return
