"""Fit of the cost model's terms to a timing grid: docs/cost.md, version 6.

Terms are non-negative. Residuals are shares of the measured times, so that a short cycle counts as much as a long one. The
number of terms and the knee are those that best predict points left out; this error is reported with the fit.

Letters: P points, K terms.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from stages.cells.cost_model import ARRIVAL_TERMS, BRANCH_TERM, TREE_TERMS, CostModel, count_term_units
from stages.cells.timing_grid import CycleTime

MAX_KNEES = 12  # tried; each costs a fit for every point that is left out
MIN_POINTS = 3  # with two, a single point would have to predict the other


def fit_cost_model(grid: Sequence[CycleTime]) -> CostModel:
    """Fit a timing grid. Raises ValueError for too few points, or a time that isn't positive."""
    if len(grid) < MIN_POINTS:
        raise ValueError(
            f"a timing grid has {len(grid)} points, expected at least {MIN_POINTS} to tell its error; time more trees"
        )
    if wrong := [point for point in grid if not point.cycle_s > 0]:
        raise ValueError(f"a timing grid has a cycle of {wrong[0].cycle_s} s, expected more than 0; time it again")
    times = np.array([point.cycle_s for point in grid])
    tried = [_fit_terms(grid, times, terms, knee) for terms, knee in _list_candidate_models(grid)]
    return min(tried, key=lambda found: found.error)


def _list_candidate_models(grid: Sequence[CycleTime]) -> list[tuple[tuple[str, ...], int | None]]:
    """Return (terms, knee) to try, the simplest first, since `min` takes the first of equals."""
    bent = TREE_TERMS.index("beyond")
    rows = sorted({point.num_draft_tokens * point.batch for point in grid})[1:-1]
    knees = rows[:: -(-len(rows) // MAX_KNEES) or 1]
    of_trees = [*((TREE_TERMS[:count], None) for count in range(1, bent + 1)), *((TREE_TERMS, knee) for knee in knees)]
    if len({point.topk > 1 for point in grid}) == 2:
        of_trees += [((*terms, BRANCH_TERM), knee) for terms, knee in of_trees]
    if len({point.arrivals.per_step for point in grid}) == 1:
        return of_trees
    return [
        *of_trees,
        *(((*terms, *arrival_terms), knee) for arrival_terms in ARRIVAL_TERMS for terms, knee in of_trees),
    ]


def _fit_terms(grid: Sequence[CycleTime], times: np.ndarray, terms: Sequence[str], knee: int | None) -> CostModel:
    """Fit the terms, without those that are constant over the grid, as the fixed one is."""
    units = [count_term_units(point.shape, point.batch, knee, point.arrivals) for point in grid]
    columns = {term: np.array([counts[term] for counts in units], dtype=float) for term in terms}
    names = [term for term in columns if term == "cycle" or np.ptp(columns[term]) > 0]
    design = np.stack([columns[term] for term in names], axis=1)  # [P, K]
    shares, ones = design / times[:, None], np.ones(len(times))  # residuals are then shares of the measured time
    found = solve_nonnegative(shares, ones)
    left_out = np.array(
        [row @ solve_nonnegative(np.delete(shares, p, axis=0), ones[1:]) for p, row in enumerate(design)]
    )
    errors, residuals = left_out / times - 1, shares @ found - 1
    return CostModel(
        seconds=dict(zip(names, found.tolist(), strict=True)),
        knee=knee,
        left_out_s=left_out.tolist(),
        error=float(np.sqrt(np.mean(errors**2))),
        error_max=float(np.abs(errors).max()),
        residual=float(np.sqrt(np.mean(residuals**2))),
    )


def solve_nonnegative(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return x >= 0 [K] with the least |design x - target|; design [P, K], target [P]. Columns are scaled: their units differ."""
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1
    return nnls(design / scale, target)[0] / scale
