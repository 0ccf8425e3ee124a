"""Break-evens against cases worked out by hand."""

import pytest

from stages.cells import prediction


def test_a_crossing_lies_on_a_straight_line_over_the_logarithm() -> None:
    """From 1.5 at 16 to 0.5 at 64 the half way over log2 is 32; a linear axis would say 40."""
    assert prediction.find_crossings([(1, 2.0), (16, 1.5), (64, 0.5)]) == [pytest.approx(32)]
    # a quarter of the way from 8 to 128 over the logarithm: 8 * 16**0.25 = 16
    assert prediction.find_crossings([(8, 1.1), (128, 0.7)]) == [pytest.approx(16)]


def test_there_may_be_several_or_none() -> None:
    assert prediction.find_crossings([(1, 1.2), (2, 1.1)]) == []
    assert prediction.find_crossings([(1, 0.9), (2, 0.8)]) == []
    assert prediction.find_crossings([(1, 0.5), (4, 1.5), (16, 0.5)]) == [pytest.approx(2), pytest.approx(8)]
    assert prediction.find_crossings([(7, 1.0)]) == []


def test_just_one_is_where_it_lies() -> None:
    assert prediction.find_crossings([(1, 1.5), (4, 1.0), (16, 0.5)]) == [pytest.approx(4)]
    assert prediction.find_crossings([(1, 0.5), (4, 1.0), (16, 1.5)]) == [pytest.approx(4)]


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ([(1, 2.0), (16, 1.5), (64, 0.5)], "faster up to a concurrency of 32, slower beyond"),
        ([(1, 0.5), (4, 1.5), (16, 0.5)], "slower up to a concurrency of 2, faster up to 8, slower beyond"),
        ([(1, 1.31), (256, 1.12)], "faster at every concurrency measured, 1 to 256: at least 1.12× at 256"),
        ([(1, 0.93), (256, 0.4)], "slower at every concurrency measured, 1 to 256: at best 0.93× at 1"),
        ([(8, 1.25)], "faster at every concurrency measured, 8: at least 1.25× at 8"),
    ],
)
def test_words(points: list[prediction.SpeedupPoint], text: str) -> None:
    assert prediction.describe_crossings(points, "concurrency") == text


def test_words_of_an_axis_that_begins_with_a_vowel() -> None:
    assert (
        prediction.describe_crossings([(10, 0.5), (40, 1.5)], "answer length")
        == "slower up to an answer length of 20, faster beyond"
    )
