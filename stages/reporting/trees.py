"""The page's part on trees, made from replays: which trees are worth their width, and what happens inside some of them.

`trees` are rows of a replay as results/replay_records.py reads them, `statistics` the buckets of its tree statistics;
docs/metrics.md and docs/trees.md define both.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.reporting import plots
from stages.reporting.plots import INK_COLOUR, SERIES_COLOURS, count_legend_columns, cycle_styles
from stages.reporting.text import format_tree

Row = dict[str, Any]

PUBLISHED_BUDGETS = {16, 32}  # draft tokens of the trees in published/qwen3-vl-weather.yaml
MIN_BUCKET_COUNT = 20  # cycles, or nodes, of a bucket that is drawn: a point of fewer says little
MAX_NAMED_TREES = 8  # trees of the front that are named at most
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
    """Nodes that one tree verifies, promises and accepts in a cycle."""

    tree: str
    cycles: int
    tau: float
    nodes: float
    promised: float  # sum of the draft's path probabilities
    accepted: float
    siblings: list["SiblingShares"]

    @property
    def kept(self) -> float:
        return self.accepted / self.promised


@dataclass(frozen=True)
class SiblingShares:
    """Share of the nodes verified and of the drafts accepted that siblings of one rank have."""

    nodes: float
    accepted: float


def build_trees_page(trees: list[Row], statistics: list[Row], benchmark_trees: list[str]) -> TreesPage:
    """Return the page's part. Its plots of what happens inside trees are left out where no tree was traced."""
    steps = choose_steps(trees, benchmark_trees)
    drawn: dict[str, Callable[[Any], None]] = {
        "front": partial(draw_front, trees=trees),
        "at_steps": partial(plots.draw_tau_by_tokens, trees=trees, steps=steps),
    }
    table = build_statistics_table(statistics)
    if table:
        by_length = partial(draw_tau_by_length, statistics=statistics)
        drawn |= {
            "context": partial(by_length, what="context", label="tokens before the drafts, from"),
            "answer": partial(by_length, what="answer", label="place in the answer, from"),
            "kinds": partial(draw_token_classes, statistics=statistics),
            "chances": partial(draw_calibration, statistics=statistics),
        }
    return TreesPage(steps, {name: plots.render_svg(draw) for name, draw in drawn.items()}, table, MIN_BUCKET_COUNT)


# Which tree


@dataclass(frozen=True)
class Heatmap:
    """tau by num_steps and topk, at one budget of draft tokens."""

    budget: int
    steps: list[int]
    lines: list["HeatmapLine"]
    high: float  # the highest tau


@dataclass(frozen=True)
class HeatmapLine:
    topk: int
    cells: list[Row | None]  # a tree, with `weight` in 0..1 for its colour


def choose_budgets(trees: list[Row]) -> list[int]:
    """Return the published budgets that the grid has, else its largest."""
    grid = {tree["tokens"] for tree in trees if tree["topk"] > 1} or {tree["tokens"] for tree in trees}
    return sorted(grid & PUBLISHED_BUDGETS) or [max(grid)]


def build_heatmap(trees: list[Row], budget: int) -> Heatmap:
    """Return tau by num_steps and topk, each at as many draft tokens of `budget` as it can use."""
    best: dict[tuple[int, int], Row] = {}
    for tree in sorted((t for t in trees if t["tokens"] <= budget), key=lambda t: t["tokens"]):
        best[tree["steps"], tree["topk"]] = dict(tree)
    low, high = min(t["tau"] for t in best.values()), max(t["tau"] for t in best.values())
    for tree in best.values():
        tree["weight"] = (tree["tau"] - low) / ((high - low) or 1)
    steps, topks = sorted({s for s, _ in best}), sorted({k for _, k in best})
    return Heatmap(budget, steps, [HeatmapLine(k, [best.get((s, k)) for s in steps]) for k in topks], high)


@dataclass(frozen=True)
class CheckpointDuel:
    """On how many trees the best checkpoint is ahead of the next best."""

    best: str
    other: str
    of: int
    won: int
    lost: int


def compare_checkpoints(best: str, other: str, replays: dict[str, list[Row]]) -> CheckpointDuel:
    pairs = pair_trees(replays[best], replays[other])
    return CheckpointDuel(best, other, len(pairs), sum(x > y for x, y, _ in pairs), sum(x < y for x, y, _ in pairs))


def pair_trees(best: list[Row], other: list[Row]) -> list[tuple[float, float, int]]:
    """Return (tau of best, tau of other, topk) for each tree that both have."""
    other_taus = {(t["steps"], t["topk"], t["tokens"]): t["tau"] for t in other}
    keyed = [((t["steps"], t["topk"], t["tokens"]), t) for t in best]
    return [(t["tau"], other_taus[key], t["topk"]) for key, t in keyed if key in other_taus]


def find_front(trees: list[Row]) -> list[Row]:
    """Return the trees whose tau no tree of as few or fewer draft tokens reaches, by width."""
    found: list[Row] = []
    for tree in sorted(trees, key=lambda t: (t["tokens"], -t["tau"])):
        if not found or tree["tau"] > found[-1]["tau"]:
            found.append(tree)
    return found


def thin_front(front: list[Row]) -> list[Row]:
    """Return at most MAX_NAMED_TREES of the front, as far apart in width as possible, the widest among them."""
    if len(front) <= MAX_NAMED_TREES:
        return front
    gap = (front[-1]["tokens"] - front[0]["tokens"]) / (MAX_NAMED_TREES - 1)
    chosen = [front[-1]]
    for tree in reversed(front[:-1]):
        if chosen[-1]["tokens"] - tree["tokens"] >= gap:
            chosen.append(tree)
    return chosen[::-1]


def select_best_steps(trees: list[Row]) -> list[Row]:
    """Return the tree with the highest tau for each topk and num_draft_tokens."""
    best: dict[tuple[int, int], Row] = {}
    for tree in trees:
        key = tree["topk"], tree["tokens"]
        if key not in best or tree["tau"] > best[key]["tau"]:
            best[key] = tree
    return list(best.values())


def choose_steps(trees: list[Row], names: list[str]) -> int:
    """Return the num_steps that most of the named trees have.

    Only num_steps that were replayed with a topk above 1 count; where the named trees have none of them, the largest is
    taken.
    """
    replayed = {t["steps"] for t in trees if t["topk"] > 1} or {t["steps"] for t in trees}
    named = Counter(steps for steps in (int(name[1:].split("_")[0]) for name in names) if steps in replayed)
    return named.most_common(1)[0][0] if named else max(replayed)


# Inside trees


def group_by_tree(statistics: list[Row], what: str) -> dict[str, list[Row]]:
    """Return each tree's buckets by `what`, in their order."""
    found: dict[str, list[Row]] = {row["tree"]: [] for row in statistics}
    for row in statistics:
        if row["by"] == what:
            found[row["tree"]].append(row)
    return found


def build_statistics_table(statistics: list[Row]) -> list[TreeStatisticsLine]:
    """Return a line for each tree that has cycles."""
    lines = []
    for tree, rows in group_by_tree(statistics, "row").items():
        cycles, nodes, promised, accepted = (
            sum(row[k] for row in rows) for k in ("cycles", "nodes", "promised", "accepted")
        )
        if cycles:
            siblings = summarise_siblings(group_by_tree(statistics, "sibling")[tree])
            rates = nodes / cycles, promised / cycles, accepted / cycles
            lines.append(TreeStatisticsLine(tree, int(cycles), 1 + accepted / cycles, *rates, siblings))
    return lines


def summarise_siblings(rows: list[Row]) -> list[SiblingShares]:
    """Return the shares of first guesses, of second ones, and of all later ones."""
    ranks = [
        [row for row in rows if min(int(row["bucket"]), LATER_SIBLING_RANK) == rank]
        for rank in range(1, LATER_SIBLING_RANK + 1)
    ]
    nodes, accepted = (sum(row[k] for row in rows) or 1 for k in ("nodes", "accepted"))
    return [
        SiblingShares(sum(row["nodes"] for row in some) / nodes, sum(row["accepted"] for row in some) / accepted)
        for some in ranks
    ]


# Plots


def draw_front(axes: Any, trees: list[Row]) -> None:
    for topk, style in zip(sorted({t["topk"] for t in trees}), cycle_styles(), strict=False):
        points = [t for t in select_best_steps(trees) if t["topk"] == topk]
        marks_only = style | {"linestyle": "none", "markersize": 3}
        axes.plot([t["tokens"] for t in points], [t["tau"] for t in points], **marks_only, label=f"topk {topk}")
    front = find_front(trees)
    axes.plot([t["tokens"] for t in front], [t["tau"] for t in front], color=INK_COLOUR, linewidth=0.9, zorder=1)
    for tree in thin_front(front):
        name = f"{tree['steps']}_{tree['topk']}_{tree['tokens']}"
        where = {"xytext": (0, 6), "textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 8}
        axes.annotate(name, (tree["tokens"], tree["tau"]), **where)
    top, low = max(t["tau"] for t in trees), min(t["tau"] for t in select_best_steps(trees))
    axes.set(xlabel="num_draft_tokens, verified in a cycle", ylabel="tau, at the best num_steps")
    axes.set_ylim(top=top + 0.12 * (top - low + 0.1))


def draw_tau_by_length(axes: Any, statistics: list[Row], what: str, label: str) -> None:
    """Draw a line per tree: tau of the cycles that start in each bucket of `what` with at least MIN_BUCKET_COUNT cycles."""
    lines = {
        tree: [row for row in rows if row["cycles"] >= MIN_BUCKET_COUNT]
        for tree, rows in group_by_tree(statistics, what).items()
    }
    lows = sorted({_get_lower_edge(row) for rows in lines.values() for row in rows})
    for (tree, rows), style in zip(lines.items(), cycle_styles(), strict=False):
        taus = [1 + row["accepted"] / row["cycles"] for row in rows]
        axes.plot([lows.index(_get_lower_edge(row)) for row in rows], taus, **style, label=format_tree(tree))
    every = 1 + len(lows) // 9
    axes.set_xticks(range(0, len(lows), every), [f"{low:g}–" for low in lows[::every]])
    axes.set(xlabel=label, ylabel="tau")


def draw_token_classes(axes: Any, statistics: list[Row]) -> None:
    """Draw bars: the share of the answers' tokens of each class that were accepted drafts."""
    trees = group_by_tree(statistics, "token")
    totals = {row["bucket"]: row["cycles"] + row["accepted"] for rows in trees.values() for row in rows}
    names, width = list(totals), 0.8 / len(trees)
    for number, ((tree, rows), style) in enumerate(zip(trees.items(), cycle_styles(), strict=False)):
        accepted = {row["bucket"]: 100 * row["accepted"] / totals[row["bucket"]] for row in rows}
        lefts = [at + width * (number - (len(trees) - 1) / 2) for at in range(len(names))]
        heights = [accepted.get(name, 0.0) for name in names]
        shade = 0.6 ** (number // len(SERIES_COLOURS))  # paler where the colours start again
        axes.bar(lefts, heights, width * 0.9, color=style["color"], alpha=shade, label=format_tree(tree))
    axes.set_xticks(range(len(names)), [f"{name}\n{totals[name]:,.0f} tokens" for name in names])
    axes.set_yticks(range(0, 101, 20))
    legend_lines = math.ceil(len(trees) / count_legend_columns(len(trees)))
    axes.set(ylabel="accepted as drafts (%)", ylim=(0, 105 + 14 * legend_lines))
    axes.grid(visible=False, axis="x")


def draw_calibration(axes: Any, statistics: list[Row]) -> None:
    """Draw a line per tree: the share of nodes accepted against their mean path probability, both logarithmic."""
    axes.set(xscale="log", yscale="log")
    values = [1.0]
    for (tree, rows), style in zip(group_by_tree(statistics, "chance").items(), cycle_styles(), strict=False):
        shown = [row for row in rows if row["nodes"] >= MIN_BUCKET_COUNT and row["accepted"] and row["promised"]]
        points = [(row["promised"] / row["nodes"], row["accepted"] / row["nodes"]) for row in shown]
        values += [x for point in points for x in point]
        if points:
            axes.plot(*zip(*points, strict=True), **style, label=format_tree(tree))
    axes.plot([min(values), 1], [min(values), 1], color=INK_COLOUR, linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel="the draft's chance of a node", ylabel="share accepted")


def _get_lower_edge(row: Row) -> float:
    return float(row["bucket"].split("-")[0])
