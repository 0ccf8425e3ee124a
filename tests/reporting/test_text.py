"""Figures with their intervals, as the page, the terminal and the README write them."""

import pytest

from stages.reporting import text


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        (4.69, 3.94, 5.44, "± 0.75"),
        (4.6912, 3.9449, 5.4375, "± 0.75"),
        (1.05, 1.0, 1.22, "(1.00-1.22)"),  # clipped at 1: ± would say that tau may be below it
        (1.0, 1.0, 1.0, "± 0.00"),
        (3.5, None, None, "(one prompt)"),
    ],
)
def test_the_spread_of_a_value(value: float, low: float | None, high: float | None, shown: str) -> None:
    assert text.format_spread(value, low, high, text.ONE_PROMPT) == shown
