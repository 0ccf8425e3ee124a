"""The terminal of a command: Ctrl-C is known whatever exception it ends in, and any text can be printed."""

import codecs
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, current_thread, main_thread
from types import FrameType

import stages

INTERRUPTED = 128 + signal.SIGINT  # exit status after Ctrl-C


def replace_unprintable() -> None:
    """Print a question mark for what a terminal can't show: one of Latin-1 has no dash of a table."""
    for stream in (sys.stdout, sys.stderr):
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
