"""When repeats end."""

import pytest

from stages.cells import interval
from stages.cells.stopping import RepeatRule, measure_loads_half_width


@pytest.mark.parametrize(
    ("repeats", "half_width", "rule"),
    [(1, 0.01, None), (2, 0.01, None), (3, 0.04, "half_width"), (3, 0.06, None), (7, None, None), (8, 0.06, "most_repeats"),
     (8, None, "most_repeats"), (8, 0.05, "half_width")],
)  # fmt: skip
def test_repeats_end_by_the_half_width_or_the_budget(repeats: int, half_width: float | None, rule: str | None) -> None:
    found = RepeatRule(fewest=3, most=8, half_width=0.05).judge(repeats, half_width)
    assert (found and found.rule) == rule and (found is None or found.repeats == repeats)


@pytest.mark.parametrize("half_width", [None, 1e-9])
def test_a_fixed_number_is_neither_more_nor_less(half_width: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    rule = RepeatRule(fewest=2, most=2, half_width=None)
    assert rule.judge(1, half_width) is None
    found = rule.judge(2, half_width)
    assert found and (found.rule, found.half_width) == ("repeats", half_width)
    assert capsys.readouterr().out == ""


def test_a_loads_half_width_is_that_of_its_repeats_speedups() -> None:
    speedups = [1.5, 1.6, 1.4]
    ends = interval.compute_mean_interval(speedups)
    assert ends is not None
    found = measure_loads_half_width([15.0, 32.0, 7.0], [10.0, 20.0, 5.0])
    assert found == pytest.approx((ends.high - ends.low) / 2 / 1.5)
    assert measure_loads_half_width([15.0], [10.0]) is None
    assert measure_loads_half_width([15.0, 32.0], [10.0, 0.0]) is None
