"""The operations between the matrix products of a block, and of a step of the draft, in torch.

The reference of `kernels_triton`, with the same functions; also the implementation where there is no GPU.

Letters: M tokens, H hidden, A query heads, G key-value heads, E head width, I the MLP's width, T nodes of a tree, K topk,
D draft vocabulary, V target vocabulary, C candidates.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.trees import draft_tree as trees


def add_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x + residual [M, H], and its RMS norm."""
    summed = x if residual is None else x + residual
    return summed, F.rms_norm(summed, weight.shape, weight, eps)


def rotate_and_cache(
    qkv: Tensor, norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    rows: Tensor,
) -> Tensor:  # fmt: skip
    """qkv [M, (A + 2G) * E], cos and sin [M, E] -> rotated queries [M, A, E]; write keys and values to `rows`."""
    groups, _, width = keys.shape
    heads = qkv.unflatten(1, (-1, width))  # [M, A + 2G, E]
    q, k, v = heads.split([heads.shape[1] - 2 * groups, groups, groups], dim=1)
    if norms:
        q_norm, k_norm, eps = norms
        q, k = F.rms_norm(q, (width,), q_norm, eps), F.rms_norm(k, (width,), k_norm, eps)
    rotated = torch.cat([q, k], dim=1)
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    keys.index_copy_(1, rows, rotated[:, -groups:].transpose(0, 1))
    values.index_copy_(1, rows, v.transpose(0, 1))
    return rotated[:, :-groups]


def attend_tree(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    mask: Tensor,
    first: Tensor,
    scale: float,
    slot_capacity: int = 0,
) -> Tensor:
    """q [M, A, E] of B prompts, keys and values [G, capacity, E], prompt b from row b * slot_capacity on, length [B] of the
    prefixes, mask [B, N, T] of the nodes behind them -> [M, A, E].

    A token attends to its prefix from row first [M] on.
    """
    found, count = [], mask.shape[1]
    for slot, (queries, start) in enumerate(zip(q.split(count), first.split(count), strict=True)):
        rows = slice(slot * slot_capacity, (slot + 1) * slot_capacity or None)
        index = torch.arange(keys[:, rows].shape[1], device=q.device)
        visible = (index < length[slot]) & (index >= start[:, None])  # [N, capacity]
        visible.index_copy_(1, length[slot] + index[: mask.shape[2]], mask[slot])
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys[None, :, rows], values[None, :, rows], attn_mask=visible, scale=scale,
            enable_gqa=True,
        )  # fmt: skip
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [M, 2I], gates and then ups -> silu(gate) * up [M, I]."""
    gates, ups = x.chunk(2, dim=-1)
    return F.silu(gates) * ups


def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] -> x @ w.T + bias [M, N]."""
    return F.linear(x, w, bias)


def gated_matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [M, H], w [2I, H] of gates and then ups -> silu(gate) * up [M, I]."""
    return silu_and_mul(matmul(x, w))


def mix_inputs(
    embedding: Tensor,  # [V, H]
    tokens: Tensor,  # [M]
    states: Tensor,  # [*, H]
    parents: Tensor,  # [M] index of each token's state
    weights: tuple[Tensor, Tensor],  # [H] norms of embeddings and of states
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the input of the draft's projections [M, 2H], and the selected states [M, H]."""
    picked, width = states[parents], (states.shape[1],)
    parts = F.rms_norm(embedding[tokens], width, weights[0], eps), F.rms_norm(picked, width, weights[1], eps)
    return torch.cat(parts, dim=-1), picked


def select_topk(logits: Tensor, topk: int, tree_scoring: str) -> tuple[Tensor, Tensor]:
    """logits [M, D] -> the factor or term of the K best tokens in a path's score [M, K] float32, and their draft ids [M, K]."""
    return trees.select_topk(trees.TREE_SCORINGS[tree_scoring].score_logits(logits.float()), topk)


def extend_beam(
    step: int,  # of the beams' nodes, from 1 on
    beam: Tensor,  # [B, K] float32 scores
    numbers: Tensor,  # [B, K] candidate numbers of the beams' nodes
    mask: Tensor,  # [B, K, T] bool: the nodes of all steps that each beam attends to
    token_scores: Tensor,  # [B * K, K] float32, of their successors
    ids: Tensor,  # [B * K, K] draft ids
    d2t: Tensor,  # [D]
    found: trees.Candidates,  # [B, C] each: receives the candidates
    tree_scoring: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Add the successors to the candidates -> the next beam, the best K: scores, candidate numbers, mask, tokens [B * K], and
    parents [B * K], the index of the beam that each continues."""
    prompts, topk, nodes = mask.shape
    draft_ids = ids.view(prompts, -1)
    scores, new, indices = trees.extend_beam(
        beam, token_scores.view(prompts, topk, topk), trees.TREE_SCORINGS[tree_scoring].combine_scores
    )
    first, end = trees.get_step_range(step, topk)
    found.scores[:, first:end], found.tokens[:, first:end] = scores, draft_ids + d2t[draft_ids]
    found.parents[:, first:end] = numbers.repeat_interleave(topk, dim=1)
    parents = indices // topk  # [B, K]
    new_mask = extend_tree_mask(mask.gather(1, parents[..., None].expand(-1, -1, nodes)), step)
    starts = topk * torch.arange(prompts, device=beam.device)[:, None]
    tokens = found.tokens[:, first:end].gather(1, indices)
    return new, first + indices, new_mask, tokens.flatten(), (starts + parents).flatten()


def extend_tree_mask(mask: Tensor, step: int) -> Tensor:
    """mask [B, K, T] of the beams' parents -> of the beams themselves, the nodes of step + 1."""
    _, topk, nodes = mask.shape
    columns = step * topk + torch.arange(topk, device=mask.device)
    return mask.scatter(2, columns[None, :, None].expand(len(mask), -1, 1), True) if step * topk < nodes else mask
