"""When repeats end."""

from types import SimpleNamespace
from typing import Any

import pytest

from stages.cells import interval, points
from stages.cells.stopping import RepeatRule


@pytest.mark.parametrize(
    ("repeats", "half_width", "seconds", "rule"),
    [(1, 0.01, 5, None), (2, 0.01, 5, "half_width"), (2, 0.06, 5, None), (2, 0.06, 60, "most_seconds"),
     (3, None, 60, "most_seconds"), (1, None, 90, None), (8, 0.06, 5, "repeats")],
)  # fmt: skip
def test_repeats_end_by_the_half_width_the_seconds_or_their_number(
    repeats: int, half_width: float | None, seconds: float, rule: str | None
) -> None:
    found = RepeatRule(fewest=2, most=8, half_width=0.05, most_seconds=60).judge(repeats, half_width, seconds)
    assert (found and found.rule) == rule and (found is None or found.repeats == repeats)


def test_a_fixed_number_is_neither_more_nor_less(capsys: pytest.CaptureFixture[str]) -> None:
    rule = RepeatRule(fewest=1, most=2, half_width=None)
    assert rule.judge(1, 1e-9, 1e9) is None
    found = rule.judge(2, 1e-9, 1e9)
    assert found and (found.rule, found.half_width) == ("repeats", 1e-9)
    assert capsys.readouterr().out == ""


def test_a_loads_half_width_is_that_of_its_repeats_speedups() -> None:
    def average(loads: list[float], plain: list[float]) -> Any:
        return points.average_speedup(*([SimpleNamespace(output_throughput=x) for x in xs] for xs in (loads, plain)))

    ends = interval.compute_mean_interval([1.5, 1.6, 1.4])
    assert ends is not None
    found = average([15.0, 32.0, 7.0], [10.0, 20.0, 5.0])
    assert found.half_width == pytest.approx((ends.high - ends.low) / 2 / 1.5) and found.speedup == pytest.approx(1.5)
    assert average([15.0], [10.0]).half_width is None
    assert average([15.0, 32.0], [10.0, 0.0]) is None
