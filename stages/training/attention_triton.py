"""`attention_mask.merge_own_steps` and its gradient as Triton kernels.

Compiled by torch.compile it took about 8% of a training step on an H200 (docs/results/2026-11-21-h200-training.md). Here a
program holds some positions of one head and reads each number once. The gradient is that of one softmax over prefix and own
steps: with the merged log-sum-exp `merged`, the weight of the prefix w = exp(lse - merged), and delta = dO . O,

    d_out = w dO        d_lse = w (dO . out - delta)        ds_j = p_j (dO . v_j - delta)

Dimensions: P positions, S own steps, G key-value heads, R query heads per key-value head, E head width (a power of two), B
positions of a program.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITIONS_PER_PROGRAM = 16


@triton.jit
def _forward_kernel(
    q, out, lse, keys, values, result, merged, positions, steps, scale, out_p, out_a, lse_p, lse_a,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    p, a, e = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1), tl.arange(0, E)
    valid = p < positions
    valid_2d = valid[:, None] & (e < E)[None]
    row = (p * (G * R) + a).to(tl.int64)
    query = tl.load(q + row[:, None] * E + e, mask=valid_2d, other=0).to(tl.float32) * scale
    highest = tl.load(lse + p * lse_p + a * lse_a, mask=valid, other=0)
    total = tl.full([B], 1.0, tl.float32)
    weighted = tl.load(out + (p * out_p + a * out_a)[:, None] + e, mask=valid_2d, other=0).to(tl.float32)
    for j in range(steps):
        at = ((j * positions + p).to(tl.int64) * G + a // R)[:, None] * E + e
        score = tl.sum(query * tl.load(keys + at, mask=valid_2d, other=0).to(tl.float32), 1)
        new_highest = tl.maximum(highest, score)
        before, now = tl.exp(highest - new_highest), tl.exp(score - new_highest)
        weighted = weighted * before[:, None] + now[:, None] * tl.load(values + at, mask=valid_2d, other=0).to(
            tl.float32
        )
        total, highest = total * before + now, new_highest
    tl.store(result + row[:, None] * E + e, (weighted / total[:, None]).to(result.dtype.element_ty), mask=valid_2d)
    tl.store(merged + row, highest + tl.log(total), mask=valid)


@triton.jit
def _backward_queries_kernel(
    q, out, lse, keys, values, result, merged, grad, d_q, d_out, d_lse, deltas, positions, steps, scale,
    out_p, out_a, lse_p, lse_a, G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    p, a, e = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1), tl.arange(0, E)
    valid = p < positions
    valid_2d = valid[:, None] & (e < E)[None]
    row = (p * (G * R) + a).to(tl.int64)
    offset = row[:, None] * E + e
    query = tl.load(q + offset, mask=valid_2d, other=0).to(tl.float32) * scale
    d_result = tl.load(grad + offset, mask=valid_2d, other=0).to(tl.float32)
    delta = tl.sum(d_result * tl.load(result + offset, mask=valid_2d, other=0).to(tl.float32), 1)
    normaliser = tl.load(merged + row, mask=valid, other=0)
    prefix_weight = tl.exp(tl.load(lse + p * lse_p + a * lse_a, mask=valid, other=0) - normaliser)
    prefix = tl.load(out + (p * out_p + a * out_a)[:, None] + e, mask=valid_2d, other=0).to(tl.float32)
    tl.store(d_out + offset, (prefix_weight[:, None] * d_result).to(d_out.dtype.element_ty), mask=valid_2d)
    tl.store(d_lse + row, prefix_weight * (tl.sum(d_result * prefix, 1) - delta), mask=valid)
    tl.store(deltas + row, delta, mask=valid)
    d_query = tl.zeros([B, E], tl.float32)
    for j in range(steps):
        at = ((j * positions + p).to(tl.int64) * G + a // R)[:, None] * E + e
        key = tl.load(keys + at, mask=valid_2d, other=0).to(tl.float32)
        value = tl.load(values + at, mask=valid_2d, other=0).to(tl.float32)
        weight = tl.exp(tl.sum(query * key, 1) - normaliser)
        d_query += (weight * (tl.sum(d_result * value, 1) - delta))[:, None] * key
    tl.store(d_q + offset, (d_query * scale).to(d_q.dtype.element_ty), mask=valid_2d)


@triton.jit
def _backward_keys_kernel(
    q, keys, values, merged, grad, deltas, d_keys, d_values, positions, scale,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    p, g, j, e = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1), tl.program_id(2), tl.arange(0, E)
    valid = p < positions
    valid_2d = valid[:, None] & (e < E)[None]
    at = ((j * positions + p).to(tl.int64) * G + g)[:, None] * E + e
    key = tl.load(keys + at, mask=valid_2d, other=0).to(tl.float32)
    value = tl.load(values + at, mask=valid_2d, other=0).to(tl.float32)
    d_key, d_value = tl.zeros([B, E], tl.float32), tl.zeros([B, E], tl.float32)
    for r in tl.static_range(R):
        row = (p * (G * R) + g * R + r).to(tl.int64)
        query = tl.load(q + row[:, None] * E + e, mask=valid_2d, other=0).to(tl.float32) * scale
        d_result = tl.load(grad + row[:, None] * E + e, mask=valid_2d, other=0).to(tl.float32)
        weight = tl.exp(tl.sum(query * key, 1) - tl.load(merged + row, mask=valid, other=0))
        d_value += weight[:, None] * d_result
        d_score = weight * (tl.sum(d_result * value, 1) - tl.load(deltas + row, mask=valid, other=0))
        d_key += d_score[:, None] * query
    tl.store(d_keys + at, d_key.to(d_keys.dtype.element_ty), mask=valid_2d)
    tl.store(d_values + at, d_value.to(d_values.dtype.element_ty), mask=valid_2d)


class MergeOwnSteps(torch.autograd.Function):
    """Return [P, A, E] from out [P, A, E], lse [P, A] float32, query [P, A, E], own keys and values [S, P, G, E]."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
        (count, heads, width), (steps, _, groups, _) = query.shape, keys.shape
        result, merged = torch.empty_like(query), lse.new_empty(count, heads)
        shape = {"G": groups, "R": heads // groups, "E": width, "B": POSITIONS_PER_PROGRAM}
        _forward_kernel[triton.cdiv(count, POSITIONS_PER_PROGRAM), heads](
            query, out, lse, keys, values, result, merged, count, steps, 1 / math.sqrt(width),
            out.stride(0), out.stride(1), lse.stride(0), lse.stride(1), **shape,
        )  # fmt: skip
        ctx.save_for_backward(out, lse, query, keys, values, result, merged)
        ctx.shape = shape
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        out, lse, query, keys, values, result, merged = ctx.saved_tensors
        grad, (count, heads, width), steps = grad.contiguous(), query.shape, len(keys)
        d_query, d_out, d_keys, d_values = (torch.empty_like(x) for x in (query, query, keys, values))
        d_lse, deltas = torch.empty_like(merged), torch.empty_like(merged)
        blocks, scale = triton.cdiv(count, POSITIONS_PER_PROGRAM), 1 / math.sqrt(width)
        _backward_queries_kernel[blocks, heads](
            query, out, lse, keys, values, result, merged, grad, d_query, d_out, d_lse, deltas, count, steps, scale,
            out.stride(0), out.stride(1), lse.stride(0), lse.stride(1), **ctx.shape,
        )  # fmt: skip
        _backward_keys_kernel[blocks, ctx.shape["G"], steps](
            query, keys, values, merged, grad, deltas, d_keys, d_values, count, scale, **ctx.shape
        )
        return d_out, d_lse, d_query, d_keys, d_values
