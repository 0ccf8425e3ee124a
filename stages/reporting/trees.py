"""The page's part on trees, from replays alone: which are worth their width, and what happens inside some of them.

`trees` are rows of a replay as results/replay_records.py reads them; `inside` those of its buckets. docs/metrics.md, docs/trees.md
"""

import math
from collections import Counter
from typing import Any

from stages.reporting.plots import INK, SERIES, legend_columns, styles
from stages.reporting.text import tree_structure

Row = dict[str, Any]

FEWEST = 20  # cycles of a bucket that is drawn, or nodes: below that a point says little
NAMED = 8  # trees of the front that are named at most
LATER = 3  # siblings from this rank on are told together


def front(trees: list[Row]) -> list[Row]:
    """Of every width the tree with the highest tau, where none that is as narrow or narrower has as much."""
    found: list[Row] = []
    for tree in sorted(trees, key=lambda t: (t["tokens"], -t["tau"])):
        if not found or tree["tau"] > found[-1]["tau"]:
            found.append(tree)
    return found


def at_best_steps(trees: list[Row]) -> list[Row]:
    """Of every topk and num_draft_tokens the tree with the highest tau."""
    best: dict[tuple[int, int], Row] = {}
    for tree in trees:
        key = tree["topk"], tree["tokens"]
        if key not in best or tree["tau"] > best[key]["tau"]:
            best[key] = tree
    return list(best.values())


def chosen_steps(trees: list[Row], names: list[str]) -> int:
    """The num_steps that most of the named trees have, of those replayed with a topk above 1; else the largest replayed."""
    replayed = {t["steps"] for t in trees if t["topk"] > 1} or {t["steps"] for t in trees}
    asked = Counter(steps for steps in (int(name[1:].split("_")[0]) for name in names) if steps in replayed)
    return asked.most_common(1)[0][0] if asked else max(replayed)


def by_tree(inside: list[Row], what: str) -> dict[str, list[Row]]:
    """Tree -> its buckets of a kind, in their order."""
    found: dict[str, list[Row]] = {row["tree"]: [] for row in inside}
    for row in inside:
        if row["by"] == what:
            found[row["tree"]].append(row)
    return found


def table(inside: list[Row]) -> list[Row]:
    """A line for each tree: what it verifies and promises in a cycle, what is accepted, and of which siblings."""
    lines = []
    for tree, rows in by_tree(inside, "row").items():
        cycles, nodes, promised, accepted = (
            sum(row[k] for row in rows) for k in ("cycles", "nodes", "promised", "accepted")
        )
        if cycles:
            line = {"tree": tree, "cycles": int(cycles), "tau": 1 + accepted / cycles, "nodes": nodes / cycles}
            line |= {"promised": promised / cycles, "accepted": accepted / cycles, "kept": accepted / promised}
            lines.append(line | {"siblings": siblings(by_tree(inside, "sibling")[tree])})
    return lines


def siblings(rows: list[Row]) -> list[Row]:
    """Shares of the nodes verified and of the drafts accepted: first guesses, second ones, all later ones."""
    ranks = [[row for row in rows if min(int(row["bucket"]), LATER) == rank] for rank in range(1, LATER + 1)]
    totals = {k: sum(row[k] for row in rows) or 1 for k in ("nodes", "accepted")}
    return [{k: sum(row[k] for row in some) / totals[k] for k in totals} for some in ranks]


# Plots


def draw_front(axes: Any, trees: list[Row]) -> None:
    for topk, style in zip(sorted({t["topk"] for t in trees}), styles(), strict=False):
        mine = [t for t in at_best_steps(trees) if t["topk"] == topk]
        alone = style | {"linestyle": "none", "markersize": 3}
        axes.plot([t["tokens"] for t in mine], [t["tau"] for t in mine], **alone, label=f"topk {topk}")
    best = front(trees)
    axes.plot([t["tokens"] for t in best], [t["tau"] for t in best], color=INK, linewidth=0.9, zorder=1)
    for tree in spread(best):
        name = f"{tree['steps']}_{tree['topk']}_{tree['tokens']}"
        where = {"xytext": (0, 6), "textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 8}
        axes.annotate(name, (tree["tokens"], tree["tau"]), **where)
    top, low = max(t["tau"] for t in trees), min(t["tau"] for t in at_best_steps(trees))
    axes.set(xlabel="num_draft_tokens, verified in a cycle", ylabel="tau, at the best num_steps")
    axes.set_ylim(top=top + 0.12 * (top - low + 0.1))


def spread(best: list[Row]) -> list[Row]:
    """Of a front at most NAMED trees, as far apart in width as they get, the last one among them."""
    if len(best) <= NAMED:
        return best
    gap = (best[-1]["tokens"] - best[0]["tokens"]) / (NAMED - 1)
    chosen = [best[-1]]
    for tree in reversed(best[:-1]):
        if chosen[-1]["tokens"] - tree["tokens"] >= gap:
            chosen.append(tree)
    return chosen[::-1]


def draw_lengths(axes: Any, inside: list[Row], what: str, label: str) -> None:
    """A line per tree: tau of the cycles that begin in each bucket of `what`, but for those of fewer than FEWEST."""
    lines = {tree: [row for row in rows if row["cycles"] >= FEWEST] for tree, rows in by_tree(inside, what).items()}
    lows = sorted({_low(row) for rows in lines.values() for row in rows})
    for (tree, rows), style in zip(lines.items(), styles(), strict=False):
        taus = [1 + row["accepted"] / row["cycles"] for row in rows]
        axes.plot([lows.index(_low(row)) for row in rows], taus, **style, label=tree_structure(tree))
    every = 1 + len(lows) // 9
    axes.set_xticks(range(0, len(lows), every), [f"{low:g}–" for low in lows[::every]])
    axes.set(xlabel=label, ylabel="tau")


def draw_kinds(axes: Any, inside: list[Row]) -> None:
    """Bars: of the answers' tokens of each kind, the share that were drafts accepted."""
    trees = by_tree(inside, "token")
    totals = {row["bucket"]: row["cycles"] + row["accepted"] for rows in trees.values() for row in rows}
    names, width = list(totals), 0.8 / len(trees)
    for number, ((tree, rows), style) in enumerate(zip(trees.items(), styles(), strict=False)):
        accepted = {row["bucket"]: 100 * row["accepted"] / totals[row["bucket"]] for row in rows}
        places = [at + width * (number - (len(trees) - 1) / 2) for at in range(len(names))]
        heights = [accepted.get(name, 0.0) for name in names]
        shade = 0.6 ** (number // len(SERIES))  # colours come again
        axes.bar(places, heights, width * 0.9, color=style["color"], alpha=shade, label=tree_structure(tree))
    axes.set_xticks(range(len(names)), [f"{name}\n{totals[name]:,.0f} tokens" for name in names])
    axes.set_yticks(range(0, 101, 20))
    axes.set(ylabel="accepted as drafts (%)", ylim=(0, 105 + 14 * math.ceil(len(trees) / legend_columns(len(trees)))))
    axes.grid(visible=False, axis="x")


def draw_chances(axes: Any, inside: list[Row]) -> None:
    """A line per tree: how often the answer came by nodes of a chance, against that chance; both logarithmic."""
    axes.set(xscale="log", yscale="log")
    drawn = [1.0]
    for (tree, rows), style in zip(by_tree(inside, "chance").items(), styles(), strict=False):
        mine = [row for row in rows if row["nodes"] >= FEWEST and row["accepted"] and row["promised"]]
        points = [(row["promised"] / row["nodes"], row["accepted"] / row["nodes"]) for row in mine]
        drawn += [x for point in points for x in point]
        if points:
            axes.plot(*zip(*points, strict=True), **style, label=tree_structure(tree))
    axes.plot([min(drawn), 1], [min(drawn), 1], color=INK, linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel="the draft's chance of a node", ylabel="share accepted")


def _low(row: Row) -> float:
    return float(row["bucket"].split("-")[0])
