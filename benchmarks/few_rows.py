"""Time of matrix products and of the embedded target's pass by the number of rows, in float32: as cuBLAS does them, with the rows
filled up with zeros, and by the engine.

    python -m benchmarks.few_rows [--device cuda] [--dtype float32] [--width 128]

On an H200 cuBLAS's pass of the embedded target in float32 took 1.2 ms with 8 to 16 rows and 0.27 with 17 to 64
(docs/results/2026-11-26-h200-bfloat16.md). Microseconds, of PRODUCTS products one after the other or of a whole pass, captured as
one CUDA graph; on a CPU called one by one. The kernels of the slowest pass of fewer than FILLED_ROWS follow, by time.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from stages.engine.cuda_graphs import time_graph_replay
from stages.engine.kv_cache import KVCache, probe_kv_shapes
from stages.engine.padded_matmul import FILLED_ROWS, multiply_padded
from stages.engine.target_kernels import FusedDecoder
from stages.target.loading import load_target
from stages.toy import shipped_target

ROWS = (1, 2, 4, 5, 8, 12, 16, 17, 24, 31, 32, 64)
PRODUCTS = 30  # as many as a pass of seven blocks has
CONTEXT = 64  # cache rows of the pass before its own
Product = Callable[..., Tensor]


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("--device", default="cuda")
    takes.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    takes.add_argument(
        "--width", type=int, default=128, help="of the input; outputs are once, three and four times as wide"
    )
    o = takes.parse_args()
    device, dtype = torch.device(o.device), getattr(torch, o.dtype)
    print_passes(device, o.dtype)
    print(f"{'rows':>5}{'outputs':>9}{'cuBLAS':>9}{'filled':>9}   microseconds a product")
    for outputs in (o.width, 3 * o.width, 4 * o.width):
        w = torch.randn(outputs, o.width, device=device, dtype=dtype)
        for rows in ROWS:
            x = torch.randn(rows, o.width, device=device, dtype=dtype)
            plain, filled = (
                time_work(partial(multiply, x, w), device, PRODUCTS) for multiply in (F.linear, multiply_padded)
            )
            print(f"{rows:5}{outputs:9}{plain:9.2f}{filled:9.2f}", flush=True)


@torch.inference_mode()
def print_passes(device: torch.device, dtype: str) -> None:
    """Print the time of the embedded target's pass by rows, with each product, and the kernels of its slowest."""
    model = load_target(str(shipped_target.FOLDER / shipped_target.NAME), dtype, str(device))
    decoder = FusedDecoder(model)
    cache = KVCache(probe_kv_shapes(model), CONTEXT + max(ROWS), model.dtype, device)
    products: dict[str, Product | None] = {"engine": None, "cuBLAS": F.linear, "filled": multiply_padded}
    print(f"{'rows':>5}{''.join(f'{name:>9}' for name in products)}   microseconds a pass")
    times: dict[int, float] = {}
    for rows in ROWS:
        work = partial(run_pass, decoder, cache, rows)
        found = []
        for product in products.values():
            with use_product(decoder.kernels, product):
                found.append(time_work(work, device, 1))
        times[rows] = found[0]
        print(f"{rows:5}{''.join(f'{taken:9.1f}' for taken in found)}", flush=True)
    slowest = max((rows for rows in ROWS if rows < FILLED_ROWS), key=times.__getitem__)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiled:
        run_pass(decoder, cache, slowest)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(f"kernels of a pass of {slowest} rows:")
    print(profiled.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=70), flush=True)


def run_pass(decoder: FusedDecoder, cache: KVCache, rows: int) -> Tensor:
    """Return the last hidden [rows, H] of a chain behind CONTEXT cache rows of zeros."""
    device = cache.layers[0].keys.device
    ids = torch.arange(rows, device=device)
    chain = torch.ones(1, rows, rows, dtype=torch.bool, device=device).tril()
    length = torch.full((1,), CONTEXT, device=device)
    return decoder.forward(ids, CONTEXT + ids, chain, length, CONTEXT + ids, cache, [])[0]


@contextmanager
def use_product(kernels: Any, product: Product | None) -> Iterator[None]:
    """Replace the engine's products by `product` inside a `with` block; None leaves them."""
    before = kernels.matmul, kernels.gated_matmul
    if product is not None:
        kernels.matmul = product
        kernels.gated_matmul = lambda x, w: kernels.silu_and_mul(product(x, w))
    try:
        yield
    finally:
        kernels.matmul, kernels.gated_matmul = before


def time_work(work: Callable[[], Tensor], device: torch.device, calls: int) -> float:
    """Return the microseconds of one of `calls` calls."""

    def chain() -> None:
        for _ in range(calls):
            work()

    if device.type == "cuda":
        return time_graph_replay(chain, device) * 1000 / calls
    chain()
    started = time.perf_counter()
    chain()
    return (time.perf_counter() - started) * 1e6 / calls


if __name__ == "__main__":
    main()
