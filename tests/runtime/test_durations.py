import pytest

from stages.params.units import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (59.4, "59.4 s"), (59.7, "1 min 0 s"), (99.94, "1 min 40 s"), (312, "5 min 12 s"),
        (3599.6, "1 h 00 min"), (5432, "1 h 30 min"),
    ],
)  # fmt: skip
def test_durations_are_in_seconds_minutes_or_hours(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
