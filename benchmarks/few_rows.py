"""Time of a matrix product by its number of rows, as cuBLAS does it, and with the rows filled up to FILLED with zeros.

    python -m benchmarks.few_rows [--device cuda] [--dtype float32] [--width 128]

On an H200 a pass of the embedded target in float32 takes 1.2 ms longer with 5 to 16 rows than with 4 or 32
(docs/results/2026-11-26-h200-families.md). bfloat16 has kernels of its own (engine/matmul_triton.py). Microseconds, of PRODUCTS
one after the other, captured as one CUDA graph; on a CPU called one by one.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.engine.cuda_graphs import time_graph_replay

ROWS = (1, 2, 4, 5, 8, 12, 16, 17, 24, 31, 32, 64)
FILLED = 32
PRODUCTS = 30  # as many as a pass of seven blocks has


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("--device", default="cuda")
    takes.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    takes.add_argument(
        "--width", type=int, default=128, help="of the input; outputs are once, three and four times as wide"
    )
    o = takes.parse_args()
    device, dtype = torch.device(o.device), getattr(torch, o.dtype)
    print(f"{'rows':>5}{'outputs':>9}{'cuBLAS':>9}{'filled':>9}   microseconds a product")
    for outputs in (o.width, 3 * o.width, 4 * o.width):
        w = torch.randn(outputs, o.width, device=device, dtype=dtype)
        for rows in ROWS:
            x = torch.randn(rows, o.width, device=device, dtype=dtype)
            plain, filled = (time_product(partial(multiply, x, w), device) for multiply in (F.linear, fill_rows))
            print(f"{rows:5}{outputs:9}{plain:9.2f}{filled:9.2f}", flush=True)


def fill_rows(x: Tensor, w: Tensor) -> Tensor:
    """Return x [M, K] times w [N, K], computed with FILLED rows where M is smaller."""
    missing = max(0, FILLED - len(x))
    return F.linear(F.pad(x, (0, 0, 0, missing)), w)[: len(x)]


def time_product(work: Callable[[], Tensor], device: torch.device) -> float:
    """Return the microseconds of one of PRODUCTS products."""

    def chain() -> None:
        for _ in range(PRODUCTS):
            work()

    if device.type == "cuda":
        return time_graph_replay(chain, device) * 1000 / PRODUCTS
    chain()
    started = time.perf_counter()
    chain()
    return (time.perf_counter() - started) * 1e6 / PRODUCTS


if __name__ == "__main__":
    main()
