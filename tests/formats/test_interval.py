"""The t interval against printed tables of Student's t, and against its own promise on drawn values."""

import math
import random

import pytest

from stages.formats import interval


@pytest.mark.parametrize(
    ("freedom", "t"),  # two-sided 95%, as every table prints it
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (10, 2.2281), (29, 2.0452), (120, 1.9799)],
)  # fmt: skip
def test_half_the_interval_is_t_standard_errors(freedom: int, t: float) -> None:
    values = [1.0, 2.0] + [1.5] * (freedom - 1)
    error = math.sqrt(0.5 / freedom / (freedom + 1))
    low, high = interval.of_mean(values)
    assert (high - low) / 2 / error == pytest.approx(t, abs=5e-5)
    assert (high + low) / 2 == pytest.approx(1.5)


def test_another_share() -> None:
    low, high = interval.of_mean([0.0, 1.0, 2.0], share=0.99)
    assert (high - low) / 2 == pytest.approx(9.9248 / math.sqrt(3), abs=1e-4)


def test_one_value_says_nothing_of_how_it_scatters() -> None:
    assert interval.of_mean([1.5]) is None
    assert interval.of_mean([]) is None
    assert interval.of_mean([1.5, 1.5, 1.5]) == (1.5, 1.5)


def test_it_holds_the_truth_nineteen_times_in_twenty() -> None:
    chance = random.Random(3)
    held = 0
    for _ in range(2000):
        low, high = interval.of_mean([chance.gauss(1.7, 0.2) for _ in range(3)])
        held += low <= 1.7 <= high
    assert held / 2000 == pytest.approx(0.95, abs=0.015)
