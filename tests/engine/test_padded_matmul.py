"""Products filled up with rows of zeros: the same numbers, chosen where they are clearly faster."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stages.engine import padded_matmul


def draw(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Milliseconds that the next measurements find: cuBLAS, filled, and so on."""
    times: list[float] = []
    monkeypatch.setattr(padded_matmul, "time_graph_replay", lambda work, _device: (work(), times.pop(0))[1])
    monkeypatch.setattr(padded_matmul, "choices", {})
    return times


@pytest.mark.parametrize("rows", [2, 8, 31, 32, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_filled_product_has_the_rows_of_the_plain_one(rows: int, has_bias: bool) -> None:
    x, w = draw(rows, 24), draw(50, 24)
    bias = draw(1, 50)[0] if has_bias else None
    found = padded_matmul.multiply_padded(x, w, bias)
    assert found.is_contiguous() and found.shape == (rows, 50)
    torch.testing.assert_close(found, F.linear(x, w, bias))


def test_rows_are_filled_only_where_that_is_twice_as_fast_and_each_shape_is_timed_once(timed: list[float]) -> None:
    w = draw(50, 24)
    timed += [9.0, 3.0, 5.0, 3.0]
    assert padded_matmul.choose_padded(draw(8, 24), w) and padded_matmul.choose_padded(draw(8, 24), w)
    assert not padded_matmul.choose_padded(draw(17, 24), w)
    assert not timed
