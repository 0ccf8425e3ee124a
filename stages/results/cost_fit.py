"""Fit of the cost model's terms to a timing grid: docs/cost.md, version 1.

Terms are non-negative. Residuals are shares of the measured times, so that a short cycle counts as much as a long one. The
number of terms and the knee are those that best predict points left out; this error is reported with the fit.

Letters: P points, K terms.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.results.cost_model import COST_TERMS, CostModel, count_term_units

Row = dict[str, Any]

MAX_KNEES = 12  # tried; each costs a fit for every point that is left out
MIN_POINTS = 3  # with two, a single point would have to predict the other


def fit_cost_model(grid: Sequence[Row]) -> CostModel:
    """Fit rows of a timing grid (timing_grid.CycleTime). Raises ValueError for too few rows, or a time that isn't positive."""
    if len(grid) < MIN_POINTS:
        raise ValueError(
            f"a timing grid has {len(grid)} points, expected at least {MIN_POINTS}: fewer can't say how well the others are "
            "predicted; time more trees"
        )
    if wrong := [row for row in grid if not row["cycle_s"] > 0]:
        raise ValueError(f"a timing grid has a cycle of {wrong[0]['cycle_s']} s, expected more than 0; time it anew")
    times = np.array([row["cycle_s"] for row in grid])
    tried = [_fit_terms(grid, times, count, knee) for count, knee in _list_candidate_models(grid)]
    return min(tried, key=lambda found: found.error)


def _list_candidate_models(grid: Sequence[Row]) -> list[tuple[int, int | None]]:
    """Return (number of terms, knee) to try, the simplest first, since `min` takes the first of equals."""
    bent = COST_TERMS.index("beyond")
    rows = sorted({row["tokens"] * row["batch"] for row in grid})[1:-1]
    knees = rows[:: -(-len(rows) // MAX_KNEES) or 1]
    return [*((count, None) for count in range(1, bent + 1)), *((len(COST_TERMS), knee) for knee in knees)]


def _fit_terms(grid: Sequence[Row], times: np.ndarray, count: int, knee: int | None) -> CostModel:
    design, names = _build_design_matrix(grid, COST_TERMS[:count], knee)  # [P, K]
    shares = design / times[:, None]  # residuals are then shares of the measured time
    found = solve_nonnegative(shares, np.ones(len(times)))
    left_out = np.array([design[p] @ _fit_without_point(shares, p) for p in range(len(times))])
    errors, residuals = left_out / times - 1, shares @ found - 1
    return CostModel(
        dict(zip(names, found.tolist(), strict=True)),
        knee,
        left_out.tolist(),
        float(np.sqrt(np.mean(errors**2))),
        float(np.abs(errors).max()),
        float(np.sqrt(np.mean(residuals**2))),
    )


def _fit_without_point(shares: np.ndarray, point: int) -> np.ndarray:
    """Return the fit [K] to all points but one."""
    rest = np.delete(shares, point, axis=0)
    return solve_nonnegative(rest, np.ones(len(rest)))


def _build_design_matrix(grid: Sequence[Row], terms: Sequence[str], knee: int | None) -> tuple[np.ndarray, list[str]]:
    """Return ([P, K], names of the terms), without terms that are constant over the grid, as the fixed one is."""
    shapes = ((row["steps"], row["topk"], row["tokens"], row["batch"]) for row in grid)
    each = [count_term_units(*shape, knee) for shape in shapes]
    columns = {term: np.array([taken[term] for taken in each], dtype=float) for term in terms}
    kept = [term for term in terms if term == "cycle" or np.ptp(columns[term]) > 0]
    return np.stack([columns[term] for term in kept], axis=1), kept


def solve_nonnegative(design: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return x >= 0 [K] with the least |design x - wanted|; design [P, K], wanted [P].

    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23: terms enter if that lowers the error, and leave if
    they would turn negative.
    """
    scale = np.linalg.norm(design, axis=0)
    scale[scale == 0] = 1
    unit = design / scale
    x, free = np.zeros(unit.shape[1]), np.zeros(unit.shape[1], dtype=bool)
    for _ in range(10 * len(x)):  # a limit in case rounding makes it cycle
        slope = unit.T @ (wanted - unit @ x)
        slope[free] = -np.inf
        best = int(slope.argmax())
        if slope[best] <= 1e-10:
            break
        free[best] = True
        x = _step_to_feasible(unit, wanted, x, free)
    return x / scale


def _step_to_feasible(unit: np.ndarray, wanted: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Move from x towards the optimum of the free terms, up to where one turns negative; terms that reach 0 are fixed."""
    while True:
        aim = np.zeros_like(x)
        aim[free] = np.linalg.lstsq(unit[:, free], wanted, rcond=None)[0]
        if (aim[free] > 0).all():
            return aim
        below = free & (aim <= 0)
        reach = float((x[below] / np.maximum(x[below] - aim[below], 1e-300)).min())
        x = x + reach * (aim - x)
        free &= x > 1e-12
        x[~free] = 0
        if not free.any():
            return x
