"""The page's part on latencies: how they spread over single answers or requests of all repeats, per tree and plain decoding."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.cells import served_records
from stages.cells.served_records import RequestRow
from stages.cells.served_table import SPECULATIVE, ServedTableLine
from stages.cells.torch_records import TorchCell
from stages.reporting import plots
from stages.reporting.plots import PlotPoint
from stages.reporting.served import format_group_title
from stages.reporting.text import format_tree

PERCENTILES = (10, 50, 90, 99)  # with linear interpolation between two values
PLAIN_LABEL = "plain decoding"
MAX_PLOT_LINES = 24  # lines of a plot: more are illegible


@dataclass(frozen=True)
class AnswerLatencies:
    e2e: float | None  # the whole answer, in s
    ttft: float | None  # until its first token, in ms
    tpot: float | None  # each later token, in ms; None where it has no later token


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
        return [
            "tree",
            "answers",
            *((name, f"p{share}") for name in self.names.values() for share in PERCENTILES),
        ]


def select_typical(cells: list[TorchCell]) -> TorchCell:
    """Return the cell whose throughput of plain decoding is the median; of an even number the slower of both."""
    return sorted(cells, key=lambda cell: cell.metrics.baseline_output_tok_s)[(len(cells) - 1) // 2]


def summarise_torch_cells(cells: list[TorchCell]) -> list[LatencyGroup]:
    """Return a group for each workload and checkpoint of the torch engine."""
    found = []
    for names in dict.fromkeys((cell.workload, cell.checkpoint) for cell in cells):
        group = [cell for cell in cells if (cell.workload, cell.checkpoint) == names]
        typical = select_typical(group)
        answers = {
            format_tree(cell.tree): [
                _measure_answer(r.e2e_latency_s, r.prefill_latency_s, r.output_tokens) for r in cell.prompts
            ]
            for cell in group
        }
        answers[PLAIN_LABEL] = [
            _measure_answer(r.baseline_e2e_latency_s, r.baseline_prefill_latency_s, r.baseline_output_tokens)
            for r in typical.prompts
        ]
        about = f"{', '.join(names)}, {typical.engine} engine"
        headings = {"e2e": "answer, s", "ttft": "prefill, ms", "tpot": "a token after it, ms"}
        found.append(_summarise_spread(about, answers, headings))
    return found


def _measure_answer(e2e_s: float, prefill_s: float, tokens: int) -> AnswerLatencies:
    return AnswerLatencies(e2e_s, 1000 * prefill_s, 1000 * (e2e_s - prefill_s) / (tokens - 1) if tokens > 1 else None)


def summarise_served_lines(lines: list[ServedTableLine]) -> list[LatencyGroup]:
    """Return a group for each workload and checkpoint at its heaviest load: the longest answers, and the most at once."""
    ran = [line for line in lines if line.row.status == served_records.RAN]
    drafted = [line for line in ran if line.row.decoding == SPECULATIVE]
    found = []
    for names in dict.fromkeys((line.row.workload, line.row.checkpoint) for line in drafted):
        group = [line for line in drafted if (line.row.workload, line.row.checkpoint) == names]
        heaviest = max(group, key=lambda line: line.row.load.sort_key).row
        answers = {
            format_tree(line.cell.shape.name): _list_latencies(line) for line in group if line.row.load == heaviest.load
        }
        others = [line for line in ran if line.row.decoding != SPECULATIVE and line.row.workload == names[0]]
        if plain := [line for line in others if line.row.load == heaviest.load]:
            answers[PLAIN_LABEL] = _list_latencies(max(plain, key=lambda line: line.row.output_throughput or 0.0))
        about = f"{format_group_title(*names)}, {heaviest.engine}, {heaviest.load}"
        found.append(_summarise_spread(about, answers, {"e2e": "request, s", "ttft": "TTFT, ms", "tpot": "TPOT, ms"}))
    return found


def _list_latencies(line: ServedTableLine) -> list[AnswerLatencies]:
    def measure(r: RequestRow) -> AnswerLatencies:
        ttft, tpot = (None if seconds is None else 1000 * seconds for seconds in (r.ttft_s, r.tpot_s))
        return AnswerLatencies(r.e2e_s, ttft, tpot)

    return [measure(request) for request in (line.point.requests if line.point else []) if not request.failed]


def _summarise_spread(about: str, answers: dict[str, list[AnswerLatencies]], names: dict[str, str]) -> LatencyGroup:
    rows = [LatencyLine(tree, len(found), _compute_percentiles(found, names)) for tree, found in answers.items()]
    shown = rows[-MAX_PLOT_LINES:]
    drawn = {
        name: plots.render_svg(
            partial(draw_latencies, rows=[row for row in shown if row.percentiles[name]], name=name, label=label),
            f"Latencies, {about}: {label}",
            1 + len(shown) / 4,
        )
        for name, label in names.items()
        if any(row.percentiles[name] for row in shown)
    }
    return LatencyGroup(about, names, rows, drawn)


def _compute_percentiles(answers: list[AnswerLatencies], names: dict[str, str]) -> dict[str, list[float] | None]:
    import numpy as np  # the terminal's table does without

    found = {}
    for name in names:
        values = [value for answer in answers if (value := getattr(answer, name)) is not None]
        found[name] = np.percentile(values, PERCENTILES).tolist() if values else None
    return found


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
