"""The page's part on latencies: how they spread over single answers or requests of all repeats, per tree and plain decoding."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.cells.cell import LoadPoint, RequestRow
from stages.cells.table import TableLine
from stages.reporting import plots
from stages.reporting.plots import PlotPoint
from stages.reporting.tables import format_title, select_best_plain
from stages.reporting.text import format_tree

PERCENTILES = (10, 50, 90, 99)  # with linear interpolation between two values
PLAIN_LABEL = "plain decoding"
ANSWER_NAMES = {"e2e_s": "answer, s", "ttft_s": "prefill, ms", "tpot_s": "a token after it, ms"}
REQUEST_NAMES = {"e2e_s": "request, s", "ttft_s": "TTFT, ms", "tpot_s": "TPOT, ms"}
MAX_PLOT_LINES = 24  # lines of a plot: more are illegible


@dataclass(frozen=True)
class LatencyLine:
    tree: str
    answers: int
    percentiles: dict[str, list[float] | None]  # kind of latency -> its PERCENTILES; None where no answer has it


@dataclass(frozen=True)
class LatencyGroup:
    """Latencies of the same prompts at the same load, a line per tree."""

    about: str
    names: dict[str, str]  # kind of latency -> heading
    rows: list[LatencyLine]
    plots: dict[str, Any]  # kind of latency -> SVG

    @property
    def headings(self) -> list[str | tuple[str, str]]:
        """Return the heads of the table of percentiles."""
        return ["tree", "answers", *((name, f"p{share}") for name in self.names.values() for share in PERCENTILES)]


def summarise_latencies(lines: list[TableLine]) -> list[LatencyGroup]:
    """Return a group for each workload and checkpoint: of loads at the heaviest, the longest answers and the most at once."""
    drafted = [line for line in lines if line.row.is_measured and not line.row.is_plain]
    found = []
    for names in dict.fromkeys((line.row.workload, line.row.checkpoint, line.row.engine) for line in drafted):
        group = [line for line in drafted if (line.row.workload, line.row.checkpoint, line.row.engine) == names]
        heaviest = max(group, key=lambda line: line.row.load.sort_key).row
        same_load = [line for line in group if line.row.load == heaviest.load]
        drawn = {format_tree(line.row.shape.name): line.point for line in same_load}
        drawn |= {PLAIN_LABEL: _choose_plain(lines, same_load)}
        answers = {name: [row for row in point.requests if not row.failed] for name, point in drawn.items() if point}
        load = " engine" if heaviest.in_turns else f", {heaviest.load}"
        about = f"{format_title(*names[:2])}, {heaviest.engine}{load}"
        found.append(_summarise_spread(about, answers, ANSWER_NAMES if heaviest.in_turns else REQUEST_NAMES))
    return found


def _choose_plain(lines: list[TableLine], drafted: list[TableLine]) -> LoadPoint | None:
    """Return the point of plain decoding at the load of `drafted`: in turns the one of median speed, else the fastest."""
    row = drafted[0].row
    if row.in_turns:
        of_speed = sorted(drafted, key=lambda line: line.row.baseline_output_throughput or 0.0)
        return of_speed[(len(of_speed) - 1) // 2].baseline_point
    members = [line for line in lines if (line.row.workload, line.row.engine) == (row.workload, row.engine)]
    fastest = select_best_plain([line.row for line in members]).get(row.load)
    return next((line.point for line in members if line.row is fastest), None)


def _summarise_spread(about: str, answers: dict[str, list[RequestRow]], names: dict[str, str]) -> LatencyGroup:
    import numpy as np  # the terminal's table does without

    rows = []
    for tree, found in answers.items():
        percentiles: dict[str, list[float] | None] = {}
        for name in names:
            factor = 1 if name == "e2e_s" else 1000  # the others are shown in ms
            values = [factor * value for answer in found if (value := answer[name]) is not None]
            percentiles[name] = np.percentile(values, PERCENTILES).tolist() if values else None
        rows.append(LatencyLine(tree, len(found), percentiles))
    shown = rows[-MAX_PLOT_LINES:]
    drawn = {}
    for name, label in names.items():
        if known := [row for row in shown if row.percentiles[name]]:
            draw = partial(draw_latencies, rows=known, name=name, label=label)
            drawn[name] = plots.render_svg(draw, f"Latencies, {about}: {label}", 1 + len(shown) / 4)
    return LatencyGroup(about, names, rows, drawn)


def draw_latencies(axes: Any, rows: list[LatencyLine], name: str, label: str) -> list[PlotPoint]:
    """Draw a line per row, the first on top: from the 10th percentile to the 90th, a dot at the median, a tick at the 99th."""
    heights, plot_points = range(len(rows)), []
    for height, row in zip(heights, rows, strict=True):
        percentiles = row.percentiles[name]
        assert percentiles, f"{row.tree} has no {name}"
        low, middle, high, last = percentiles
        colour = plots.INK_COLOUR if row.tree == PLAIN_LABEL else plots.SERIES_COLOURS[0]
        axes.hlines(height, low, high, color=colour, linewidth=2.2)
        axes.plot(middle, height, "o", color=colour, markersize=5)
        axes.plot(last, height, "|", color=colour, markersize=7)
        shares = ", ".join(f"p{share} {value:.4g}" for share, value in zip(PERCENTILES, percentiles, strict=True))
        plot_points.append(PlotPoint(middle, height, f"{row.tree}, {label}: {shares}"))
    axes.set_yticks(heights, [row.tree for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set(xlabel=label)
    return plot_points
