"""When not to speculate: speedups of served cells over concurrency and answer length, and where they fall below 1."""

import math
from dataclasses import dataclass
from typing import Any

from stages.cells import prediction
from stages.cells.table import ResultRow
from stages.params.tree_shape import Load
from stages.reporting import plots
from stages.reporting.text import format_tree

RowsByLoad = dict[Load, ResultRow]


@dataclass(frozen=True)
class SweepCell:
    """One load of a sweep, in its heat table."""

    row: ResultRow
    weight: float  # strength of its colour, in 0..1

    @property
    def clear(self) -> bool:
        """Return False where the speedup's interval holds 1."""
        low, high = self.row.speedup_low, self.row.speedup_high
        return low is None or high is None or not low <= 1 <= high

    @property
    def colour(self) -> float:
        """Return the strength of its colour; none where the interval holds 1, or is not known."""
        return self.weight if self.clear and self.row.speedup_low is not None else 0.0


@dataclass(frozen=True)
class LoadSweep:
    """Speedups of one tree, or of the best tree at each load, at several loads."""

    name: str
    workload: str
    checkpoint: str | None
    engine: str
    of_trees: bool  # the best tree at each load
    loads: int
    slower: list[ResultRow]  # loads at which plain decoding is faster
    cap_names: list[str]  # concurrencies, as the heat table heads them
    heat: list[tuple[int, list[SweepCell | None]]]  # tokens, and by concurrency; None where that load was not measured
    by_length: list[str]  # break-evens along the concurrency, one sentence per answer length
    by_cap: list[str]  # break-evens along the answer length, one sentence per concurrency
    plot: plots.SpeedupPlot | None

    def draw(self) -> Any:
        """Return the plot as an SVG; None where the sweep has no axis."""
        return self.plot and plots.render_svg(self.plot.draw, f"Speedup of {self.name} over {self.plot.axis}")


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
        trees: dict[str, RowsByLoad] = {}
        for row in group:
            trees.setdefault(str(row.tree), {})[row.load] = row
        if len(trees) > 1:
            fastest = {row.load: row for row in sorted(group, key=_get_speedup)}
            found.append(_build_sweep("the best tree at each load", names, fastest, of_trees=True))
        found += [_build_sweep(format_tree(tree), names, by_load) for tree, by_load in trees.items()]
    return [sweep for sweep in found if sweep.loads > 1]


def _get_speedup(row: ResultRow) -> float:
    assert row.speedup is not None, "a sweep has rows with a speedup only"
    return row.speedup


def _build_sweep(
    name: str, names: tuple[str, str | None, str], by_load: RowsByLoad, of_trees: bool = False
) -> LoadSweep:
    lengths = sorted({load.max_new_tokens for load in by_load})
    caps = sorted({load.concurrency for load in by_load}, key=lambda cap: (cap is None, cap))
    strength = {load: abs(math.log(_get_speedup(row))) for load, row in by_load.items()}
    farthest = max(strength.values()) or 1.0
    cells = {load: SweepCell(row, strength[load] / farthest) for load, row in by_load.items()}
    heat = [(tokens, [cells.get(Load(tokens, cap)) for cap in caps]) for tokens in lengths]
    cap_names = ["no limit" if cap is None else str(cap) for cap in caps]
    slower = [row for row in sorted(by_load.values(), key=lambda row: row.load.sort_key) if _get_speedup(row) < 1]
    by_length, by_cap = _describe_break_evens(by_load, lengths, caps)
    plot = _build_speedup_plot(by_load, lengths, caps)
    return LoadSweep(name, *names, of_trees, len(by_load), slower, cap_names, heat, by_length, by_cap, plot)


def _describe_break_evens(
    by_load: RowsByLoad, lengths: list[int], caps: list[int | None]
) -> tuple[list[str], list[str]]:
    """Return break-evens in words: along the concurrency for each answer length, and the other way round."""
    speedups = {load: _get_speedup(row) for load, row in by_load.items()}
    limits = [cap for cap in caps if cap is not None]  # no limit is not on the axis
    by_length, by_cap = [], []
    for tokens in lengths:
        points = [(cap, speedups[load]) for cap in limits if (load := Load(tokens, cap)) in speedups]
        if len(points) > 1:
            by_length.append(f"answers of {tokens:g} tokens: {prediction.describe_crossings(points, 'concurrency')}")
    for cap in caps:
        points = [(tokens, speedups[load]) for tokens in lengths if (load := Load(tokens, cap)) in speedups]
        if len(points) > 1:
            cap_label = "without a limit of concurrency" if cap is None else f"at concurrency {cap}"
            by_cap.append(f"{cap_label}: {prediction.describe_crossings(points, 'answer length')}")
    return by_length, by_cap


def _build_speedup_plot(by_load: RowsByLoad, lengths: list[int], caps: list[int | None]) -> plots.SpeedupPlot | None:
    """Return a line per answer length over concurrency, or per concurrency over answer length where only that varies."""
    limits = [cap for cap in caps if cap is not None]
    series: dict[str, list[tuple[float, ResultRow | None]]]
    if len(limits) > 1:
        axis, unit = "concurrency", "tokens"
        series = {str(tokens): [(cap, by_load.get(Load(tokens, cap))) for cap in limits] for tokens in lengths}
    elif len(lengths) > 1:
        axis, unit = "answer length (tokens)", "concurrency"
        names = {cap: "inf" if cap is None else str(cap) for cap in caps}
        series = {names[cap]: [(tokens, by_load.get(Load(tokens, cap))) for tokens in lengths] for cap in caps}
    else:
        return None
    lines = {
        f"{name} {unit}": [(x, _get_speedup(row), row.speedup_low, row.speedup_high) for x, row in rows if row]
        for name, rows in series.items()
    }
    return plots.SpeedupPlot({name: points for name, points in lines.items() if points}, axis)
