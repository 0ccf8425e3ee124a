"""The terminal of a command: Ctrl-C is known whatever exception it ends in, and any text can be printed, as text alone."""

import codecs
import io
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, current_thread, main_thread
from types import FrameType

import stages

INTERRUPTED = 128 + signal.SIGINT  # exit status after Ctrl-C


# What a terminal obeys or turns around instead of showing it: controls but tab and newline, marks of direction, breaks of
# lines, and halves of characters, as which Python reads bytes of file names that are no UTF-8.
_HIDDEN = {
    *range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)
} - {0x09, 0x0A}  # fmt: skip
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _HIDDEN}
_INNER_BREAK = re.compile(r"\n(?!\n*(?:  |$))")  # an indented line can't be taken for one of ours
_MOVES = re.compile(
    r"(?:[\n\r]|\x1b\[(?:[AK]|[\d;]*m))*"
)  # of progress bars and colours, which are writes of their own


def escape_controls(text: str) -> str:
    """Return text in which control characters are written out, and breaks before lines that are not indented."""
    return _INNER_BREAK.sub(r"\\n", text.translate(_ESCAPES))


def _write_plain(stream: io.TextIOWrapper, text: str) -> int:
    """Write text with its controls written out: names of files and keys, and servers' messages, are the words of others.

    Breaks too, but for writes that end in one: print and sys.exit write the last break by itself, libraries whole paragraphs.
    """
    if not _MOVES.fullmatch(text):
        start = "\r" if text.startswith("\r") else ""  # of a progress bar
        plain = text[len(start) :].translate(_ESCAPES)
        text = start + (plain if plain.endswith("\n") else _INNER_BREAK.sub(r"\\n", plain))
    return io.TextIOWrapper.write(stream, text)


def filter_terminal() -> None:
    """Write out what a terminal would obey, and a question mark for what it can't show: Latin-1 has no dash of a table."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.write = partial(_write_plain, stream)  # type: ignore[method-assign]
        # UTF-8 shows all; and a stream whose file was exchanged below it, as the fork server does, can't be set.
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


@contextmanager
def watch_ctrl_c() -> Iterator[Event]:
    """Yield an event that is set by Ctrl-C, which raises KeyboardInterrupt.

    An import that a KeyboardInterrupt meets may end in another exception, as NumPy's in an ImportError.
    """
    found, before = Event(), signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        found.set()
        raise KeyboardInterrupt

    if before not in (signal.default_int_handler, stages.end_interrupted) or current_thread() is not main_thread():
        yield found
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
