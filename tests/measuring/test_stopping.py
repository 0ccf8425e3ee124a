"""When repeats end."""

from types import SimpleNamespace
from typing import Any

import pytest

from stages.cells import interval, points
from stages.measuring.repeats import judge_repeats
from stages.params.benchmark_sections import Workload
from tests.conftest import EVAL


def make_cell(repeats: int, until: dict[str, float] | None, *kinds: str) -> Any:
    workload = Workload.model_validate({**EVAL, "repeats": repeats} | ({"until": until} if until else {}))
    subjects = [SimpleNamespace(results={kind: {} for kind in kinds})]
    context = SimpleNamespace(workload=workload)
    return SimpleNamespace(context=context, subjects=subjects, in_turns=False, is_first=True)


@pytest.mark.parametrize(
    ("repeats", "half_width", "seconds", "rule"),
    [(2, 0.01, 5, None), (3, 0.01, 5, "half_width"), (3, 0.06, 5, None), (3, 0.06, 60, "most_seconds"),
     (4, None, 60, "most_seconds"), (2, None, 90, None), (8, 0.06, 5, "repeats")],
)  # fmt: skip
def test_repeats_end_by_the_half_width_the_seconds_or_their_number(
    repeats: int, half_width: float | None, seconds: float, rule: str | None
) -> None:
    cell = make_cell(8, {"half_width": 0.05, "most_seconds": 60}, "plain", "speculative")
    found = judge_repeats(cell, repeats, half_width, seconds)
    assert (found and found.rule) == rule and (found is None or found.repeats == repeats)


@pytest.mark.parametrize("kinds", [("plain",), ("plain", "speculative")])
def test_a_fixed_number_is_neither_more_nor_less(kinds: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Of plain decoding alone `until` says nothing."""
    cell = make_cell(2, {"half_width": 0.05} if len(kinds) == 1 else None, *kinds)
    assert judge_repeats(cell, 1, 1e-9, 1e9) is None
    found = judge_repeats(cell, 2, 1e-9, 1e9)
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
