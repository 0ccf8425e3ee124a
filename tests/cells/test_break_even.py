"""Break-evens against cases worked out by hand."""

import pytest

from stages.cells import prediction


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
def test_words(points: list[tuple[float, float]], text: str) -> None:
    assert prediction.describe_crossings(points, "concurrency") == text
