"""Matrix products of few tokens: a Triton kernel that streams the weights, and the choice between its tilings and cuBLAS.

Letters: M tokens, K input width, N output width, H hidden, I the MLP's width.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.engine.cuda_graphs import time_graph_replay

# Programmatic dependent launch (Hopper and later): a kernel starts before its predecessor ends, and waits for its inputs.
PDL_SUPPORTED = (
    torch.version.hip is None
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
    and not triton.knobs.runtime.interpret
)
LAUNCH_OPTIONS: dict[str, Any] = {"launch_pdl": True} if PDL_SUPPORTED else {}  # unknown to other backends
USES_PDL = tl.constexpr(PDL_SUPPORTED)


@triton.jit
def wait_for_inputs():
    """Let the next kernel start, and wait until all kernels before this one have ended."""
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()


PREFETCHED_LINES = tl.constexpr(
    8
)  # of 128 bytes, of each weight row, that a product prefetches while it waits for inputs
MatmulTiling = tuple[int, int, int, int]  # tile, depth, warps, stages
# cuBLAS reads weights of 34 to 200 MB at 2.4 to 3.7 TB/s on an H200, which copies at 4.4.
MATMUL_TILINGS: list[MatmulTiling] = [
    (16, 256, 4, 4),
    (32, 128, 4, 5),
    (64, 64, 4, 6),
    (64, 128, 4, 4),
    (128, 64, 8, 4),
    (128, 128, 8, 3),
]
MAX_STREAMED_TOKENS = 64
COLD_WEIGHT_BYTES = 128 << 20  # more than the L2 cache
MAX_COPIES = 64  # of a weight that is timed: a model of weights below 2 MB stays in the L2 cache between passes anyway
fastest_tilings: dict[tuple[Any, ...], MatmulTiling | None] = {}  # None: cuBLAS


@triton.jit
def _prefetch_lines(lines):
    """Prefetch lines into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])  # or every M would be compiled
def _stream_matmul_kernel(
    x, w, y, M, N, K, B: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    n, m, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, B), tl.arange(0, DEPTH)
    if USES_PDL:  # weights are prefetched before the inputs are ready
        gdc_launch_dependents()
        line = (
            tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
            + tl.minimum(64 * tl.arange(0, PREFETCHED_LINES), K - 1)[None]
        )
        _prefetch_lines(w + line)
        if GATED:
            _prefetch_lines(w + N.to(tl.int64) * K + line)
        gdc_wait()
    weights = w + n.to(tl.int64)[:, None] * K + d[None]
    given = x + m[None] * K + d[:, None]
    sum_, ups = tl.zeros([TILE, B], tl.float32), tl.zeros([TILE, B], tl.float32)
    for start in range(0, K, DEPTH):
        there = (n < N)[:, None] & (start + d < K)[None]
        row = tl.load(
            given + start, mask=(m < M)[None] & (start + d < K)[:, None], other=0, eviction_policy="evict_last"
        )
        part = tl.load(weights + start, mask=there, other=0, eviction_policy="evict_first")
        sum_ = tl.dot(part, row, sum_)
        if GATED:
            part = tl.load(weights + N.to(tl.int64) * K + start, mask=there, other=0, eviction_policy="evict_first")
            ups = tl.dot(part, row, ups)
    kind = y.dtype.element_ty
    if GATED:
        wide = sum_.to(kind).to(tl.float32)
        sum_ = (wide * tl.sigmoid(wide)).to(kind).to(tl.float32) * ups.to(kind).to(tl.float32)
    tl.store(y + m[None] * N + n[:, None], sum_.to(kind), mask=(n < N)[:, None] & (m < M)[None])


def stream_matmul(
    x: Tensor, w: Tensor, gated: bool, tile: int, depth: int, warps: int, stages: int, compile_only: bool = False
) -> Tensor:
    """Return `matmul` or `gated_matmul` of at most 64 tokens: a program streams `tile` weight rows past all of them.

    `compile_only` compiles the kernel and leaves the result undefined.
    """
    (m, k), n = x.shape, len(w) // (2 if gated else 1)
    y = x.new_empty(m, n)
    rows, grid = max(16, triton.next_power_of_2(m)), (triton.cdiv(n, tile),)
    run = partial(_stream_matmul_kernel.warmup, grid=grid) if compile_only else _stream_matmul_kernel[grid]
    run(x, w, y, m, n, k, rows, tile, depth, gated, num_warps=warps, num_stages=stages, **LAUNCH_OPTIONS)
    return y


def _compile_tilings(x: Tensor, w: Tensor, gated: bool) -> None:
    """Compile the kernels of all tilings side by side: each takes a core about half a second."""
    with ThreadPoolExecutor(len(MATMUL_TILINGS)) as threads, triton.AsyncCompileMode(threads):
        for tiling in MATMUL_TILINGS:
            stream_matmul(x, w, gated, *tiling, compile_only=True)


def pick_tiling(
    x: Tensor,
    w: Tensor,
    gated: bool,
    run_cublas: Callable[[Tensor, Tensor, bool], Tensor],
    add_rms_norm: Callable[[Tensor, Tensor, float], Any],
) -> MatmulTiling | None:
    """Return the fastest tiling for this shape, or None for cuBLAS; timed at the first call, which is not captured."""
    if x.element_size() != 2 or len(x) > MAX_STREAMED_TOKENS:
        return None
    key = triton.next_power_of_2(max(16, len(x))), x.dtype, x.device, w.shape, gated
    if key not in fastest_tilings:
        _compile_tilings(x, w, gated)
        times: dict[MatmulTiling | None, float] = {
            None: _time_matmul(lambda w: run_cublas(x, w, gated), x, w, add_rms_norm)
        }
        for tiling in MATMUL_TILINGS:
            work = lambda w: stream_matmul(x, w, gated, *tiling)  # noqa: B023, E731 - called at once
            times[tiling] = _time_matmul(work, x, w, add_rms_norm)
        fastest_tilings[key] = min(times, key=times.__getitem__)
    return fastest_tilings[key]


def _time_matmul(
    work: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, add_rms_norm: Callable[[Tensor, Tensor, float], Any]
) -> float:
    """Return the milliseconds of a product in a CUDA graph; infinity where a tiling does not fit.

    Other kernels run between the products, and weights of 2 MB and more are not in L2, as in a pass of the target.
    """
    weights = [w, *(w.clone() for _ in range(min(MAX_COPIES, COLD_WEIGHT_BYTES // w.nbytes)))]
    one = x.new_ones(x.shape[1])

    def chain() -> None:
        for weight in weights:
            add_rms_norm(x, one, 1e-6)
            work(weight)

    try:
        return time_graph_replay(chain, x.device) / len(weights)
    except triton.runtime.errors.OutOfResources:
        return math.inf
