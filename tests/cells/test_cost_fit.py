"""The fit of a cycle's cost, against grids whose terms are known and against least squares by trying every subset."""

import itertools
import random

import numpy as np
import pytest

from stages.cells import cost_fit
from stages.params.tree_shape import TreeShape
from tests import costs


def test_terms_of_an_exact_grid_are_found() -> None:
    found = cost_fit.fit_cost_model(costs.grid())
    assert found.seconds["draft step"] == pytest.approx(costs.TRUTH["step"])
    assert found.seconds["verify row"] == pytest.approx(costs.TRUTH["token"])
    assert found.seconds["draft row"] == pytest.approx(costs.TRUTH["row"])
    assert found.seconds["cycle"] == pytest.approx(costs.TRUTH["cycle"])
    assert found.error < 1e-9 and found.error_max < 1e-9 and found.residual < 1e-9


def test_a_knee_is_found_where_computing_outlasts_reading() -> None:
    """Up to 64 rows a verify pass costs what its weights cost to read, beyond it each row more."""
    points = costs.grid(batches=(1, 4, 16), truth=costs.TRUTH | {"token": 0.0})
    for point in points:
        point.cycle_s += 0.04e-3 * max(0, point.num_draft_tokens * point.batch - 64)
    found = cost_fit.fit_cost_model(points)
    assert found.knee == 64 and found.seconds["beyond"] == pytest.approx(0.04e-3)
    unseen = TreeShape.parse("t6_2_20")
    assert found.predict_cycle_s(unseen, 1) == pytest.approx(costs.seconds(unseen, 1, costs.TRUTH | {"token": 0.0}))


@pytest.mark.parametrize("seed", range(12))
def test_nonnegative_least_squares_is_the_best_of_all_subsets(seed: int) -> None:
    """The obvious way: of all subsets of columns whose least squares has no negative value, the one nearest by."""
    draw = np.random.default_rng(seed)
    points, terms = int(draw.integers(3, 9)), int(draw.integers(1, 6))
    design, wanted = draw.normal(size=(points, terms)), draw.normal(size=points)
    if random.Random(seed).random() < 0.3:
        design[:, 0] = design[:, -1]  # columns that can't be told from each other
    best = float(np.linalg.norm(wanted))
    for count in range(1, terms + 1):
        for some in itertools.combinations(range(terms), count):
            x = np.linalg.lstsq(design[:, some], wanted, rcond=None)[0]
            if (x >= -1e-12).all():
                best = min(best, float(np.linalg.norm(design[:, some] @ x - wanted)))
    x = cost_fit.solve_nonnegative(design, wanted)
    assert (x >= 0).all() and float(np.linalg.norm(design @ x - wanted)) == pytest.approx(best, abs=1e-9)
