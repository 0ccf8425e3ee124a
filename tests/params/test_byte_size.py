"""Sizes as messages and pages show them: three digits in the unit that fits."""

import pytest

from stages.params.units import GIB, format_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (4 << 20, "4.00 MiB"), (9.996 * GIB, "10.0 GiB"),
        (80 * GIB, "80.0 GiB"), (99.96 * GIB, "100 GiB"), (3000 * GIB, "3,000 GiB"),
    ],
)  # fmt: skip
def test_a_size_has_the_unit_that_fits(count: float, text: str) -> None:
    assert format_bytes(count) == text
