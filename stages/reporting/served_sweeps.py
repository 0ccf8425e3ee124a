"""When not to speculate: speedups of served cells over concurrency and answer length, and where they fall below 1."""

import math
from dataclasses import dataclass
from functools import cached_property

from stages.cells import prediction
from stages.cells.table import ResultRow
from stages.params.tree_shape import Load
from stages.reporting.text import format_tree


@dataclass(frozen=True)
class LoadSweep:
    """Speedups of one tree, or of the best tree at each load, at several loads."""

    name: str
    workload: str
    checkpoint: str | None
    engine: str
    by_load: dict[Load, ResultRow]
    of_trees: bool = False  # the best tree at each load

    @cached_property
    def speedups(self) -> dict[Load, float]:
        return {load: row.speedup for load, row in self.by_load.items() if row.speedup is not None}

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({load.max_new_tokens for load in self.by_load})

    @cached_property
    def caps(self) -> list[int | None]:
        """Return the concurrencies; None is no limit."""
        return sorted({load.concurrency for load in self.by_load}, key=lambda cap: (cap is None, cap))

    @property
    def slower(self) -> list[Load]:
        """Return the loads at which plain decoding is faster."""
        return sorted((load for load, speedup in self.speedups.items() if speedup < 1), key=lambda load: load.sort_key)

    @property
    def by_length(self) -> list[str]:
        """Return the break-evens along the concurrency, a sentence for each answer length; no limit is not on the axis."""
        limits = [cap for cap in self.caps if cap is not None]
        loads = {f"answers of {tokens:g} tokens": [Load(tokens, cap) for cap in limits] for tokens in self.lengths}
        return self._describe_break_evens(loads, limits, "concurrency")

    @property
    def by_cap(self) -> list[str]:
        """Return the break-evens along the answer length, a sentence for each concurrency."""
        names = {cap: "without a limit of concurrency" if cap is None else f"at concurrency {cap}" for cap in self.caps}
        loads = {names[cap]: [Load(tokens, cap) for tokens in self.lengths] for cap in self.caps}
        return self._describe_break_evens(loads, self.lengths, "answer length")

    def _describe_break_evens(self, series: dict[str, list[Load]], axis: list[int], axis_name: str) -> list[str]:
        found = []
        for name, loads in series.items():
            points = [(x, self.speedups[load]) for x, load in zip(axis, loads, strict=True) if load in self.speedups]
            if len(points) > 1:
                found.append(f"{name}: {prediction.describe_crossings(points, axis_name)}")
        return found

    def weigh(self, row: ResultRow) -> float:
        """Return the strength of a load's colour, in 0..1; none where the interval holds 1, or is not known."""
        if row.speedup_low is None or holds_one(row):
            return 0.0
        farthest = max(abs(math.log(speedup)) for speedup in self.speedups.values()) or 1.0
        return abs(math.log(self.speedups[row.load])) / farthest


def holds_one(row: ResultRow) -> bool:
    """Return whether the speedup's interval holds 1; False without one."""
    return row.speedup_low is not None and row.speedup_high is not None and row.speedup_low <= 1 <= row.speedup_high


def build_sweeps(rows: list[ResultRow]) -> list[LoadSweep]:
    """Return a sweep for each tree that was measured at several loads, and before them one of the best tree at each load.

    Loads with a request rate are left out: throughput follows the arrivals as long as the server keeps up, and nothing
    breaks even.
    """
    groups: dict[tuple[str, str | None, str], list[ResultRow]] = {}
    for row in rows:
        if row.speedup is not None and row.rate is None and not row.in_turns:
            groups.setdefault((row.workload, row.checkpoint, row.engine), []).append(row)
    found = []
    for names, group in groups.items():
        trees: dict[str, dict[Load, ResultRow]] = {}
        for row in group:
            trees.setdefault(str(row.tree), {})[row.load] = row
        if len(trees) > 1:
            fastest = {row.load: row for row in sorted(group, key=lambda row: row.speedup or 0.0)}
            found.append(LoadSweep("the best tree at each load", *names, fastest, of_trees=True))
        found += [LoadSweep(format_tree(tree), *names, by_load) for tree, by_load in trees.items()]
    return [sweep for sweep in found if len(sweep.by_load) > 1]
