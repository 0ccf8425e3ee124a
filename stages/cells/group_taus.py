"""Tau of each tree on parts of the eval answers: by the file that holds their questions, and by the tokens before the drafts.

Letters: R rows of the answers, G trees of the grid, X contexts.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from stages.cells import interval
from stages.cells.replay_records import GroupTau
from stages.data import conversations
from stages.params.tree_shape import TreeShape
from stages.trees import accept_length

FIXED_EVAL = Path("data/fixed/eval.parquet")


def list_by_source(grid: list[TreeShape], names: list[str], accepted: np.ndarray, cycles: np.ndarray) -> list[GroupTau]:
    """Return the tau of each tree on the answers to each file's questions, from counts [R, G]; names of rows' conversations.

    None where the stage runs without the graph, on answers whose questions are not here.
    """
    if not FIXED_EVAL.exists():
        return []
    fixed = conversations.read_table(FIXED_EVAL, conversations.FIXED_SCHEMA, "fix_data")
    files = dict(fixed.select("id", "source").iter_rows())
    of_row = np.array([files[name] for name in names])
    found: list[GroupTau] = []
    for source in sorted(set(of_row.tolist())):
        found += _build_group("source", source, grid, names, np.flatnonzero(of_row == source), accepted, cycles)
    return found


def list_by_context(
    grid: list[TreeShape], names: list[str], edges: Sequence[int], accepted: np.ndarray, cycles: np.ndarray
) -> list[GroupTau]:
    """Return the tau of each tree in each range of context lengths between `edges`, from counts [R, G, X].

    An answer has cycles in several.
    """
    found: list[GroupTau] = []
    for context, (low, high) in enumerate(itertools.pairwise(edges[: cycles.shape[2] + 1])):
        rows = np.flatnonzero(cycles[..., context].any(1))
        if len(rows):
            counts = accepted[..., context], cycles[..., context]
            found += _build_group("context", f"{low}-{high}", grid, names, rows, *counts)
    return found


def _build_group(
    by: Literal["source", "context"],
    group: str,
    grid: list[TreeShape],
    names: list[str],
    rows: np.ndarray,  # of the group
    accepted: np.ndarray,  # [R, G or more], as `cycles`: of other trees after those of the grid
    cycles: np.ndarray,
) -> list[GroupTau]:
    accepted, cycles = accepted[rows, : len(grid)], cycles[rows, : len(grid)]
    own = [names[row] for row in rows]
    sums = interval.sum_by_cluster(own, accepted), interval.sum_by_cluster(own, cycles)
    intervals = interval.compute_tau_intervals(*sums, [tree.num_steps for tree in grid])
    found: list[GroupTau] = []
    for g, (tree, ends) in enumerate(zip(grid, intervals, strict=True)):
        tau, (low, high) = accept_length.compute_tau(accepted[:, g], cycles[:, g]), ends or (None, None)
        counted = {"answers": len(rows), "cycles": int(cycles[:, g].sum())}
        found.append(GroupTau(by=by, group=group, tree=tree.name, tau=tau, tau_low=low, tau_high=high, **counted))
    return found
