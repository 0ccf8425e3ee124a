"""Float32 products of few rows: where cuBLAS's kernel for them is slow, rows of zeros fill them up.

cuBLAS picks a kernel by shape. On an H200 it takes 25 to 53 microseconds for 8 to 16 rows of float32 and 5 to 12 for 17 and more,
so a pass of the embedded target takes 1.2 ms for 8 rows, and 0.32 with them filled up (docs/results/2026-11-26-h200-bfloat16.md).

Letters: M rows, K input width, N output width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.engine.cuda_graphs import time_graph_replay

FILLED_ROWS = 32
# Sums round differently in another kernel. The kernels that are avoided are three to six times slower, so that noise of the
# measurement never changes the choice, and with it an answer of another run.
MIN_GAIN = 2.0
TIMED_CALLS = 16
choices: dict[tuple[Any, ...], bool] = {}  # by shape: whether rows are filled up


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] -> x @ w.T + bias [M, N]; filled up where that is at least MIN_GAIN times as fast."""
    is_slow = x.is_cuda and x.dtype == torch.float32 and 1 < len(x) < FILLED_ROWS and choose_padded(x, w)
    return multiply_padded(x, w, bias) if is_slow else F.linear(x, w, bias)


def multiply_padded(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] -> x @ w.T + bias [M, N], computed with FILLED_ROWS rows at least."""
    missing = max(0, FILLED_ROWS - len(x))
    return F.linear(F.pad(x, (0, 0, 0, missing)), w, bias)[: len(x)]


def choose_padded(x: Tensor, w: Tensor) -> bool:
    """Return whether rows are filled up for this shape; timed at the first call, which is not captured."""
    key = x.shape, w.shape, x.device
    if key not in choices:
        plain, filled = (
            time_graph_replay(lambda: [multiply(x, w) for _ in range(TIMED_CALLS)], x.device)  # noqa: B023 - called at once
            for multiply in (F.linear, multiply_padded)
        )
        choices[key] = plain > MIN_GAIN * filled
    return choices[key]
