"""The page's part on trees, made from replays: which trees are worth their draft tokens, and what happens inside some of them.

docs/metrics.md and docs/trees.md define the figures of replayed trees and of the buckets of traced ones.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.cells.replay_records import ReplayedTree, TreeBucket
from stages.params.tree_shape import parse_shape
from stages.reporting.plots import (
    INK_COLOUR,
    SERIES_COLOURS,
    DrawPlot,
    PlotPoint,
    count_legend_columns,
    cycle_styles,
    draw_lines,
    draw_tau_by_tokens,
    render_svg,
)
from stages.reporting.text import format_tree

PUBLISHED_BUDGETS = {16, 32}  # draft tokens of the trees in published/qwen3-vl-weather.yaml
MIN_BUCKET_COUNT = 20  # cycles, or nodes, of a bucket that is drawn: a point of fewer says little
LATER_SIBLING_RANK = 3  # siblings from this rank on are counted together


@dataclass(frozen=True)
class TreesPage:
    """The content of templates/trees.html.j2."""

    steps: int  # of the second plot
    plots: dict[str, Any]
    table: list["TreeStatisticsLine"]
    fewest: int


@dataclass(frozen=True)
class TreeStatisticsLine:
    """Nodes that one tree verifies, expects to accept and accepts in a cycle."""

    tree: str
    cycles: int
    nodes: float
    expected_accepted: float  # sum of the draft's path probabilities
    accepted: float
    siblings: list[tuple[float, float]]  # as summarise_siblings returns them


def build_trees_page(trees: list[ReplayedTree], statistics: list[TreeBucket], benchmark_trees: list[str]) -> TreesPage:
    """Return the page's part. Its plots of what happens inside trees are left out where no tree was traced."""
    steps = choose_steps(trees, benchmark_trees)
    at_steps = partial(draw_tau_by_tokens, trees=trees, steps=steps)
    drawn: dict[str, tuple[str, DrawPlot]] = {
        "at_steps": (f"tau against num_draft_tokens at num_steps {steps}", at_steps)
    }
    table = build_statistics_table(statistics)
    if table:
        context = partial(draw_tau_by_length, what="context", label="tokens before the drafts, from")
        answer = partial(draw_tau_by_length, what="answer", label="position in the answer, from")
        inside: dict[str, tuple[str, Callable[..., list[PlotPoint]]]] = {
            "context": ("tau by length of context", context),
            "answer": ("tau by position in the answer", answer),
            "kinds": ("Tokens accepted as drafts, by kind", draw_token_classes),
            "calibration": ("Share accepted against the path probability", draw_calibration),
        }
        drawn |= {name: (title, partial(draw, statistics=statistics)) for name, (title, draw) in inside.items()}
    svgs = {name: render_svg(draw, title) for name, (title, draw) in drawn.items()}
    return TreesPage(steps, svgs, table, MIN_BUCKET_COUNT)


# Which tree


@dataclass(frozen=True)
class Heatmap:
    """tau by num_steps and topk, at one budget of draft tokens."""

    budget: int
    steps: list[int]
    topks: list[int]
    cells: dict[tuple[int, int], ReplayedTree]  # by (num_steps, topk)
    low: float  # the lowest tau
    high: float

    def weigh(self, tree: ReplayedTree) -> float:
        """Return the strength of a tree's colour, in 0..1."""
        return (tree.tau - self.low) / ((self.high - self.low) or 1)


def choose_budgets(trees: list[ReplayedTree]) -> list[int]:
    """Return the published budgets that the grid has, else its largest."""
    grid = {tree.num_draft_tokens for tree in trees if tree.topk > 1} or {tree.num_draft_tokens for tree in trees}
    return sorted(grid & PUBLISHED_BUDGETS) or sorted(grid)[-1:]


def build_heatmap(trees: list[ReplayedTree], budget: int) -> Heatmap:
    """Return tau by num_steps and topk, each at as many draft tokens of `budget` as it can use."""
    fitting = sorted((t for t in trees if t.num_draft_tokens <= budget), key=lambda t: (t.num_draft_tokens, t.tau))
    best = {(tree.num_steps, tree.topk): tree for tree in fitting}
    taus = [tree.tau for tree in best.values()]
    return Heatmap(budget, sorted({s for s, _ in best}), sorted({k for _, k in best}), best, min(taus), max(taus))


def find_pareto_front(trees: list[ReplayedTree]) -> list[ReplayedTree]:
    """Return the trees whose tau no tree of as few or fewer draft tokens reaches, by num_draft_tokens."""
    found: list[ReplayedTree] = []
    for tree in sorted(trees, key=lambda t: (t.num_draft_tokens, -t.tau)):
        if not found or tree.tau > found[-1].tau:
            found.append(tree)
    return found


def select_best_steps(trees: list[ReplayedTree]) -> list[ReplayedTree]:
    """Return the tree with the highest tau for each topk and num_draft_tokens."""
    best: dict[tuple[int, int], ReplayedTree] = {}
    for tree in trees:
        key = tree.topk, tree.num_draft_tokens
        if key not in best or tree.tau > best[key].tau:
            best[key] = tree
    return list(best.values())


def choose_steps(trees: list[ReplayedTree], names: list[str]) -> int:
    """Return the num_steps, replayed with a topk above 1, that most of the named trees have; the largest if none has one."""
    replayed = {t.num_steps for t in trees if t.topk > 1} or {t.num_steps for t in trees}
    named = Counter(steps for steps in (parse_shape(name).num_steps for name in names) if steps in replayed)
    return named.most_common(1)[0][0] if named else max(replayed)


# Inside trees


def group_by_tree(statistics: list[TreeBucket], grouping: str) -> dict[str, list[TreeBucket]]:
    """Return each tree's buckets of a grouping, in their order."""
    found: dict[str, list[TreeBucket]] = {bucket.tree: [] for bucket in statistics}
    for bucket in statistics:
        if bucket.by == grouping:
            found[bucket.tree].append(bucket)
    return found


def build_statistics_table(statistics: list[TreeBucket]) -> list[TreeStatisticsLine]:
    """Return a line for each tree that has cycles."""
    lines = []
    siblings = group_by_tree(statistics, "sibling")
    for tree, rows in group_by_tree(statistics, "row").items():
        if cycles := sum(row.cycles or 0 for row in rows):
            accepted = sum(row.accepted for row in rows) / cycles
            nodes, expected_accepted = (
                sum(row[name] for row in rows) / cycles for name in ("nodes", "expected_accepted")
            )
            shares = summarise_siblings(siblings[tree])
            lines.append(TreeStatisticsLine(tree, cycles, nodes, expected_accepted, accepted, shares))
    return lines


def summarise_siblings(rows: list[TreeBucket]) -> list[tuple[float, float]]:
    """Return the shares of first guesses, of second ones, and of all later ones: of nodes verified, of drafts accepted."""

    def share(name: str, rank: int) -> float:
        of_rank = [row for row in rows if min(int(row.bucket), LATER_SIBLING_RANK) == rank]
        return sum(row[name] or 0 for row in of_rank) / (sum(row[name] or 0 for row in rows) or 1)

    return [(share("nodes", rank), share("accepted", rank)) for rank in range(1, LATER_SIBLING_RANK + 1)]


# Plots


def draw_tau_by_length(axes: Any, statistics: list[TreeBucket], what: str, label: str) -> list[PlotPoint]:
    """Draw a line per tree: tau of the cycles that start in each bucket of `what` with at least MIN_BUCKET_COUNT cycles."""
    shown = [row for row in statistics if row.by == what and (row.cycles or 0) >= MIN_BUCKET_COUNT]
    edges = {row.bucket: float(row.bucket.split("-")[0]) for row in shown}
    lows = sorted(set(edges.values()))
    lines: dict[str, list[PlotPoint]] = {format_tree(bucket.tree): [] for bucket in statistics}
    for row in shown:
        x, tau, tree = lows.index(edges[row.bucket]), 1 + row.accepted / (row.cycles or 1), format_tree(row.tree)
        lines[tree].append(PlotPoint(x, tau, f"{tree}, {row.bucket}: tau {tau:.2f}, {row.cycles} cycles"))
    tick_step = 1 + len(lows) // 9
    axes.set_xticks(range(0, len(lows), tick_step), [f"{low:g}–" for low in lows[::tick_step]])
    return draw_lines(axes, lines, label, "tau")


def draw_token_classes(axes: Any, statistics: list[TreeBucket]) -> list[PlotPoint]:
    """Draw bars: the share of the answers' tokens of each class that were accepted drafts."""
    trees = group_by_tree(statistics, "token")
    totals = {row.bucket: (row.cycles or 0) + row.accepted for rows in trees.values() for row in rows}
    names, width = list(totals), 0.8 / len(trees)
    plot_points: list[PlotPoint] = []
    for number, ((tree, rows), style) in enumerate(zip(trees.items(), cycle_styles(), strict=False)):
        accepted = {row.bucket: 100 * row.accepted / totals[row.bucket] for row in rows}
        lefts = [x + width * (number - (len(trees) - 1) / 2) for x in range(len(names))]
        heights = [accepted.get(name, 0.0) for name in names]
        shade = 0.6 ** (number // len(SERIES_COLOURS))  # paler where the colours start again
        axes.bar(lefts, heights, width * 0.9, color=style["color"], alpha=shade, label=format_tree(tree))
        plot_points += [
            PlotPoint(left, height, f"{format_tree(tree)}, {name}: {height:.1f}% accepted")
            for left, height, name in zip(lefts, heights, names, strict=True)
        ]
    axes.set_xticks(range(len(names)), [f"{name}\n{totals[name]:,.0f} tokens" for name in names])
    axes.set_yticks(range(0, 101, 20))
    legend_lines = math.ceil(len(trees) / count_legend_columns(len(trees)))
    axes.set(ylabel="accepted as drafts (%)", ylim=(0, 105 + 14 * legend_lines))
    axes.grid(visible=False, axis="x")
    return plot_points


def draw_calibration(axes: Any, statistics: list[TreeBucket]) -> list[PlotPoint]:
    """Draw a line per tree: the share of nodes accepted against their mean path probability, both logarithmic."""
    axes.set(xscale="log", yscale="log")
    lines: dict[str, list[PlotPoint]] = {format_tree(bucket.tree): [] for bucket in statistics}
    for row in statistics:
        is_drawn = row.by == "path_probability" and (row.nodes or 0) >= MIN_BUCKET_COUNT and row.accepted
        if is_drawn and row.nodes and row.expected_accepted:
            x, y, tree = row.expected_accepted / row.nodes, row.accepted / row.nodes, format_tree(row.tree)
            lines[tree].append(PlotPoint(x, y, f"{tree}: {y:.3g} accepted at a path probability of {x:.3g}"))
    plot_points = draw_lines(axes, lines, "path probability of a node", "share accepted")
    lowest = min(1.0, *(value for point in plot_points for value in (point.x, point.y)), 1.0)
    axes.plot([lowest, 1], [lowest, 1], color=INK_COLOUR, linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    return plot_points
