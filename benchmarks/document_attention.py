"""Which kernel is the fastest for causal attention inside packed documents, as extract_hiddens runs it.

    python3 -m benchmarks.document_attention [--tokens 16384]

Attention of Qwen3-8B (32 query heads, 8 key-value heads of 128, bfloat16) over a pack, of rows of 2,048 tokens and of lengths as
in benchmarks/training.py's `real`. In the forward of one pack it takes 42 of 392 ms by the flash kernel
(docs/results/2026-11-21-h200-training.md), so a kernel twice as fast would raise MFU from 59.6% to 63%.

    flash      aten's flash kernel with borders of documents: what stages/target/packed_forward.py calls
    flex       FlexAttention with a block mask of the documents, as training has it; building the mask is timed apart
    cudnn      cuDNN's kernel, rows of one length as a batch: no borders, so only where all lengths are equal
    fa3        FlashAttention 3 in place of aten's flash kernel, where it is installed (stages/target/flash_attention.py)

FLOP: 4 * heads * width for each visible pair. Every output is compared with float32's of the first two documents.
Prints JSON: milliseconds (median of 20) and TFLOP/s.
"""

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.training import LENGTHS
from stages.target.flash_attention import activate_flash_attention_3
from stages.training.attention_mask import build_flex_mask, run_flex_attention

HEADS, GROUPS, WIDTH = 32, 8, 128

Attend = Callable[[], Any]  # -> [N, heads, width]


def main() -> None:
    takes = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    takes.add_argument("--tokens", type=int, default=16384, help="of a pack")
    tokens = takes.parse_args().tokens
    generator = torch.Generator("cuda").manual_seed(1)
    query, key, value = (
        torch.randn(tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    packs = {name: draw_lengths(name, tokens) for name in ("dense", "real")}
    for name, lengths in packs.items():
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
        seconds = time_kernel(partial(build_mask, document))
        print(json.dumps({"lengths": name, "kernel": "flex's mask", "ms": round(1000 * seconds, 3)}), flush=True)
        print_kernels(name, lengths, (query, key, value), list_kernels(query, key, value, document, lengths))
    if activate_flash_attention_3(query.device):
        for name, lengths in packs.items():
            attend = partial(attend_flash, query, key, value, list_borders(lengths), max(lengths))
            print_kernels(name, lengths, (query, key, value), {"fa3": attend})


def print_kernels(
    name: str, lengths: list[int], states: tuple[Tensor, Tensor, Tensor], kernels: dict[str, Attend]
) -> None:
    """Measure kernels on the same documents, their queries, keys and values in `states`."""
    expected = attend_exactly(*states, lengths[:2])
    flop = sum(4 * HEADS * WIDTH * n * (n + 1) // 2 for n in lengths)
    for kernel, attend in kernels.items():
        line: dict[str, Any] = {"lengths": name, "documents": len(lengths), "kernel": kernel}
        try:
            off = (attend()[: len(expected)].float() - expected).norm() / expected.norm()
            seconds = time_kernel(attend)
        except RuntimeError as error:
            print(json.dumps(line | {"failed": str(error).splitlines()[0]}), flush=True)
            continue
        rate = round(flop / seconds / 1e12)
        print(
            json.dumps(line | {"ms": round(1000 * seconds, 3), "tflop_per_s": rate, "off": round(float(off), 5)}),
            flush=True,
        )


def draw_lengths(name: str, tokens: int) -> list[int]:
    """Return lengths of documents that fill the pack; the last is cut."""
    rng = random.Random(1)
    lengths: list[int] = []
    while tokens:
        lengths.append(min(tokens, LENGTHS[name](rng)))
        tokens -= lengths[-1]
    return lengths


def list_kernels(query: Tensor, key: Tensor, value: Tensor, document: Tensor, lengths: list[int]) -> dict[str, Attend]:
    """Return the kernels that take these documents; document [N] is the number of each token's."""
    found: dict[str, Attend] = {
        "flash": partial(attend_flash, query, key, value, list_borders(lengths), max(lengths)),
        "flex": partial(attend_flex, query, key, value, build_mask(document)),
    }
    if len(set(lengths)) == 1:
        found["cudnn"] = partial(attend_cudnn, query, key, value, lengths[0])
    return found


def list_borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def attend_flash(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int) -> Tensor:
    forward = torch.ops.aten._flash_attention_forward
    return forward(query, key, value, borders, borders, longest, longest, 0.0, True, False)[0]


def build_mask(document: Tensor) -> Any:
    """Return FlexAttention's BlockMask of documents."""

    def is_visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (k <= q)

    return build_flex_mask(is_visible, len(document), len(document), document.device)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return run_flex_attention(q, k, v, mask)[0][0].transpose(0, 1)


def attend_cudnn(query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Return float32's attention of the first documents, [sum of lengths, heads, width]."""
    outputs: list[Tensor] = []
    first = 0
    for length in lengths:
        q, k, v = (x[first : first + length].float().transpose(0, 1)[None] for x in (query, key, value))
        with sdpa_kernel(SDPBackend.MATH):
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        first += length
    return torch.cat(outputs)


def time_kernel(attend: Attend, repeats: int = 20) -> float:
    """Return the median seconds of a call, by the GPU's clock."""
    for _ in range(3):
        attend()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        attend()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[repeats // 2]


if __name__ == "__main__":
    main()
