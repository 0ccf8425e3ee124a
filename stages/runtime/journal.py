"""A journal of finished work: one JSON line per piece of work under a key of its own, append only.

A line reaches the file as it is written, so a killed process loses no finished piece; a line cut by the kill is dropped
when the journal is opened again. Pieces are found by key, never by line number, since they finish in any order.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

FSYNC_S = 1.0  # a kill needs no fsync, a power cut does; one a second costs nothing


class Journal:
    """Finished pieces of work by key. One process writes at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.done: dict[str, Any] = {}
        if path.exists():
            self._read_finished()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._synced = time.monotonic()

    def add(self, key: str, value: Any) -> None:
        """Store `value` under a key; an existing value is kept."""
        if key in self.done:
            return
        line = json.dumps([key, value], ensure_ascii=False, allow_nan=False).encode() + b"\n"
        while line:  # a full disk or a signal may take a part of it
            line = line[os.write(self._descriptor, line) :]
        self.done[key] = value
        if time.monotonic() - self._synced > FSYNC_S:
            os.fsync(self._descriptor)
            self._synced = time.monotonic()

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _read_finished(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                try:
                    found, value = json.loads(line)
                except ValueError:
                    if line.endswith(b"\n"):
                        raise ValueError(
                            f"{self.path} line {number + 1} is not a whole piece of work, though lines follow it; only its last "
                            "may be cut. Remove it, it holds unfinished work and nothing else, and run again: that is made again"
                        ) from None
                    break
                if not line.endswith(b"\n"):  # JSON by chance, but the writer had not finished
                    break
                self.done.setdefault(found, value)
                whole += len(line)
        os.truncate(self.path, whole)
