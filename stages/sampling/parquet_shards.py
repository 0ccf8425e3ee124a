"""Write a table as shards, filled in any order: `part-00000.parquet`, ...

A row's shard follows from its position in the order of requests, not from when it was done. A shard is published once each of
its positions is set (kept or dropped); its journal is then deleted. Memory and journals hold unfinished shards only, and a
resumed run finds the published ones with their counts, and of the others what their journals hold:

    FOLDER/parts/part-00000.parquet    published: the kept rows, in order
    FOLDER/counts/00000.json           its counts, written before it
    FOLDER/journals/00001.jsonl        of an unfinished shard, what was set (runtime/journal.py)
"""

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stages.data import conversations
from stages.data.conversations import SampledRow
from stages.runtime import atomic, scratch
from stages.runtime.journal import Journal


class ParquetShardWriter:
    """Writer of one table: `set_row` for each position once, then `finish`, then `publish`."""

    def __init__(self, folder: Path, shards: np.ndarray, schema: pl.Schema) -> None:
        """`shards` [N] int64: the shard of each position, ascending from 0."""
        self.folder, self.schema, self._shards = folder, schema, shards
        self._lengths = np.bincount(shards, minlength=1)  # a table without rows is one shard without rows
        self.num_shards = len(self._lengths)
        self.counts: Counter[str] = Counter()  # over all positions that are set, by this run and earlier ones
        self.messages: dict[int, dict[str, Any]] = {}  # position in an unfinished shard -> what later turns quote of it
        # Shard -> position -> row, None for a dropped one.
        self._unfinished: dict[int, dict[int, dict[str, Any] | None]] = {}
        self._shard_counts: dict[int, Counter[str]] = {}
        self._journals: dict[int, Journal] = {}
        self._oldest = 0
        for name in ("parts", "counts", "journals"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.published = {n for n in range(self.num_shards) if self._locate_part(n).exists()}
        with scratch.check_unfinished(folder):
            for number in self.published:
                conversations.read_table(self._locate_part(number), schema, "sample_target")
                self.counts.update(atomic.read_json(self._locate_counts(number), "sample_target"))
        for number in self.published:
            self._locate_journal(number).unlink(missing_ok=True)  # left by a run killed between publishing and deleting
        self.num_set = sum(int(self._lengths[number]) for number in self.published)  # positions with a row, or dropped
        for number in sorted({int(path.stem) for path in (folder / "journals").glob("*.jsonl")}):
            for position, (row, counts, message) in self._open_journal(number).done.items():
                self._take_row(int(position), row, counts, message)
        self.num_resumed = self.num_set

    def shard_of(self, position: int) -> int:
        return int(self._shards[position])

    def find_start(self, number: int) -> int:
        return int(np.searchsorted(self._shards, number))

    def is_set(self, position: int) -> bool:
        """Return whether `position` has a row or is dropped, so that it needs no work."""
        number = self.shard_of(position)
        return number in self.published or position in self._unfinished.get(number, ())

    @property
    def oldest(self) -> int:
        """Return the first shard with positions to set; `num_shards` where all are complete."""
        while self._oldest < self.num_shards and (self._oldest in self.published or self._is_complete(self._oldest)):
            self._oldest += 1
        return self._oldest

    def set_row(
        self,
        position: int,
        row: SampledRow | None,
        counts: Mapping[str, int],
        message: dict[str, Any] | None = None,
        is_final: bool = True,
    ) -> None:
        """Set the row of a position, None for a dropped one, and add to the counts; publish its shard if complete.

        `message` is the answer as later turns quote it. A run that resumes finds it all, unless it is not `is_final`.
        """
        number, content = self.shard_of(position), None if row is None else vars(row)
        assert not self.is_set(position), f"row {position} twice"
        if is_final:
            self._open_journal(number).add(str(position), [content, counts, message])
        self._take_row(position, content, counts, message)
        # A shard without kept rows waits for `finish`: its cause, such as failing servers, may be fixed by then.
        if self._is_complete(number) and any(self._unfinished[number].values()):
            self._publish_shard(number)

    def _take_row(
        self, position: int, row: dict[str, Any] | None, counts: Mapping[str, int], message: dict[str, Any] | None
    ) -> None:
        number = self.shard_of(position)
        self._unfinished.setdefault(number, {})[position] = row
        self._shard_counts.setdefault(number, Counter()).update(counts)
        self.counts.update(counts)
        self.num_set += 1
        if message is not None:
            self.messages[position] = message

    def _open_journal(self, number: int) -> Journal:
        if number not in self._journals:
            self._journals[number] = Journal(self._locate_journal(number))
        return self._journals[number]

    def finish(self) -> None:
        """Publish the shards that `set_row` held back; every position must be set."""
        for number in sorted(set(range(self.num_shards)) - self.published):
            assert self._is_complete(number), (
                f"shard {number} lacks {self._lengths[number] - len(self._unfinished[number])} rows"
            )
            self._publish_shard(number)

    def publish(self, to: Path) -> None:
        """Hard-link or copy the whole table to `to`, atomically. The scratch keeps its files: a kill loses nothing."""
        assert len(self.published) == self.num_shards
        with atomic.write_folder(to) as folder:
            for number in range(self.num_shards):
                part = self._locate_part(number)
                try:
                    os.link(part, folder / part.name)
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(part, folder / part.name)

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()

    def _is_complete(self, number: int) -> bool:
        return len(self._unfinished.get(number, ())) == self._lengths[number]

    def _publish_shard(self, number: int) -> None:
        taken = self._unfinished.pop(number, {})
        rows = [row for _, row in sorted(taken.items()) if row is not None]
        atomic.write_json(self._locate_counts(number), dict(self._shard_counts.get(number, {})))
        conversations.write_table(self._locate_part(number), pl.DataFrame(rows, schema=self.schema), self.schema)
        self.published.add(number)
        for position in taken:
            self.messages.pop(position, None)
        self._shard_counts.pop(number, None)
        if journal := self._journals.pop(number, None):
            journal.close()
        self._locate_journal(number).unlink(missing_ok=True)

    def _locate_part(self, number: int) -> Path:
        return self.folder / "parts" / conversations.name_shard(number)

    def _locate_counts(self, number: int) -> Path:
        return self.folder / "counts" / f"{number:05d}.json"

    def _locate_journal(self, number: int) -> Path:
        return self.folder / "journals" / f"{number:05d}.jsonl"
