"""Families of drafts side by side: EAGLE-3 and block drafts by replayed tau and speedup, and which engines run what.

SGLang and vLLM run the chain of a block draft's whole block; its other trees run in the torch engine only (docs/trees.md).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from stages.cells.prediction import PredictedSpeedup, index_torch_predictions
from stages.cells.replay_records import ReplayedTree
from stages.params.families import DraftKind
from stages.reporting.plots import PlotPoint, cycle_styles, make_tree_point
from stages.reporting.trees import choose_budgets, find_pareto_front

Families = Mapping[str, DraftKind]  # by checkpoint


@dataclass(frozen=True)
class FamilyLine:
    """A checkpoint's tree of one kind: the preferred one by speedup; where none is known that of the highest tau."""

    checkpoint: str
    family: DraftKind
    kind: str  # "chain", "tree of at most 16 tokens"
    tree: ReplayedTree
    known: PredictedSpeedup | None  # of the torch engine, one prompt at a time: measured, else by its costs


def select_shared_trees(replays: Mapping[str, list[ReplayedTree]]) -> dict[str, list[ReplayedTree]]:
    """Return each checkpoint's trees of the sizes that all checkpoints have; all of its trees where they share none.

    Block drafts lack trees deeper than their block, and lookups all but chains: means over all would be of different trees.
    """
    # A chain that is looked up has those of a drafted one of as many tokens.
    sizes = attrgetter("num_steps", "topk", "num_draft_tokens")
    every = [set(map(sizes, trees)) for trees in replays.values()]
    shared = every[0].intersection(*every) if every else set()
    return {name: [tree for tree in trees if not shared or sizes(tree) in shared] for name, trees in replays.items()}


def choose_family_lines(
    replays: Mapping[str, list[ReplayedTree]], families: Families, known: Iterable[PredictedSpeedup]
) -> list[FamilyLine]:
    """Return each checkpoint's trees to compare; none where all replayed checkpoints are of EAGLE-3.

    `replays` are of temperature 0; `known` are predictions, measured speedups in the place of those of the same tree and load.
    """
    if all(families[name].family.has_root for name in replays):
        return []
    guesses = index_torch_predictions(known)
    lines = []
    budgets = choose_budgets([tree for trees in replays.values() for tree in trees])
    for name, trees in replays.items():
        family = families[name]
        # Chains that engines run, and trees of topk > 1 within each budget of tokens.
        kinds = {"chain": [tree for tree in trees if tree.topk == 1 and family.is_served(tree.shape)]} | {
            f"tree of at most {budget} tokens": [t for t in trees if t.topk > 1 and t.num_draft_tokens <= budget]
            for budget in budgets
        }
        for kind, group in kinds.items():
            # The fastest tree. EAGLE-3's depth is free, so that its tree of highest tau is seldom the fastest.
            found = [FamilyLine(name, family, kind, t, guesses.get((t.temperature, name, t.shape))) for t in group]
            if found:
                lines.append(max(found, key=lambda line: (line.known.preference if line.known else (), line.tree.tau)))
    return lines


def draw_fronts(axes: Any, replays: Mapping[str, list[ReplayedTree]], families: Families) -> list[PlotPoint]:
    """Draw the front of each checkpoint as a line; trees that a serving engine runs are filled marks."""
    plot_points: list[PlotPoint] = []
    for (name, trees), style in zip(replays.items(), cycle_styles(), strict=False):
        front, family = find_pareto_front(trees), families[name]
        axes.plot([t.num_draft_tokens for t in front], [t.tau for t in front], **style, markerfacecolor="none",
                  label=f"{name}, {family.title}")  # fmt: skip
        served = [tree for tree in front if family.is_served(tree.shape)]
        filled = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
        axes.plot([t.num_draft_tokens for t in served], [t.tau for t in served], **filled)
        plot_points += [make_tree_point(t, f", {name}, {family.title}: {family.list_engines(t.shape)}") for t in front]
    axes.set(xlabel="num_draft_tokens, verified in a cycle", ylabel="tau")
    return plot_points
