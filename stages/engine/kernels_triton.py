"""The operations between the matrix products of a block, and of a step of the draft, as few Triton kernels.

Decoding is bound by reading weights. A kernel that moves a few kilobytes costs its launch, about two microseconds, hundreds
of times a pass; so each kernel does everything up to the next product. `kernels_torch` has the same functions and is the
reference of the tests.

Letters: M tokens, H hidden, A query heads, G key-value heads, R query heads for each, E head width (a power of two), T nodes
of a tree, P parts of the keys, K topk, D draft vocabulary, V target vocabulary, C candidates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stages.engine import padded_matmul
from stages.engine.matmul_triton import LAUNCH_OPTIONS, pick_tiling, stream_matmul, wait_for_inputs
from stages.trees.draft_tree import Candidates, get_step_range

KEYS_PER_BLOCK = 128
PROGRAMS_WANTED = 256  # about two for each multiprocessor
VOCABULARY_CHUNK = 1024
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # less than every order key


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, summed, out, eps, H: tl.constexpr, B: tl.constexpr, ADD: tl.constexpr):
    wait_for_inputs()
    m, h = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    inside = h < H
    row = tl.load(x + m * H + h, mask=inside, other=0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(residual + m * H + h, mask=inside, other=0).to(tl.float32)).to(row.dtype)
        tl.store(summed + m * H + h, row, mask=inside)
    wide = row.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(row.dtype)
    scaled = normed.to(tl.float32) * tl.load(weight + h, mask=inside, other=0).to(tl.float32)
    tl.store(out + m * H + h, scaled.to(row.dtype), mask=inside)


def add_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x + residual [M, H], and its RMS norm."""
    m, h = x.shape
    out, summed = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(h)
    _add_rms_norm_kernel[(m,)](
        x, x if residual is None else residual, weight, summed, out, eps, h, block, residual is not None, num_warps=8,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return summed, out


@triton.jit
def _rotate_and_cache_kernel(
    qkv, q_weight, k_weight, cos, sin, rows, q, keys, values, eps, key_g, key_row, value_g, value_row,
    A: tl.constexpr, G: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
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
    cos: Tensor,  # [M, E], both halves equal
    sin: Tensor,
    keys: Tensor,  # [G, capacity, E], contiguous in the last dimension
    values: Tensor,
    rows: Tensor,  # [M] cache rows for keys and values
) -> Tensor:  # [M, A, E]
    """Return normed and rotated queries; write keys, normed and rotated, and values to `rows`."""
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
    q, keys, values, tree_mask, length, parts, lse, scale, key_g, key_row, value_g, value_row, count, first, T, each_slot, blocks,
    G: tl.constexpr, R: tl.constexpr, E: tl.constexpr, P: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    g, part = tl.program_id(0), tl.program_id(1)
    slot, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    n = tl.load(length + slot)
    total = n + T
    keys_per_part = tl.cdiv(tl.cdiv(total, P), 16) * 16
    begin = part * keys_per_part
    end = tl.minimum(begin + keys_per_part, total)
    row, e = block * B + tl.arange(0, B), tl.arange(0, E)  # rows of a head: R for each token
    m, inside = slot * count + row // R, row < count * R
    key_0 = keys + g.to(tl.int64) * key_g + slot.to(tl.int64) * each_slot * key_row
    value_0 = values + g.to(tl.int64) * value_g + slot.to(tl.int64) * each_slot * value_row
    at = (m * (G * R) + g * R + row % R).to(tl.int64)
    query = tl.load(q + at[:, None] * E + e[None], mask=inside[:, None], other=0)
    highest = tl.full([B], float("-inf"), tl.float32)
    total_weight, sum_ = tl.zeros([B], tl.float32), tl.zeros([B, E], tl.float32)
    least = tl.load(first + m, mask=inside, other=0)  # the first key that a token attends to
    for start in range(begin, end, N):
        j = start + tl.arange(0, N)
        there = j < end
        key = tl.load(key_0 + j[None] * key_row + e[:, None], mask=there[None], other=0)  # [E, N]
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        node = j - n
        seen = tl.load(
            tree_mask + m[:, None] * T + node[None], mask=inside[:, None] & there[None] & (node >= 0)[None], other=0
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
    offset = at * P + part
    seen_any = total_weight > 0
    share = tl.where(seen_any, total_weight, 1.0)
    tl.store(parts + offset[:, None] * E + e[None], sum_ / share[:, None], mask=inside[:, None])
    tl.store(lse + offset, tl.where(seen_any, highest + tl.log(share), float("-inf")), mask=inside)


@triton.jit
def _merge_key_parts_kernel(parts, lse, out, E: tl.constexpr, P: tl.constexpr):
    wait_for_inputs()
    row, p, e = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, E)
    levels = tl.load(lse + row * P + p)
    weights = tl.exp(levels - tl.max(levels, 0))
    found = tl.load(parts + (row * P + p)[:, None] * E + e[None])
    tl.store(out + row * E + e, (tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)).to(out.dtype.element_ty))


def attend_tree(
    q: Tensor,  # [M, A, E], of B prompts N tokens each
    keys: Tensor,  # [G, capacity, E]: of prompt b, from row b * slot_capacity on, a prefix and behind it T nodes
    values: Tensor,
    length: Tensor,  # [B] tokens of each prefix
    mask: Tensor,  # [B, N, T] bool: the nodes that each token attends to
    first: Tensor,  # [M] the first row of the prefix that each attends to
    scale: float,
    slot_capacity: int = 0,
) -> Tensor:  # [M, A, E]
    """Attend to prefix and nodes with one softmax; programs take parts of the keys, merged by their log-sum-exp."""
    (m, a, e), g, (prompts, n, t) = q.shape, keys.shape[0], mask.shape
    rows = n * (a // g)
    exact = q.dtype == torch.float32  # no matrix units: small blocks, or compiling takes minutes
    block = 16 if exact else min(32, max(16, triton.next_power_of_2(rows)))
    blocks = triton.cdiv(rows, block)
    capacity = slot_capacity or keys.shape[1]
    parts = triton.next_power_of_2(max(4, min(capacity // KEYS_PER_BLOCK, PROGRAMS_WANTED // (g * blocks * prompts))))
    found = torch.empty(m * a, parts, e, dtype=torch.float32, device=q.device)
    lse = torch.empty(m * a, parts, dtype=torch.float32, device=q.device)
    _attend_tree_kernel[g, parts, blocks * prompts](
        q, keys, values, mask, length, found, lse, scale, keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), n, first, t, slot_capacity, blocks, g, a // g, e, parts, block, 16 if exact else KEYS_PER_BLOCK,
        "ieee" if exact else "tf32", num_warps=4, num_stages=2, **LAUNCH_OPTIONS,
    )  # fmt: skip
    out = torch.empty_like(q)
    _merge_key_parts_kernel[(m * a,)](found, lse, out, e, parts, num_warps=1, **LAUNCH_OPTIONS)
    return out


@triton.jit
def _silu_and_mul_kernel(x, out, width, B: tl.constexpr):
    wait_for_inputs()
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
    wait_for_inputs()
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
    parents: Tensor,  # [M] index of each token's state
    weights: tuple[Tensor, Tensor],  # [H] norms of embeddings and of states
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the input of the draft's projections [M, 2H], and the selected states [M, H]."""
    m, h = len(tokens), states.shape[1]
    out, picked = states.new_empty(m, 2 * h), states.new_empty(m, h)
    _mix_inputs_kernel[m, 2](
        embedding, tokens, states, parents, *weights, out, picked, eps, h, triton.next_power_of_2(h), num_warps=8,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out, picked


@triton.jit
def _make_order_keys(scores, least, indices):
    """Return unique keys, greater for greater scores, and among equal scores for lower indices; indices <= least."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (least - indices).to(tl.int64)


@triton.jit
def _select_chunk_topk_kernel(logits, keys, peaks, sums, D, K: tl.constexpr, B: tl.constexpr):
    wait_for_inputs()
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
    keys, peaks, sums, probabilities, ids, D, chunks,
    K: tl.constexpr, B: tl.constexpr, C: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    m, i, c = tl.program_id(0).to(tl.int64), tl.arange(0, B), tl.arange(0, C)
    level = tl.load(peaks + m * chunks + c, mask=c < chunks, other=float("-inf"))
    peak = tl.max(level, 0)
    weights = tl.load(sums + m * chunks + c, mask=c < chunks, other=0.0) * tl.exp(level - peak)
    # A chunk without a finite logit has the sum NaN: a candidate selector leaves few finite ones.
    total = tl.sum(tl.where(level == float("-inf"), 0.0, weights), 0)
    key = tl.load(keys + m * chunks * K + i, mask=i < chunks * K, other=LOWEST_KEY)
    for k in range(K):
        found = tl.max(key, 0)
        bits = (found >> 32).to(tl.int32)
        score = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True) - peak
        probability = score - tl.log(total) if LOG else tl.exp(score) / total
        tl.store(probabilities + m * K + k, probability)
        tl.store(ids + m * K + k, D - 1 - (found & 0xFFFFFFFF))
        key = tl.where(key == found, LOWEST_KEY, key)


def select_topk(logits: Tensor, topk: int, tree_scoring: str) -> tuple[Tensor, Tensor]:
    """logits [M, D] -> the factor or term of the K best tokens in a path's score [M, K] float32, and their draft ids [M, K].

    Ordered by logits: by probabilities, except where two probabilities are equal in float32.
    """
    m, size = logits.shape
    chunks = triton.cdiv(size, VOCABULARY_CHUNK)
    keys = torch.empty(m, chunks, topk, dtype=torch.int64, device=logits.device)
    peaks, sums = torch.empty(2, m, chunks, dtype=torch.float32, device=logits.device)
    _select_chunk_topk_kernel[m, chunks](
        logits, keys, peaks, sums, size, topk, VOCABULARY_CHUNK, num_warps=4, **LAUNCH_OPTIONS
    )
    probabilities = torch.empty(m, topk, dtype=torch.float32, device=logits.device)
    ids = torch.empty(m, topk, dtype=torch.int64, device=logits.device)
    _select_topk_kernel[(m,)](
        keys, peaks, sums, probabilities, ids, size, chunks, topk, triton.next_power_of_2(chunks * topk),
        triton.next_power_of_2(chunks), tree_scoring == "eagle", num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return probabilities, ids


@triton.jit
def _extend_beam_kernel(
    beam, numbers, tree_mask, probabilities, ids, d2t, scores, tokens, parents, new_beam, new_numbers, new_tree_mask, new_tokens,
    slots,
    first, T, C, own, K: tl.constexpr, W: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    wait_for_inputs()
    b, i, t = tl.program_id(0), tl.arange(0, W), tl.arange(0, N)
    at, nodes, pool = b * K, b * K * T, b.to(tl.int64) * C + first  # of this prompt's beam, its table, its candidates
    inside = i < K * K
    before = tl.load(beam + at + i // K, mask=inside, other=0.0)
    probability = tl.load(probabilities + at * K + i, mask=inside, other=0.0)
    score = before + probability if ADD else before * probability
    kind = tl.load(ids + at * K + i, mask=inside, other=0)
    token = kind + tl.load(d2t + kind, mask=inside, other=0)
    tl.store(scores + pool + i, score, mask=inside)
    tl.store(tokens + pool + i, token, mask=inside)
    tl.store(parents + pool + i, tl.load(numbers + at + i // K, mask=inside, other=0), mask=inside)
    key = tl.where(inside, _make_order_keys(score, W - 1, i), LOWEST_KEY)
    for k in range(K):
        found = tl.max(key, 0)
        index = W - 1 - (found & 0xFFFFFFFF)
        chosen = i == index
        tl.store(new_beam + at + k, tl.sum(tl.where(chosen, score, 0.0), 0))
        tl.store(new_tokens + at + k, tl.sum(tl.where(chosen, token, 0), 0))
        tl.store(new_numbers + at + k, first + index)
        tl.store(slots + at + k, at + index // K)
        row = tl.load(tree_mask + nodes + index // K * T + t, mask=t < T, other=0)
        tl.store(new_tree_mask + nodes + k * T + t, tl.where(t == own + k, 1, row), mask=t < T)
        key = tl.where(chosen, LOWEST_KEY, key)


def extend_beam(
    step: int,  # of the beams' nodes, from 1 on
    beam: Tensor,  # [B, K] float32 scores
    numbers: Tensor,  # [B, K] candidate numbers of the beams' nodes
    mask: Tensor,  # [B, K, T] bool: the nodes of all steps that each beam attends to
    token_scores: Tensor,  # [B * K, K] float32, of their successors
    ids: Tensor,  # [B * K, K] draft ids
    d2t: Tensor,  # [D]
    found: Candidates,  # [B, C] each: receives the candidates
    tree_scoring: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Add the successors to the candidates -> the next beam, the best K: scores, candidate numbers, mask, tokens [B * K], and
    parents [B * K], the index of the beam that each continues."""
    prompts, topk, nodes = mask.shape
    new, new_mask = torch.empty_like(beam), torch.empty_like(mask)
    new_numbers, new_tokens, parents = torch.empty(3, prompts, topk, dtype=torch.int64, device=beam.device)
    _extend_beam_kernel[(prompts,)](
        beam, numbers, mask.view(torch.uint8), token_scores, ids, d2t, found.scores, found.tokens, found.parents, new,
        new_numbers, new_mask.view(torch.uint8), new_tokens, parents, get_step_range(step, topk)[0], nodes, found.scores.shape[1],
        step * topk, topk, triton.next_power_of_2(topk * topk), triton.next_power_of_2(nodes), tree_scoring == "eagle",
        num_warps=1, **LAUNCH_OPTIONS,
    )  # fmt: skip
    return new, new_numbers, new_mask, new_tokens.flatten(), parents.flatten()


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] -> x @ w.T + bias [M, N], by the fastest implementation for this shape."""
    tiling = pick_tiling(x, w, False, _run_cublas, add_rms_norm) if bias is None else None
    return padded_matmul.linear(x, w, bias) if tiling is None else stream_matmul(x, w, False, *tiling)


def gated_matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [M, H], w [2I, H] of gates and then ups -> silu(gate) * up [M, I]."""
    tiling = pick_tiling(x, w, True, _run_cublas, add_rms_norm)
    return _run_cublas(x, w, True) if tiling is None else stream_matmul(x, w, True, *tiling)


def _run_cublas(x: Tensor, w: Tensor, gated: bool) -> Tensor:
    product = padded_matmul.linear(x, w)
    return silu_and_mul(product) if gated else product
