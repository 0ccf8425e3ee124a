"""A table in shards of so many rows, made in any order and published one by one: `part-00000.parquet`, ...

Which shard a row belongs to follows from its position in the order of what was asked, never from when it was done. A
shard is published as soon as its last row is settled, kept or dropped; its journal is then deleted. So memory and
journals hold the shards under way, and a killed run finds the others done, with what was counted in them:

    FOLDER/parts/part-00000.parquet    published; its rows in their order, without the dropped ones
    FOLDER/counts/00000.json           what was counted in it, written before it
    FOLDER/journals/00001.jsonl        of a shard under way (runtime/journal.py)
"""

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from stages.data import conversations
from stages.runtime import atomic, scratch
from stages.runtime.journal import Journal

Row = dict[str, Any]


class ParquetShardWriter:
    """One table under way: `settle` each of `total` positions once, `finish`, and `move` it into its place."""

    def __init__(self, folder: Path, total: int, size: int, schema: pl.Schema) -> None:
        self.folder, self.total, self.size, self.schema = folder, total, size, schema
        self.count = max(1, -(-total // size))  # a table without rows is one shard without rows
        self.counted: Counter[str] = Counter()  # in all rows that are settled, by this run and those before it
        self._under_way: dict[int, dict[int, Row | None]] = {}  # shard -> position -> its row, None for a dropped one
        self._counts: dict[int, Counter[str]] = {}
        self._journals: dict[int, Journal] = {}
        self._oldest = 0
        for inside in ("parts", "counts", "journals"):
            (folder / inside).mkdir(parents=True, exist_ok=True)
        self.published = {n for n in range(self.count) if self._part(n).exists()}
        with scratch.reading(folder):
            for number in self.published:
                conversations.read_table(self._part(number), schema, "sample_target")
                self.counted.update(atomic.read_json(self._count(number), "sample_target"))
        for number in self.published:
            self._journal(number).unlink(missing_ok=True)  # of a run killed between the two
        found = {int(path.stem) for path in (folder / "journals").glob("*.jsonl")}
        self.resumed = sum(map(self.length, self.published)) + sum(self.journal(number).resumed for number in found)

    def shard(self, position: int) -> int:
        return position // self.size

    def length(self, number: int) -> int:
        """How many positions shard `number` has."""
        return min(self.size, self.total - number * self.size)

    def done(self, position: int) -> bool:
        """Whether it needs no work: its shard was published."""
        return self.shard(position) in self.published

    @property
    def oldest(self) -> int:
        """The first shard that still has rows to settle; `count` where none has."""
        while self._oldest < self.count and (self._oldest in self.published or self._whole(self._oldest)):
            self._oldest += 1
        return self._oldest

    def journal(self, number: int) -> Journal:
        """Of shard `number`, which must not be published yet."""
        assert number not in self.published, f"shard {number} is done"
        if number not in self._journals:
            self._journals[number] = Journal(self._journal(number))
        return self._journals[number]

    def settle(self, position: int, row: Row | None, counts: Mapping[str, int]) -> None:
        """Put a row, or None for one that is dropped, into its place, with what to count for it."""
        number = self.shard(position)
        rows = self._under_way.setdefault(number, {})
        assert position < self.total and not self.done(position) and position not in rows, f"row {position} twice"
        rows[position] = row
        self._counts.setdefault(number, Counter()).update(counts)
        self.counted.update(counts)
        # One without a single row waits for `finish`: what dropped them all, servers say, may be mended by then.
        if self._whole(number) and any(rows.values()):
            self._publish(number)

    def finish(self) -> None:
        """Publish what `settle` held back; every position must be settled."""
        for number in sorted(set(range(self.count)) - self.published):
            assert self._whole(number), (
                f"shard {number} lacks {self.length(number) - len(self._under_way[number])} rows"
            )
            self._publish(number)

    def move(self, to: Path) -> None:
        """Put the whole table at `to`, atomically. The scratch keeps its own until it is removed: a kill loses nothing."""
        assert len(self.published) == self.count
        with atomic.write_folder(to) as folder:
            for number in range(self.count):
                part = self._part(number)
                try:
                    os.link(part, folder / part.name)
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(part, folder / part.name)

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()

    def _whole(self, number: int) -> bool:
        return len(self._under_way.get(number, ())) == self.length(number)

    def _publish(self, number: int) -> None:
        rows = [row for _, row in sorted(self._under_way.get(number, {}).items()) if row is not None]
        atomic.write_json(self._count(number), dict(self._counts.get(number, {})))
        conversations.write_table(self._part(number), pl.DataFrame(rows, schema=self.schema), self.schema)
        self.published.add(number)
        self._under_way.pop(number, None)
        self._counts.pop(number, None)
        if journal := self._journals.pop(number, None):
            journal.close()
        self._journal(number).unlink(missing_ok=True)

    def _part(self, number: int) -> Path:
        return self.folder / "parts" / conversations.name_shard(number)

    def _count(self, number: int) -> Path:
        return self.folder / "counts" / f"{number:05d}.json"

    def _journal(self, number: int) -> Path:
        return self.folder / "journals" / f"{number:05d}.jsonl"

    def __enter__(self) -> "ParquetShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
