"""When not to speculate: speedups of served cells over concurrency and answer length, and where they fall below 1.

`rows` are lines of results/served.csv (results/served_table.py).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.reporting import plots
from stages.reporting.text import format_tree
from stages.results import break_even

Row = dict[str, Any]
LoadKey = tuple[float, float]  # (max_new_tokens, concurrency); infinite where it has no limit


@dataclass(frozen=True)
class SweepCell:
    """One load of a sweep, in its heat table."""

    row: Row
    weight: float  # strength of its colour, in 0..1
    clear: bool  # False where the speedup's interval holds 1


@dataclass(frozen=True)
class SweepLine:
    tokens: float
    cells: list[SweepCell | None]  # by concurrency; None where that load was not measured


@dataclass(frozen=True)
class SpeedupPlot:
    lines: list[plots.SpeedupLine]
    axis: str
    unit: str  # of the lines' names


@dataclass(frozen=True)
class LoadSweep:
    """Speedups of one tree, or of the best tree at each load, at several loads."""

    name: str
    workload: str
    checkpoint: str
    engine: str
    of_trees: bool  # the best tree at each load
    loads: int
    slower: list[Row]  # loads at which plain decoding is faster
    caps: list[float]
    heat: list[SweepLine]
    by_length: list[str]  # break-evens along the concurrency, one sentence per answer length
    by_cap: list[str]  # break-evens along the answer length, one sentence per concurrency
    plot: SpeedupPlot | None

    def draw(self) -> Any:
        """Return the plot as an SVG; None where the sweep has no axis."""
        if self.plot is None:
            return None
        return plots.render_svg(
            partial(plots.draw_speedups, lines=self.plot.lines, axis=self.plot.axis, unit=self.plot.unit)
        )


def get_load(row: Row) -> LoadKey:
    return row["max_new_tokens"], math.inf if row["concurrency"] is None else row["concurrency"]


def get_request_rate(row: Row) -> float | None:
    """Return requests per second; None where all are sent at once, which the CSV has as empty or inf."""
    rate = float(row["request_rate"] or "inf")
    return None if math.isinf(rate) else rate


def build_sweeps(rows: list[Row]) -> list[LoadSweep]:
    """Return a sweep for each tree that was measured at several loads, and before them one of the best tree at each load.

    Loads with a request rate are left out: throughput follows the arrivals as long as the server keeps up, and nothing
    breaks even.
    """
    rows = [row for row in rows if row["speedup"] is not None and get_request_rate(row) is None]
    found = []
    for names in dict.fromkeys(_get_names(row) for row in rows):
        group = [row for row in rows if _get_names(row) == names]
        trees = list(dict.fromkeys(row["tree"] for row in group))
        if len(trees) > 1:
            fastest = {get_load(row): row for row in sorted(group, key=lambda row: row["speedup"])}
            found.append(_build_sweep("the best tree at each load", list(fastest.values()), of_trees=True))
        found += [_build_sweep(format_tree(tree), [row for row in group if row["tree"] == tree]) for tree in trees]
    return [sweep for sweep in found if sweep.loads > 1]


def _get_names(row: Row) -> tuple[str, str, str]:
    return row["workload"], row["checkpoint"], row["engine"]


def _build_sweep(name: str, rows: list[Row], of_trees: bool = False) -> LoadSweep:
    by_load = {get_load(row): row for row in rows}
    lengths, caps = sorted({tokens for tokens, _ in by_load}), sorted({cap for _, cap in by_load})
    farthest = max(abs(math.log(row["speedup"])) for row in rows) or 1.0
    heat = [
        SweepLine(tokens, [_build_sweep_cell(by_load.get((tokens, cap)), farthest) for cap in caps])
        for tokens in lengths
    ]
    slower = [row for _, row in sorted(by_load.items()) if row["speedup"] < 1]
    by_length, by_cap = _describe_break_evens(by_load, lengths, caps)
    plot = _build_speedup_plot(by_load, lengths, caps)
    return LoadSweep(name, *_get_names(rows[0]), of_trees, len(rows), slower, caps, heat, by_length, by_cap, plot)


def _build_sweep_cell(row: Row | None, farthest: float) -> SweepCell | None:
    """Return the cell; `farthest` is the largest |log speedup| of the sweep."""
    if row is None:
        return None
    holds_1 = row["speedup_low"] is not None and row["speedup_low"] <= 1 <= row["speedup_high"]
    return SweepCell(row, abs(math.log(row["speedup"])) / farthest, not holds_1)


def _describe_break_evens(
    by_load: dict[LoadKey, Row], lengths: list[float], caps: list[float]
) -> tuple[list[str], list[str]]:
    """Return break-evens in words: along the concurrency for each answer length, and the other way round."""
    limits = [cap for cap in caps if not math.isinf(cap)]  # no limit has no place on the axis
    by_length, by_cap = [], []
    for tokens in lengths:
        points = [(cap, by_load[tokens, cap]["speedup"]) for cap in limits if (tokens, cap) in by_load]
        if len(points) > 1:
            by_length.append(f"answers of {tokens:g} tokens: {break_even.describe_crossings(points, 'concurrency')}")
    for cap in caps:
        points = [(tokens, by_load[tokens, cap]["speedup"]) for tokens in lengths if (tokens, cap) in by_load]
        if len(points) > 1:
            at = "without a limit of concurrency" if math.isinf(cap) else f"at concurrency {cap:g}"
            by_cap.append(f"{at}: {break_even.describe_crossings(points, 'answer length')}")
    return by_length, by_cap


def _build_speedup_plot(by_load: dict[LoadKey, Row], lengths: list[float], caps: list[float]) -> SpeedupPlot | None:
    """Return a line per answer length over concurrency, or per concurrency over answer length where only that varies."""
    limits = [cap for cap in caps if not math.isinf(cap)]
    if len(limits) > 1:
        axis, unit = "concurrency", "tokens"
        series = {tokens: [(cap, by_load.get((tokens, cap))) for cap in limits] for tokens in lengths}
    elif len(lengths) > 1:
        axis, unit = "answer length (tokens)", "at once"
        series = {cap: [(tokens, by_load.get((tokens, cap))) for tokens in lengths] for cap in caps}
    else:
        return None
    lines = [
        plots.SpeedupLine(
            f"{name:g}", [(x, row["speedup"], row["speedup_low"], row["speedup_high"]) for x, row in points if row]
        )
        for name, points in series.items()
    ]
    return SpeedupPlot([line for line in lines if line.points], axis, unit)
