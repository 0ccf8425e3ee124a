"""The page's summary: tau against verified tokens with the chosen trees marked, their speedup beside, and all trees.

Replays are those of the best checkpoint at temperature 0; predictions are the torch engine's, of one prompt at a time.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from stages.cells.prediction import PredictedSpeedup, index_torch_predictions
from stages.cells.replay_records import ReplayedTree
from stages.cells.table import ResultRow
from stages.params.tree_shape import TreeShape
from stages.reporting import plots
from stages.reporting.plots import INK_COLOUR, PlotPoint, cycle_styles, make_tree_point
from stages.reporting.text import format_interval
from stages.reporting.trees import find_pareto_front, select_best_steps

PLOT_HEIGHT = 2.75  # inches; two plots and the main table fit on one screen


@dataclass(frozen=True)
class TreeLine:
    """A tree of the grid: replayed, and where they exist its prediction and its cell."""

    replayed: ReplayedTree
    predicted: PredictedSpeedup | None
    measured: ResultRow | None


@dataclass(frozen=True)
class Overview:
    """The content of templates/summary.html.j2, and of the table of all trees."""

    trees: list[TreeLine]
    plots: dict[str, Any]  # "speedup" is None where no speedup is known


def build_overview(
    trees: list[ReplayedTree], chosen: list[str], rows: list[ResultRow], predicted: Iterable[PredictedSpeedup]
) -> Overview:
    """Return the summary of one checkpoint's `trees`. `chosen` are names to mark, `rows` its lines of benchmark.csv."""
    guesses = index_torch_predictions(predicted)
    cells = {row.tree: row for row in rows if not row.is_replayed}
    lines = [
        TreeLine(tree, guesses.get((tree.temperature, tree.checkpoint, tree.shape)), cells.get(tree.shape.name))
        for tree in trees
    ]
    marked = [tree for tree in trees if tree.shape.name in chosen]
    timed = [row for row in rows if row.speedup is not None]
    draw_tau = partial(draw_chosen_trees, trees=trees, chosen=marked)
    draw_speedup = partial(draw_tree_speedups, lines=lines, rows=timed)
    drawn = {"speedup": None, "tau": plots.render_svg(draw_tau, "tau against verified tokens", PLOT_HEIGHT)}
    if timed or any(line.predicted for line in lines):
        drawn["speedup"] = plots.render_svg(draw_speedup, "speedup against verified tokens", PLOT_HEIGHT)
    return Overview(lines, drawn)


def draw_chosen_trees(axes: Any, trees: list[ReplayedTree], chosen: list[ReplayedTree]) -> list[PlotPoint]:
    """Draw a point per topk and num_draft_tokens, the front as a line, and a ring and a name around each chosen tree."""
    best = select_best_steps(trees)
    for topk, style in zip(sorted({t.topk for t in trees}), cycle_styles(), strict=False):
        points = [t for t in best if t.topk == topk]
        marks_only = style | {"linestyle": "none", "markersize": 3}
        axes.plot([t.num_draft_tokens for t in points], [t.tau for t in points], **marks_only, label=f"topk {topk}")
    front = find_pareto_front(trees)
    axes.plot([t.num_draft_tokens for t in front], [t.tau for t in front], color=INK_COLOUR, linewidth=0.9, zorder=1)
    ring = {"markersize": 8, "markerfacecolor": "none", "color": INK_COLOUR, "linestyle": "none"}
    axes.plot([t.num_draft_tokens for t in chosen], [t.tau for t in chosen], "o", **ring)
    top, low = max(t.tau for t in trees), min(t.tau for t in best)
    axes.set(xlabel="num_draft_tokens, verified in a cycle", ylabel="tau")
    axes.set_ylim(top=top + 0.05 * (top - low + 0.1))
    named = [replace(make_tree_point(tree), name=tree.tree.removeprefix("t")) for tree in chosen]
    return [*map(make_tree_point, [*best, *chosen]), *named]


def draw_tree_speedups(axes: Any, lines: list[TreeLine], rows: list[ResultRow]) -> list[PlotPoint]:
    """Draw the speedups of `rows` with their intervals and names, and the fastest predictions as a line."""
    plot_points: list[PlotPoint] = []
    axes.axhline(1, color=INK_COLOUR, linewidth=0.8)
    styles = dict(zip(sorted({line.replayed.topk for line in lines}), cycle_styles(), strict=False))
    if fastest := _select_fastest(line.predicted for line in lines if line.predicted):
        xs, ys = [row.num_draft_tokens for row in fastest], [row.speedup for row in fastest]
        axes.plot(xs, ys, color=INK_COLOUR, linewidth=0.9, linestyle=":", label="fastest predicted")
        plot_points += [
            _make_speedup_point(row.num_draft_tokens, row.shape, row.speedup, row.low, row.high, "predicted")
            for row in fastest
        ]
    for x, row in zip(_spread_positions(rows), rows, strict=True):
        assert row.speedup is not None, "build_overview selects rows with a speedup"
        colour = styles[row.shape.topk]["color"] if row.topk in styles else INK_COLOUR
        axes.plot(x, row.speedup, styles.get(row.shape.topk, {}).get("marker", "o"), color=colour, markersize=5)
        if row.speedup_low is not None:
            axes.vlines(x, row.speedup_low, row.speedup_high, color=colour, linewidth=0.9)
        shape, how = row.shape, "predicted" if row.is_replayed else "measured"
        point = _make_speedup_point(x, shape, row.speedup, row.speedup_low, row.speedup_high, how)
        plot_points.append(replace(point, name=shape.name.removeprefix("t")))
    axes.set(xlabel="num_draft_tokens, verified in a cycle", ylabel="speedup over plain decoding")
    left, right = axes.get_xlim()
    if right - left < 1:  # trees of one size: the axis has room for their names
        axes.set_xlim(left - 2, right + 2)
    return plot_points


def _select_fastest(rows: Iterable[PredictedSpeedup]) -> list[PredictedSpeedup]:
    """Return the fastest prediction of each num_draft_tokens, in their order, without local minima.

    A num_draft_tokens is left out if a smaller and a larger one are both faster: the grid has some at which there are chains
    alone, and a line through all of them would go up and down with the kind of tree.
    """
    fastest: dict[int, PredictedSpeedup] = {}
    for row in rows:
        if row.num_draft_tokens not in fastest or row.speedup > fastest[row.num_draft_tokens].speedup:
            fastest[row.num_draft_tokens] = row
    ordered = [fastest[tokens] for tokens in sorted(fastest)]
    speeds = [row.speedup for row in ordered]
    tops = zip(accumulate(speeds, max), reversed(list(accumulate(reversed(speeds), max))), strict=True)
    return [row for row, (left, right) in zip(ordered, tops, strict=True) if row.speedup >= min(left, right)]


def _spread_positions(rows: list[ResultRow]) -> list[float]:
    """Return where on the axis each tree is drawn: trees of as many tokens side by side, so that intervals stay apart."""
    counts, seen, xs = Counter(row.shape.num_draft_tokens for row in rows), Counter[int](), []
    for row in rows:
        tokens = row.shape.num_draft_tokens
        xs.append(tokens + 0.9 * (seen[tokens] - (counts[tokens] - 1) / 2))
        seen[tokens] += 1
    return xs


def _make_speedup_point(
    x: float, shape: TreeShape, speedup: float, low: float | None, high: float | None, how: str
) -> PlotPoint:
    interval = format_interval(low, high)
    name = shape.name.removeprefix("t")
    return PlotPoint(x, speedup, f"{name}: {speedup:.2f}×{f' ({interval})' if interval else ''}, {how}")
