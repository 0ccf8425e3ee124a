"""What lies between the matrix products of a block, and of a step of the draft, as few GPU kernels, in Triton.

Decoding is bound by the bytes of weights: a kernel that moves a few kilobytes costs its launch, two microseconds or so,
hundreds of times a pass. So each of these does all that can be done before the next product. `kernels_torch` has the same
functions, which these are tested against.

Letters: M tokens, H hidden, A query heads, G key-value heads, R query heads for each, E head width (a power of two), T nodes
of a tree, P parts of the keys, K topk, D draft vocabulary, V target vocabulary, C candidates.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stages.engine.cuda_graphs import time_graph_replay
from stages.trees.draft_tree import Candidates, get_step_range

KEYS_PER_BLOCK = 128  # of a block
PROGRAMS_WANTED = 256  # about two for each multiprocessor
VOCABULARY_CHUNK = 1024  # of a vocabulary
# From Hopper on a kernel may start before the one before it has ended, and waits where it first needs what that made.
PDL_SUPPORTED = (
    torch.version.hip is None
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
    and not triton.knobs.runtime.interpret
)
LAUNCH_OPTIONS: dict[str, Any] = {"launch_pdl": True} if PDL_SUPPORTED else {}  # other backends don't know the word
USES_PDL = tl.constexpr(PDL_SUPPORTED)
PREFETCHED_LINES = tl.constexpr(
    8
)  # of 128 bytes, of each row of weights, that a product asks for before its input is there
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # comes after every key


@triton.jit
def _wait_for_inputs():
    """For all before this kernel; the next one may start meanwhile."""
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _add_rms_norm_kernel(x, more, weight, summed, out, eps, H: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr):
    _wait_for_inputs()
    m, h = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    inside = h < H
    row = tl.load(x + m * H + h, mask=inside, other=0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(more + m * H + h, mask=inside, other=0).to(tl.float32)).to(row.dtype)
        tl.store(summed + m * H + h, row, mask=inside)
    wide = row.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(row.dtype)
    scaled = normed.to(tl.float32) * tl.load(weight + h, mask=inside, other=0).to(tl.float32)
    tl.store(out + m * H + h, scaled.to(row.dtype), mask=inside)


def add_rms_norm(x: Tensor, weight: Tensor, eps: float, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + more [M, H], and that normed."""
    m, h = x.shape
    out, summed = torch.empty_like(x), x if more is None else torch.empty_like(x)
    block = triton.next_power_of_2(h)
    _add_rms_norm_kernel[(m,)](
        x,
        x if more is None else more,
        weight,
        summed,
        out,
        eps,
        h,
        block,
        more is not None,
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    return summed, out


@triton.jit
def _rotate_and_cache_kernel(
    qkv, q_weight, k_weight, cos, sin, rows, q, keys, values, eps, key_g, key_row, value_g, value_row,
    A: tl.constexpr, G: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    _wait_for_inputs()
    m, a, e = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, E)
    half: tl.constexpr = E // 2
    other = (e + half) % E
    here = qkv + (m * (A + 2 * G) + a) * E
    x = tl.load(here + e)
    row = tl.load(rows + m)
    if a >= A + G:
        tl.store(values + (a - A - G) * value_g + row * value_row + e, x)
    else:
        wide, partner = x.to(tl.float32), tl.load(here + other).to(tl.float32)
        if NORM:
            weight = q_weight if a < A else k_weight
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
            wide = (wide * scale).to(x.dtype).to(tl.float32) * tl.load(weight + e).to(tl.float32)
            partner = (partner * scale).to(x.dtype).to(tl.float32) * tl.load(weight + other).to(tl.float32)
            wide, partner = wide.to(x.dtype).to(tl.float32), partner.to(x.dtype).to(tl.float32)
        signed = tl.where(e < half, -partner, partner)
        turned = wide * tl.load(cos + m * E + e).to(tl.float32) + signed * tl.load(sin + m * E + e).to(tl.float32)
        if a < A:
            tl.store(q + (m * A + a) * E + e, turned.to(x.dtype))
        else:
            tl.store(keys + (a - A) * key_g + row * key_row + e, turned.to(x.dtype))


def rotate_and_cache(
    qkv: Tensor,  # [M, (A + 2G) * E]
    norms: tuple[Tensor, Tensor, float] | None,  # of queries and of keys [E], and their eps
    cos: Tensor,  # [M, E], halves alike
    sin: Tensor,
    keys: Tensor,  # [G, room, E], in any order of strides but the last
    values: Tensor,
    rows: Tensor,  # [M] where keys and values go
) -> Tensor:  # [M, A, E]
    """Queries and keys normed and turned; keys and values into their rows."""
    (g, _, e), m = keys.shape, len(qkv)
    a = qkv.shape[1] // e - 2 * g
    q = qkv.new_empty(m, a, e)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    _rotate_and_cache_kernel[m, a + 2 * g](
        qkv, q_norm, k_norm, cos, sin, rows, q, keys, values, eps, keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), a, g, e, norms is not None, num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return q


@triton.jit
def _attend_tree_kernel(
    q, keys, values, sees, length, parts, lse, scale, key_g, key_row, value_g, value_row, count, first, T, each_slot, blocks,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, P: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    _wait_for_inputs()
    g, part = tl.program_id(0), tl.program_id(1)
    slot, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    n = tl.load(length + slot)
    total = n + T
    each = tl.cdiv(tl.cdiv(total, P), 16) * 16
    begin = part * each
    end = tl.minimum(begin + each, total)
    row, e = block * B + tl.arange(0, B), tl.arange(0, E)  # rows of a head: R for each token
    m, inside = slot * count + row // R, row < count * R
    key_0 = keys + g.to(tl.int64) * key_g + slot.to(tl.int64) * each_slot * key_row
    value_0 = values + g.to(tl.int64) * value_g + slot.to(tl.int64) * each_slot * value_row
    at = (m * (G * R) + g * R + row % R).to(tl.int64)
    query = tl.load(q + at[:, None] * E + e[None], mask=inside[:, None], other=0)
    highest = tl.full([B], float("-inf"), tl.float32)
    total_weight, sum_ = tl.zeros([B], tl.float32), tl.zeros([B, E], tl.float32)
    least = tl.load(first + m, mask=inside, other=0)  # the first key that a token sees
    for start in range(begin, end, N):
        j = start + tl.arange(0, N)
        there = j < end
        key = tl.load(key_0 + j[None] * key_row + e[:, None], mask=there[None], other=0)  # [E, N]
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        node = j - n
        seen = tl.load(
            sees + m[:, None] * T + node[None], mask=inside[:, None] & there[None] & (node >= 0)[None], other=0
        )
        seen = ((node < 0)[None] & (j[None] >= least[:, None])) | (seen != 0)
        scores = tl.where(seen & there[None], scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        level = tl.where(peak == float("-inf"), 0.0, peak)
        before, weights = tl.exp(highest - level), tl.exp(scores - level[:, None])
        value = tl.load(value_0 + j[:, None] * value_row + e[None], mask=there[:, None], other=0)  # [N, E]
        sum_ = sum_ * before[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        total_weight = total_weight * before + tl.sum(weights, 1)
        highest = peak
    place = at * P + part
    seen_any = total_weight > 0
    share = tl.where(seen_any, total_weight, 1.0)
    tl.store(parts + place[:, None] * E + e[None], sum_ / share[:, None], mask=inside[:, None])
    tl.store(lse + place, tl.where(seen_any, highest + tl.log(share), float("-inf")), mask=inside)


@triton.jit
def _merge_key_parts_kernel(parts, lse, out, E: tl.constexpr, P: tl.constexpr):
    _wait_for_inputs()
    row, p, e = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, E)
    levels = tl.load(lse + row * P + p)
    weights = tl.exp(levels - tl.max(levels, 0))
    found = tl.load(parts + (row * P + p)[:, None] * E + e[None])
    tl.store(out + row * E + e, (tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)).to(out.dtype.element_ty))


def attend_tree(
    q: Tensor,  # [M, A, E], of B prompts N tokens each
    keys: Tensor,  # [G, room, E]: of each prompt, from row b * each on, a prefix, and behind it T nodes
    values: Tensor,
    length: Tensor,  # [B] tokens of each prefix
    sees: Tensor,  # [B, N, T] bool, the nodes that each token sees
    first: Tensor,  # [M] the first token of the prefix that each sees
    scale: float,
    each: int = 0,
) -> Tensor:  # [M, A, E]
    """One softmax over prefix and nodes. The keys are dealt to programs in parts, which are merged by their sums of exponents."""
    (m, a, e), g, (prompts, n, t) = q.shape, keys.shape[0], sees.shape
    rows = n * (a // g)
    exact = q.dtype == torch.float32  # without matrix units: small blocks, or the compiler takes minutes
    block = 16 if exact else min(32, max(16, triton.next_power_of_2(rows)))
    blocks = triton.cdiv(rows, block)
    room = each or keys.shape[1]
    parts = triton.next_power_of_2(max(4, min(room // KEYS_PER_BLOCK, PROGRAMS_WANTED // (g * blocks * prompts))))
    found = torch.empty(m * a, parts, e, dtype=torch.float32, device=q.device)
    lse = torch.empty(m * a, parts, dtype=torch.float32, device=q.device)
    _attend_tree_kernel[g, parts, blocks * prompts](
        q, keys, values, sees, length, found, lse, scale, keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), n, first, t, each, blocks, g, a // g, e, parts, block, 16 if exact else KEYS_PER_BLOCK,
        "ieee" if exact else "tf32", num_warps=4, num_stages=2, **LAUNCH_OPTIONS,
    )  # fmt: skip
    out = torch.empty_like(q)
    _merge_key_parts_kernel[(m * a,)](found, lse, out, e, parts, num_warps=1, **LAUNCH_OPTIONS)
    return out


@triton.jit
def _silu_and_mul_kernel(x, out, width, B: tl.constexpr):
    _wait_for_inputs()
    m, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    inside = i < width
    gate = tl.load(x + m * 2 * width + i, mask=inside, other=0)
    wide = gate.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    up = tl.load(x + m * 2 * width + width + i, mask=inside, other=0).to(tl.float32)
    tl.store(out + m * width + i, (opened * up).to(gate.dtype), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [M, 2I], gates and then ups -> silu(gate) * up [M, I]."""
    m, width = len(x), x.shape[1] // 2
    out = x.new_empty(m, width)
    _silu_and_mul_kernel[m, triton.cdiv(width, 1024)](x, out, width, 1024, num_warps=4, **LAUNCH_OPTIONS)
    return out


@triton.jit
def _mix_inputs_kernel(
    embedding, tokens, states, slots, first, second, out, picked, eps, H: tl.constexpr, B: tl.constexpr
):
    _wait_for_inputs()
    m, h = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    inside, of_state = h < H, tl.program_id(1)
    if of_state == 1:
        row = tl.load(states + tl.load(slots + m) * H + h, mask=inside, other=0)
        tl.store(picked + m * H + h, row, mask=inside)
        weight = tl.load(second + h, mask=inside, other=0)
    else:
        row = tl.load(embedding + tl.load(tokens + m) * H + h, mask=inside, other=0)
        weight = tl.load(first + h, mask=inside, other=0)
    wide = row.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(row.dtype).to(tl.float32)
    tl.store(out + (2 * m + of_state) * H + h, (normed * weight.to(tl.float32)).to(row.dtype), mask=inside)


def mix_inputs(
    embedding: Tensor,  # [V, H]
    tokens: Tensor,  # [M]
    states: Tensor,  # [*, H]
    slots: Tensor,  # [M] which of the states is each token's
    weights: tuple[Tensor, Tensor],  # [H] norms of embeddings and of states
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What the draft's projections read [M, 2H], and the states [M, H] themselves."""
    m, h = len(tokens), states.shape[1]
    out, picked = states.new_empty(m, 2 * h), states.new_empty(m, h)
    _mix_inputs_kernel[m, 2](
        embedding,
        tokens,
        states,
        slots,
        *weights,
        out,
        picked,
        eps,
        h,
        triton.next_power_of_2(h),
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    return out, picked


@triton.jit
def _make_order_keys(scores, least, places):
    """Unique keys: greater where the score is greater, and of equal scores where the place is lower; places <= least."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (least - places).to(tl.int64)


@triton.jit
def _select_chunk_topk_kernel(logits, keys, peaks, sums, D, K: tl.constexpr, B: tl.constexpr):
    _wait_for_inputs()
    m, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    d = chunk * B + tl.arange(0, B)
    inside = d < D
    score = tl.load(logits + m * D + d, mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.max(score, 0)
    tl.store(peaks + m * chunks + chunk, peak)
    tl.store(sums + m * chunks + chunk, tl.sum(tl.where(inside, tl.exp(score - peak), 0.0), 0))
    key = tl.where(inside, _make_order_keys(score, D - 1, d), LOWEST_KEY)
    for k in range(K):
        found = tl.max(key, 0)
        tl.store(keys + (m * chunks + chunk) * K + k, found)
        key = tl.where(key == found, LOWEST_KEY, key)


@triton.jit
def _select_topk_kernel(
    keys, peaks, sums, chances, ids, D, chunks,
    K: tl.constexpr, B: tl.constexpr, C: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    _wait_for_inputs()
    m, i, c = tl.program_id(0).to(tl.int64), tl.arange(0, B), tl.arange(0, C)
    level = tl.load(peaks + m * chunks + c, mask=c < chunks, other=float("-inf"))
    peak = tl.max(level, 0)
    weights = tl.load(sums + m * chunks + c, mask=c < chunks, other=0.0) * tl.exp(level - peak)
    total = tl.sum(weights, 0)
    key = tl.load(keys + m * chunks * K + i, mask=i < chunks * K, other=LOWEST_KEY)
    for k in range(K):
        found = tl.max(key, 0)
        bits = (found >> 32).to(tl.int32)
        score = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True) - peak
        chance = score - tl.log(total) if LOG else tl.exp(score) / total
        tl.store(chances + m * K + k, chance)
        tl.store(ids + m * K + k, D - 1 - (found & 0xFFFFFFFF))
        key = tl.where(key == found, LOWEST_KEY, key)


def select_topk(logits: Tensor, topk: int, semantics: str) -> tuple[Tensor, Tensor]:
    """logits [M, D] -> what each of the K best tokens adds to a path's score [M, K] float32, and those draft ids [M, K].

    Ordered by logits, which is by chances but where two chances are one number in float32.
    """
    m, size = logits.shape
    chunks = triton.cdiv(size, VOCABULARY_CHUNK)
    keys = torch.empty(m, chunks, topk, dtype=torch.int64, device=logits.device)
    peaks, sums = torch.empty(2, m, chunks, dtype=torch.float32, device=logits.device)
    _select_chunk_topk_kernel[m, chunks](
        logits, keys, peaks, sums, size, topk, VOCABULARY_CHUNK, num_warps=4, **LAUNCH_OPTIONS
    )
    chances = torch.empty(m, topk, dtype=torch.float32, device=logits.device)
    ids = torch.empty(m, topk, dtype=torch.int64, device=logits.device)
    _select_topk_kernel[(m,)](
        keys, peaks, sums, chances, ids, size, chunks, topk, triton.next_power_of_2(chunks * topk),
        triton.next_power_of_2(chunks), semantics == "eagle", num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return chances, ids


@triton.jit
def _extend_beam_kernel(
    beam, numbers, sees, chances, ids, d2t, scores, tokens, parents, new_beam, new_numbers, new_sees, new_tokens, slots,
    first, T, C, own, K: tl.constexpr, W: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    _wait_for_inputs()
    b, i, t = tl.program_id(0), tl.arange(0, W), tl.arange(0, N)
    at, nodes, pool = b * K, b * K * T, b.to(tl.int64) * C + first  # of this prompt's beam, its table, its candidates
    inside = i < K * K
    before = tl.load(beam + at + i // K, mask=inside, other=0.0)
    chance = tl.load(chances + at * K + i, mask=inside, other=0.0)
    score = before + chance if ADD else before * chance
    kind = tl.load(ids + at * K + i, mask=inside, other=0)
    token = kind + tl.load(d2t + kind, mask=inside, other=0)
    tl.store(scores + pool + i, score, mask=inside)
    tl.store(tokens + pool + i, token, mask=inside)
    tl.store(parents + pool + i, tl.load(numbers + at + i // K, mask=inside, other=0), mask=inside)
    key = tl.where(inside, _make_order_keys(score, W - 1, i), LOWEST_KEY)
    for k in range(K):
        found = tl.max(key, 0)
        place = W - 1 - (found & 0xFFFFFFFF)
        chosen = i == place
        tl.store(new_beam + at + k, tl.sum(tl.where(chosen, score, 0.0), 0))
        tl.store(new_tokens + at + k, tl.sum(tl.where(chosen, token, 0), 0))
        tl.store(new_numbers + at + k, first + place)
        tl.store(slots + at + k, at + place // K)
        row = tl.load(sees + nodes + place // K * T + t, mask=t < T, other=0)
        tl.store(new_sees + nodes + k * T + t, tl.where(t == own + k, 1, row), mask=t < T)
        key = tl.where(chosen, LOWEST_KEY, key)


def extend_beam(
    step: int,  # whose nodes are the beams, from 1 on
    beam: Tensor,  # [B, K] scores of each prompt's, float32
    numbers: Tensor,  # [B, K] of the beam's nodes among the candidates
    sees: Tensor,  # [B, K, T] bool: which nodes of all steps each of the beam's sees
    chances: Tensor,  # [B * K, K] float32, of their successors
    ids: Tensor,  # [B * K, K] draft ids
    d2t: Tensor,  # [D]
    found: Candidates,  # [B, C] each: where the candidates go
    semantics: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The successors are candidates, the best K of them the next beam: its scores, numbers and sees, its tokens [B * K], and
    the places [B * K] that they grew from."""
    prompts, topk, nodes = sees.shape
    new, new_sees = torch.empty_like(beam), torch.empty_like(sees)
    new_numbers, new_tokens, slots = torch.empty(3, prompts, topk, dtype=torch.int64, device=beam.device)
    _extend_beam_kernel[(prompts,)](
        beam, numbers, sees.view(torch.uint8), chances, ids, d2t, found.scores, found.tokens, found.parents, new,
        new_numbers, new_sees.view(torch.uint8), new_tokens, slots, get_step_range(step, topk)[0], nodes, found.scores.shape[1],
        step * topk, topk, triton.next_power_of_2(topk * topk), triton.next_power_of_2(nodes), semantics == "eagle",
        num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return new, new_numbers, new_sees, new_tokens.flatten(), slots.flatten()


@triton.jit
def _prefetch_lines(lines):
    """To be brought near, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])  # or each number of rows would be compiled for
def _stream_matmul_kernel(
    x, w, y, M, N, K, B: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    n, m, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, B), tl.arange(0, DEPTH)
    if USES_PDL:  # the weights wait for nobody
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


def stream_matmul(x: Tensor, w: Tensor, gated: bool, tile: int, depth: int, warps: int, stages: int) -> Tensor:
    """`matmul`, or `gated_matmul`, for at most 64 tokens: a program streams `tile` rows of weights past all of them."""
    (m, k), n = x.shape, len(w) // (2 if gated else 1)
    y = x.new_empty(m, n)
    rows = max(16, triton.next_power_of_2(m))
    _stream_matmul_kernel[(triton.cdiv(n, tile),)](
        x, w, y, m, n, k, rows, tile, depth, gated, num_warps=warps, num_stages=stages, **LAUNCH_OPTIONS
    )
    return y


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
MAX_STREAMED_TOKENS = 64  # tokens
COLD_WEIGHT_BYTES = 128 << 20  # bytes of weights, twice what is kept near
fastest_tilings: dict[tuple[Any, ...], MatmulTiling | None] = {}  # a tiling, or None for the library


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] -> x @ w.T + bias [M, N], by whatever is the fastest for this shape."""
    tiling = _pick_tiling(x, w, False) if bias is None else None
    return F.linear(x, w, bias) if tiling is None else stream_matmul(x, w, False, *tiling)


def gated_matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [M, H], w [2I, H] of gates and then ups -> silu(gate) * up [M, I]."""
    tiling = _pick_tiling(x, w, True)
    return silu_and_mul(F.linear(x, w)) if tiling is None else stream_matmul(x, w, True, *tiling)


def _pick_tiling(x: Tensor, w: Tensor, gated: bool) -> MatmulTiling | None:
    """Timed at the first call of a shape, so not while a pass is recorded. None: the library's product is the fastest."""
    if x.element_size() != 2 or len(x) > MAX_STREAMED_TOKENS:
        return None
    key = triton.next_power_of_2(max(16, len(x))), x.dtype, x.device, w.shape, gated
    if key not in fastest_tilings:
        library = (lambda w: silu_and_mul(F.linear(x, w))) if gated else lambda w: F.linear(x, w)
        times: dict[MatmulTiling | None, float] = {None: _time_matmul(library, x, w)}
        for tiling in MATMUL_TILINGS:
            times[tiling] = _time_matmul(lambda w: stream_matmul(x, w, gated, *tiling), x, w)  # noqa: B023 - called at once
        fastest_tilings[key] = min(times, key=times.__getitem__)
    return fastest_tilings[key]


def _time_matmul(work: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> float:
    """Milliseconds, recorded, between other kernels and over weights that are not near; what doesn't fit takes for ever."""
    weights = [w, *(w.clone() for _ in range(COLD_WEIGHT_BYTES // w.nbytes))]
    one = x.new_ones(x.shape[1])

    def chain() -> None:
        for weight in weights:
            add_rms_norm(x, one, 1e-6)
            work(weight)

    try:
        return time_graph_replay(chain, x.device) / len(weights)
    except triton.runtime.errors.OutOfResources:
        return math.inf
