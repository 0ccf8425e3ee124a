"""Final answers found in texts."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data import final_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So 12 - 5 = 7 rolls are left.", 7),
        ("It costs **$1,234.50**.", Fraction(2469, 2)),
        (r"That is \$1{,}234.", 1234),
        ("-$5", -5),
        ("−4 degrees", -4),
        ("10-3", 3),  # a difference, not a sign
        ("(2)-3", 3),
        ("12,34", 34),  # no thousands
        (".5 litres", Fraction(1, 2)),
        ("none at all", None),
        ("9" * 5000, None),
    ],
)
def test_the_last_number(text: str, number: Fraction | int | None) -> None:
    assert final_answer.find_last_number(text) == number


@given(st.integers(-(10**9), 10**9), st.integers(0, 99))
def test_a_number_is_found_in_every_spelling(whole: int, cents: int) -> None:
    value = Fraction(whole) + (-1 if whole < 0 else 1) * Fraction(cents, 100)
    for text in (
        f"{whole}.{cents:02}",
        f"{whole:,}.{cents:02}",
        f"is ${whole:,}.{cents:02}0, in 1 year: {whole}.{cents:02}.",
    ):
        if whole:  # -0.5 has no whole part to carry the sign
            assert final_answer.find_last_number(text) == value


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{a}, no: \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 5.", "5"),
        (r"\fbox{ 3 }", "3"),
        (r"\boxed{1} and \boxed{2", None),  # cut by length: its last word is not known
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert final_answer.find_boxed_answer(text) == box
