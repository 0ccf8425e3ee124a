"""Which files of a project a process opens, as the kernel sees it (inotify), so native readers count too.

Python's audit hooks miss what polars, safetensors and tokenizers open from Rust. inotify names no process: watch while
nothing else works on the project. Knows nothing of aerie, since `sitecustomize` imports it into every stage.
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPEN, IS_FOLDER, OVERFLOW = 0x20, 0x40000000, 0x4000  # <sys/inotify.h>
EVENT = struct.Struct("iIII")
# Code, which tests/test_house.py compares by imports; git's and DVC's own; unfinished work.
SKIPPED = {
    "stages", "pipeline", "tests", "benchmarks", "docs", ".git", ".dvc", ".scratch", "logs", ".venv", "__pycache__",
}  # fmt: skip


class Watch:
    """Files opened in `project` from now on; folders made later are not seen into."""

    def __init__(self, project: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._queue >= 0, os.strerror(ctypes.get_errno())
        self._folders: dict[int, str] = {}
        for folder, below, _ in os.walk(project, followlinks=True):
            below[:] = [name for name in below if name not in SKIPPED]
            number = self._libc.inotify_add_watch(self._queue, os.fsencode(folder), OPEN)
            assert number >= 0, f"{folder}: {os.strerror(ctypes.get_errno())}"
            self._folders[number] = os.path.relpath(folder, project)

    def opened(self) -> list[str]:
        """Return the files' paths from the project, and stop watching."""
        found = {os.path.normpath(path) for path in self._events()}
        os.close(self._queue)
        return sorted(found)

    def _events(self) -> Iterator[str]:
        while True:
            try:
                events = os.read(self._queue, 1 << 20)
            except BlockingIOError:
                return
            at = 0
            while at < len(events):
                number, mask, _, length = EVENT.unpack_from(events, at)
                assert not mask & OVERFLOW, "more files were opened than the kernel keeps events of"
                name = events[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0")
                at += EVENT.size + length
                if name and not mask & IS_FOLDER and number in self._folders:
                    yield f"{self._folders[number]}/{os.fsdecode(name)}"


@contextmanager
def opening(project: Path) -> Iterator[list[str]]:
    """Fill the list with the files that were opened in the block."""
    watch, found = Watch(project), list[str]()
    try:
        yield found
    finally:
        found += watch.opened()
