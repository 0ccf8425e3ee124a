"""Write a table as shards of a fixed number of positions, filled in any order: `part-00000.parquet`, ...

A row's shard follows from its position in the order of requests, not from when it was done. A shard is published once each of
its positions is set (kept or dropped); its journal is then deleted. Memory and journals hold unfinished shards only, and a
resumed run finds the published ones with their counts:

    FOLDER/parts/part-00000.parquet    published: the kept rows, in order
    FOLDER/counts/00000.json           its counts, written before it
    FOLDER/journals/00001.jsonl        of an unfinished shard (runtime/journal.py)
"""

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from stages.data import conversations
from stages.data.conversations import SampledRow
from stages.runtime import atomic, scratch
from stages.runtime.journal import Journal


class ParquetShardWriter:
    """Writer of one table: `set_row` for each of `total` positions once, then `finish`, then `publish`."""

    def __init__(self, folder: Path, total: int, size: int, schema: pl.Schema) -> None:
        self.folder, self.total, self.size, self.schema = folder, total, size, schema
        self.num_shards = max(1, -(-total // size))  # a table without rows is one shard without rows
        self.counts: Counter[str] = Counter()  # over all positions that are set, by this run and earlier ones
        # Shard -> position -> row, None for a dropped one.
        self._unfinished: dict[int, dict[int, SampledRow | None]] = {}
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
        unfinished = {int(path.stem) for path in (folder / "journals").glob("*.jsonl")}
        self.num_set = sum(map(self.shard_length, self.published))  # positions with a row, or dropped
        self.num_resumed = self.num_set + sum(self.journal(number).resumed for number in unfinished)

    def shard_of(self, position: int) -> int:
        return position // self.size

    def shard_length(self, number: int) -> int:
        """Return how many positions shard `number` has."""
        return min(self.size, self.total - number * self.size)

    def is_published(self, position: int) -> bool:
        """Return whether the shard of `position` is published, so that it needs no work."""
        return self.shard_of(position) in self.published

    @property
    def oldest(self) -> int:
        """Return the first shard with positions to set; `num_shards` where all are complete."""
        while self._oldest < self.num_shards and (self._oldest in self.published or self._is_complete(self._oldest)):
            self._oldest += 1
        return self._oldest

    def journal(self, number: int) -> Journal:
        """Return the journal of shard `number`, which must not be published yet."""
        assert number not in self.published, f"shard {number} is published"
        if number not in self._journals:
            self._journals[number] = Journal(self._locate_journal(number))
        return self._journals[number]

    def set_row(self, position: int, row: SampledRow | None, counts: Mapping[str, int]) -> None:
        """Set the row of a position, None for a dropped one, and add to the counts; publish its shard if complete."""
        number = self.shard_of(position)
        rows = self._unfinished.setdefault(number, {})
        is_new = position < self.total and not self.is_published(position) and position not in rows
        assert is_new, f"row {position} twice"
        rows[position] = row
        self.num_set += 1
        self._shard_counts.setdefault(number, Counter()).update(counts)
        self.counts.update(counts)
        # A shard without kept rows waits for `finish`: its cause, such as failing servers, may be fixed by then.
        if self._is_complete(number) and any(rows.values()):
            self._publish_shard(number)

    def finish(self) -> None:
        """Publish the shards that `set_row` held back; every position must be set."""
        for number in sorted(set(range(self.num_shards)) - self.published):
            lacking = self.shard_length(number) - len(self._unfinished.get(number, ()))
            assert not lacking, f"shard {number} lacks {lacking} rows"
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
        return len(self._unfinished.get(number, ())) == self.shard_length(number)

    def _publish_shard(self, number: int) -> None:
        rows = [row for _, row in sorted(self._unfinished.get(number, {}).items()) if row is not None]
        atomic.write_json(self._locate_counts(number), dict(self._shard_counts.get(number, {})))
        conversations.write_table(
            self._locate_part(number), pl.DataFrame([vars(row) for row in rows], schema=self.schema), self.schema
        )
        self.published.add(number)
        self._unfinished.pop(number, None)
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
