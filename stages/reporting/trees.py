"""The page's part on trees, from replays alone: which are worth their width, and what happens inside some of them.

`trees` are rows of a replay as results/replay_records.py reads them; `inside` those of its buckets. docs/metrics.md, docs/trees.md
"""

import math
from collections import Counter
from typing import Any

from stages.reporting.plots import INK_COLOUR, SERIES_COLOURS, count_legend_columns, cycle_styles
from stages.reporting.text import format_tree

Row = dict[str, Any]

MIN_BUCKET_COUNT = 20  # cycles of a bucket that is drawn, or nodes: below that a point says little
MAX_NAMED_TREES = 8  # trees of the front that are named at most
LATER_SIBLING_RANK = 3  # siblings from this rank on are told together


def find_front(trees: list[Row]) -> list[Row]:
    """Of every width the tree with the highest tau, where none that is as narrow or narrower has as much."""
    found: list[Row] = []
    for tree in sorted(trees, key=lambda t: (t["tokens"], -t["tau"])):
        if not found or tree["tau"] > found[-1]["tau"]:
            found.append(tree)
    return found


def select_best_steps(trees: list[Row]) -> list[Row]:
    """Of every topk and num_draft_tokens the tree with the highest tau."""
    best: dict[tuple[int, int], Row] = {}
    for tree in trees:
        key = tree["topk"], tree["tokens"]
        if key not in best or tree["tau"] > best[key]["tau"]:
            best[key] = tree
    return list(best.values())


def choose_steps(trees: list[Row], names: list[str]) -> int:
    """The num_steps that most of the named trees have, of those replayed with a topk above 1; else the largest replayed."""
    replayed = {t["steps"] for t in trees if t["topk"] > 1} or {t["steps"] for t in trees}
    asked = Counter(steps for steps in (int(name[1:].split("_")[0]) for name in names) if steps in replayed)
    return asked.most_common(1)[0][0] if asked else max(replayed)


def group_by_tree(inside: list[Row], what: str) -> dict[str, list[Row]]:
    """Tree -> its buckets of a kind, in their order."""
    found: dict[str, list[Row]] = {row["tree"]: [] for row in inside}
    for row in inside:
        if row["by"] == what:
            found[row["tree"]].append(row)
    return found


def build_statistics_table(inside: list[Row]) -> list[Row]:
    """A line for each tree: what it verifies and promises in a cycle, what is accepted, and of which siblings."""
    lines = []
    for tree, rows in group_by_tree(inside, "row").items():
        cycles, nodes, promised, accepted = (
            sum(row[k] for row in rows) for k in ("cycles", "nodes", "promised", "accepted")
        )
        if cycles:
            line = {"tree": tree, "cycles": int(cycles), "tau": 1 + accepted / cycles, "nodes": nodes / cycles}
            line |= {"promised": promised / cycles, "accepted": accepted / cycles, "kept": accepted / promised}
            lines.append(line | {"siblings": summarise_siblings(group_by_tree(inside, "sibling")[tree])})
    return lines


def summarise_siblings(rows: list[Row]) -> list[Row]:
    """Shares of the nodes verified and of the drafts accepted: first guesses, second ones, all later ones."""
    ranks = [
        [row for row in rows if min(int(row["bucket"]), LATER_SIBLING_RANK) == rank]
        for rank in range(1, LATER_SIBLING_RANK + 1)
    ]
    totals = {k: sum(row[k] for row in rows) or 1 for k in ("nodes", "accepted")}
    return [{k: sum(row[k] for row in some) / totals[k] for k in totals} for some in ranks]


# Plots


def draw_front(axes: Any, trees: list[Row]) -> None:
    for topk, style in zip(sorted({t["topk"] for t in trees}), cycle_styles(), strict=False):
        mine = [t for t in select_best_steps(trees) if t["topk"] == topk]
        alone = style | {"linestyle": "none", "markersize": 3}
        axes.plot([t["tokens"] for t in mine], [t["tau"] for t in mine], **alone, label=f"topk {topk}")
    best = find_front(trees)
    axes.plot([t["tokens"] for t in best], [t["tau"] for t in best], color=INK_COLOUR, linewidth=0.9, zorder=1)
    for tree in thin_front(best):
        name = f"{tree['steps']}_{tree['topk']}_{tree['tokens']}"
        where = {"xytext": (0, 6), "textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 8}
        axes.annotate(name, (tree["tokens"], tree["tau"]), **where)
    top, low = max(t["tau"] for t in trees), min(t["tau"] for t in select_best_steps(trees))
    axes.set(xlabel="num_draft_tokens, verified in a cycle", ylabel="tau, at the best num_steps")
    axes.set_ylim(top=top + 0.12 * (top - low + 0.1))


def thin_front(best: list[Row]) -> list[Row]:
    """Of a front at most NAMED trees, as far apart in width as they get, the last one among them."""
    if len(best) <= MAX_NAMED_TREES:
        return best
    gap = (best[-1]["tokens"] - best[0]["tokens"]) / (MAX_NAMED_TREES - 1)
    chosen = [best[-1]]
    for tree in reversed(best[:-1]):
        if chosen[-1]["tokens"] - tree["tokens"] >= gap:
            chosen.append(tree)
    return chosen[::-1]


def draw_tau_by_length(axes: Any, inside: list[Row], what: str, label: str) -> None:
    """A line per tree: tau of the cycles that begin in each bucket of `what`, but for those of fewer than FEWEST."""
    lines = {
        tree: [row for row in rows if row["cycles"] >= MIN_BUCKET_COUNT]
        for tree, rows in group_by_tree(inside, what).items()
    }
    lows = sorted({_get_lower_edge(row) for rows in lines.values() for row in rows})
    for (tree, rows), style in zip(lines.items(), cycle_styles(), strict=False):
        taus = [1 + row["accepted"] / row["cycles"] for row in rows]
        axes.plot([lows.index(_get_lower_edge(row)) for row in rows], taus, **style, label=format_tree(tree))
    every = 1 + len(lows) // 9
    axes.set_xticks(range(0, len(lows), every), [f"{low:g}–" for low in lows[::every]])
    axes.set(xlabel=label, ylabel="tau")


def draw_token_classes(axes: Any, inside: list[Row]) -> None:
    """Bars: of the answers' tokens of each kind, the share that were drafts accepted."""
    trees = group_by_tree(inside, "token")
    totals = {row["bucket"]: row["cycles"] + row["accepted"] for rows in trees.values() for row in rows}
    names, width = list(totals), 0.8 / len(trees)
    for number, ((tree, rows), style) in enumerate(zip(trees.items(), cycle_styles(), strict=False)):
        accepted = {row["bucket"]: 100 * row["accepted"] / totals[row["bucket"]] for row in rows}
        places = [at + width * (number - (len(trees) - 1) / 2) for at in range(len(names))]
        heights = [accepted.get(name, 0.0) for name in names]
        shade = 0.6 ** (number // len(SERIES_COLOURS))  # colours come again
        axes.bar(places, heights, width * 0.9, color=style["color"], alpha=shade, label=format_tree(tree))
    axes.set_xticks(range(len(names)), [f"{name}\n{totals[name]:,.0f} tokens" for name in names])
    axes.set_yticks(range(0, 101, 20))
    axes.set(
        ylabel="accepted as drafts (%)", ylim=(0, 105 + 14 * math.ceil(len(trees) / count_legend_columns(len(trees))))
    )
    axes.grid(visible=False, axis="x")


def draw_calibration(axes: Any, inside: list[Row]) -> None:
    """A line per tree: how often the answer came by nodes of a chance, against that chance; both logarithmic."""
    axes.set(xscale="log", yscale="log")
    drawn = [1.0]
    for (tree, rows), style in zip(group_by_tree(inside, "chance").items(), cycle_styles(), strict=False):
        mine = [row for row in rows if row["nodes"] >= MIN_BUCKET_COUNT and row["accepted"] and row["promised"]]
        points = [(row["promised"] / row["nodes"], row["accepted"] / row["nodes"]) for row in mine]
        drawn += [x for point in points for x in point]
        if points:
            axes.plot(*zip(*points, strict=True), **style, label=format_tree(tree))
    axes.plot([min(drawn), 1], [min(drawn), 1], color=INK_COLOUR, linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel="the draft's chance of a node", ylabel="share accepted")


def _get_lower_edge(row: Row) -> float:
    return float(row["bucket"].split("-")[0])
