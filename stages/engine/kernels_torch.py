"""What lies between the matrix products of a block, and of a step of the draft, in torch: what `kernels_gpu` is, slowly.

Both modules have the same functions. These say what is meant, and run where there is no GPU.

Letters: M tokens, H hidden, A query heads, G key-value heads, E head width, I the MLP's width, T nodes of a tree, K topk,
D draft vocabulary, V target vocabulary, C candidates.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from stages.trees import draft_tree as trees


def add_rms_norm(x: Tensor, weight: Tensor, eps: float, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x + more [M, H], and that normed."""
    summed = x if more is None else x + more
    return summed, F.rms_norm(summed, weight.shape, weight, eps)


def rotate_and_cache(
    qkv: Tensor, norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    rows: Tensor,
) -> Tensor:  # fmt: skip
    """qkv [M, (A + 2G) * E], cos and sin [M, E] -> turned queries [M, A, E]; keys and values into their rows."""
    groups, _, width = keys.shape
    heads = qkv.unflatten(1, (-1, width))  # [M, A + 2G, E]
    q, k, v = heads.split([heads.shape[1] - 2 * groups, groups, groups], dim=1)
    if norms:
        q_norm, k_norm, eps = norms
        q, k = F.rms_norm(q, (width,), q_norm, eps), F.rms_norm(k, (width,), k_norm, eps)
    turned = torch.cat([q, k], dim=1)
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]
    keys.index_copy_(1, rows, turned[:, -groups:].transpose(0, 1))
    values.index_copy_(1, rows, v.transpose(0, 1))
    return turned[:, :-groups]


def attend_tree(
    q: Tensor, keys: Tensor, values: Tensor, length: Tensor, sees: Tensor, first: Tensor, scale: float, each: int = 0
) -> Tensor:
    """q [M, A, E] of B prompts, keys and values [G, room, E], prompt b's from row b * each on, length [B] of the prefixes,
    sees [B, N, T] of the nodes behind them -> [M, A, E].

    Of its prefix a token sees what stands at first [M] or later.
    """
    found, count = [], sees.shape[1]
    for slot, (tokens, least) in enumerate(zip(q.split(count), first.split(count), strict=True)):
        rows = slice(slot * each, (slot + 1) * each or None)
        place = torch.arange(keys[:, rows].shape[1], device=q.device)
        seen = (place < length[slot]) & (place >= least[:, None])  # [N, room]
        seen.index_copy_(1, length[slot] + place[: sees.shape[2]], sees[slot])
        out = F.scaled_dot_product_attention(
            tokens.transpose(0, 1)[None], keys[None, :, rows], values[None, :, rows], attn_mask=seen, scale=scale,
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
    slots: Tensor,  # [M] which of the states is each token's
    weights: tuple[Tensor, Tensor],  # [H] norms of embeddings and of states
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What the draft's projections read [M, 2H], and the states [M, H] themselves."""
    picked, width = states[slots], (states.shape[1],)
    parts = F.rms_norm(embedding[tokens], width, weights[0], eps), F.rms_norm(picked, width, weights[1], eps)
    return torch.cat(parts, dim=-1), picked


def select_topk(logits: Tensor, topk: int, semantics: str) -> tuple[Tensor, Tensor]:
    """logits [M, D] -> what each of the K best tokens adds to a path's score [M, K] float32, and those draft ids [M, K]."""
    return trees.select_topk(trees.TREE_SCORINGS[semantics].score_logits(logits.float()), topk)


def extend_beam(
    step: int,  # whose nodes are the beams, from 1 on
    beam: Tensor,  # [B, K] scores of each prompt's, float32
    numbers: Tensor,  # [B, K] of the beam's nodes among the candidates
    sees: Tensor,  # [B, K, T] bool: which nodes of all steps each of the beam's sees
    chances: Tensor,  # [B * K, K] float32, of their successors
    ids: Tensor,  # [B * K, K] draft ids
    d2t: Tensor,  # [D]
    found: trees.Candidates,  # [B, C] each: where the candidates go
    semantics: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The successors are candidates, the best K of them the next beam: its scores, numbers and sees, its tokens [B * K], and
    the places [B * K] that they grew from."""
    prompts, topk, nodes = sees.shape
    kinds = ids.view(prompts, -1)
    scores, new, places = trees.extend_beam(
        beam, chances.view(prompts, topk, topk), trees.TREE_SCORINGS[semantics].combine_scores
    )
    first, end = trees.get_step_range(step, topk)
    found.scores[:, first:end], found.tokens[:, first:end] = scores, kinds + d2t[kinds]
    found.parents[:, first:end] = numbers.repeat_interleave(topk, dim=1)
    slots = places // topk  # [B, K]
    seen = mark_own_nodes_seen(sees.gather(1, slots[..., None].expand(-1, -1, nodes)), step)
    starts = topk * torch.arange(prompts, device=beam.device)[:, None]
    tokens = found.tokens[:, first:end].gather(1, places)
    return new, first + places, seen, tokens.flatten(), (starts + slots).flatten()


def mark_own_nodes_seen(sees: Tensor, step: int) -> Tensor:
    """sees [B, K, T] of the beams' parents -> of the beams themselves, the nodes of step + 1."""
    _, topk, nodes = sees.shape
    columns = step * topk + torch.arange(topk, device=sees.device)
    return sees.scatter(2, columns[None, :, None].expand(len(sees), -1, 1), True) if step * topk < nodes else sees
