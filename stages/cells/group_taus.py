"""Tau of each tree on parts of the eval answers: by the file that holds their questions, and by the tokens before the drafts.

Letters: R rows of the answers, G trees of the grid, X contexts.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from stages.cells import interval
from stages.cells.replay_records import GroupTau
from stages.data import conversations
from stages.params.tree_shape import TreeShape
from stages.trees import accept_length

FIXED_EVAL = Path("data/fixed/eval.parquet")
Counts = Sequence[np.ndarray] | np.ndarray  # accepted drafts and verify cycles


def list_by_source(grid: list[TreeShape], names: list[str], counts: Counts) -> Iterator[GroupTau]:
    """Yield the tau of each tree on the answers to each file's questions, from counts [R, G]; names of rows' conversations.

    None where the stage runs without the graph, on answers whose questions are not here.
    """
    if not FIXED_EVAL.exists():
        return
    fixed = conversations.read_table(FIXED_EVAL, conversations.FIXED_SCHEMA, "fix_data")
    files = dict(fixed.select("id", "source").iter_rows())
    for source in sorted({files[name] for name in names}):
        rows = np.array([files[name] == source for name in names])
        yield from _list_group("source", source, grid, names, rows, counts)


def list_by_context(
    grid: list[TreeShape], names: list[str], edges: Sequence[int], counts: Counts
) -> Iterator[GroupTau]:
    """Yield the tau of each tree in each range of context lengths between `edges`, from counts [R, G, X].

    An answer has cycles in several.
    """
    accepted, cycles = counts
    for context, (low, high) in enumerate(itertools.pairwise(edges[: cycles.shape[2] + 1])):
        rows = np.asarray(cycles[..., context].any(1))
        if rows.any():
            of_context = accepted[..., context], cycles[..., context]
            yield from _list_group("context", f"{low}-{high}", grid, names, rows, of_context)


def _list_group(
    by: Literal["source", "context"],
    group: str,
    grid: list[TreeShape],
    names: list[str],
    rows: np.ndarray,  # [R], whether they are of the group
    counts: Counts,  # [R, G or more]: of other trees after those of the grid
) -> Iterator[GroupTau]:
    accepted, cycles = (values[rows, : len(grid)] for values in counts)
    own = list(itertools.compress(names, rows))
    sums = interval.sum_by_cluster(own, accepted), interval.sum_by_cluster(own, cycles)
    intervals = interval.compute_tau_intervals(*sums, [tree.num_steps for tree in grid])
    for g, (tree, ends) in enumerate(zip(grid, intervals, strict=True)):
        tau, (low, high) = accept_length.compute_tau(accepted[:, g], cycles[:, g]), ends or (None, None)
        counted = {"answers": len(own), "cycles": int(cycles[:, g].sum())}
        yield GroupTau(by=by, group=group, tree=tree.name, tau=tau, tau_low=low, tau_high=high, **counted)
