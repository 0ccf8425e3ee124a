"""The fit of a cycle's cost, against grids whose terms are known and against least squares by trying every subset."""

import itertools
import random

import numpy as np
import pytest

from stages.cells import cost_fit
from stages.cells.timing_grid import CycleTime
from stages.params.tree_shape import TreeShape
from tests import costs


def test_terms_of_an_exact_grid_are_found() -> None:
    found = cost_fit.fit_cost_model(costs.grid())
    assert found.seconds["draft step"] == pytest.approx(costs.TRUTH["step"])
    assert found.seconds["verify row"] == pytest.approx(costs.TRUTH["token"])
    assert found.seconds["draft row"] == pytest.approx(costs.TRUTH["row"])
    assert found.seconds["cycle"] == pytest.approx(costs.TRUTH["cycle"])
    assert found.error < 1e-9 and found.error_max < 1e-9 and found.residual < 1e-9


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_terms_of_a_noisy_grid_are_nearly_found_and_the_error_says_how_noisy_it_is(noise: float) -> None:
    found = cost_fit.fit_cost_model(costs.grid(noise=noise))
    for name, truth in (("draft step", "step"), ("cycle", "cycle")):
        assert found.seconds[name] == pytest.approx(costs.TRUTH[truth], rel=6 * noise)
    assert 0.6 * noise < found.error < 2 * noise


def test_the_error_on_points_left_out_is_that_on_points_never_seen() -> None:
    """Trees that are in no grid, timed without noise: the margin covers nearly all of them."""
    found = cost_fit.fit_cost_model(costs.grid(noise=0.03))
    unseen = [
        TreeShape.parse(name) for name in ("t2_1_3", "t5_3_12", "t8_2_24", "t4_4_48", "t7_3_20", "t9_1_10", "t2_4_6")
    ]
    off = [found.predict_cycle_s(t, 1) / costs.seconds(t) - 1 for t in unseen]
    assert max(map(abs, off)) < found.margin
    assert found.margin == pytest.approx(2.03 * found.error, rel=0.01)  # Student's t of 35 degrees


def test_a_knee_is_found_where_computing_outlasts_reading() -> None:
    """Up to 64 rows a verify pass costs what its weights cost to read, beyond it each row more."""
    points = costs.grid(batches=(1, 4, 16), truth=costs.TRUTH | {"token": 0.0})
    for point in points:
        point.cycle_s += 0.04e-3 * max(0, point.num_draft_tokens * point.batch - 64)
    found = cost_fit.fit_cost_model(points)
    assert found.knee == 64 and found.seconds["beyond"] == pytest.approx(0.04e-3)
    unseen = TreeShape.parse("t6_2_20")
    assert found.predict_cycle_s(unseen, 1) == pytest.approx(costs.seconds(unseen, 1, costs.TRUTH | {"token": 0.0}))


def test_what_vllm_measured_is_predicted_from_the_other_lengths() -> None:
    """EAGLE-3 chains of 2 to 7 drafts for an 8B target, vllm-project/vllm#20780: C = accept length x TPOT / plain TPOT, and the
    speedup. Each length left out is predicted to about 4%, and the length predicted as best is within 2% of the best.
    """
    implied = {2: 1.44, 3: 1.61, 4: 1.76, 5: 1.94, 6: 2.06, 7: 2.15}
    speedup = {2: 1.637, 3: 1.729, 4: 1.746, 5: 1.712, 6: 1.683, 7: 1.648}
    points = [
        CycleTime(num_steps=k, topk=1, num_draft_tokens=k + 1, batch=1, cycle_s=c, error=0.0, samples=1)
        for k, c in implied.items()
    ]
    found = cost_fit.fit_cost_model(points)
    assert found.error_max < 0.045
    guessed = {k: implied[k] * speedup[k] / left for k, left in zip(implied, found.left_out_s, strict=True)}
    assert speedup[max(guessed, key=lambda k: guessed[k])] >= 0.98 * max(speedup.values())


def test_too_few_points_and_times_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="has 2 points, expected at least 3"):
        cost_fit.fit_cost_model(costs.grid()[:2])
    points = costs.grid()
    points[3].cycle_s = 0.0
    with pytest.raises(ValueError, match=r"cycle of 0.0 s, expected more than 0"):
        cost_fit.fit_cost_model(points)


@pytest.mark.parametrize("seed", range(40))
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
