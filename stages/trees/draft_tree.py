"""Draft trees: candidates and the selection of nodes. Pure functions on small tensors.

Scoring `sglang` (SGLang 0.5.17 to 0.5.23, `select_top_k_tokens` and `organize_draft_results`): a node's score is the product
of the draft's probabilities on the path from the root to it, in float32. Step 1 records k candidates; each later step expands
the beam of k nodes by k tokens each, records all k*k products, and keeps the best k of them as the next beam. The tree is the
root and the best num_draft_tokens - 1 candidates over all steps:

    topk 2, three steps:     step 1        step 2            step 3          candidates are numbered in this order:
                                a     ->  aa  ab  ba  bb  -> ...             0 1 | 2 3 4 5 | 6 7 8 9
                                b         (beam: best 2)                     k + (num_steps - 1) * k**2 = 10

Scoring `eagle` (EAGLE's `topK_genrate`, also in AngelSlim): the sum of logarithms instead. Its `depth` d is num_steps d + 1
here, its `total_token` is num_draft_tokens. The trees are the same except for rounding, and except for paths whose product
underflows to 0 in float32: their logarithms still differ.

Ties are broken by (score descending, candidate number ascending). A parent therefore always comes before its children: a
product of probabilities never exceeds its factors, a sum of logarithms never exceeds its terms, and a parent has the smaller
number. So a child is never kept without its parent.

Letters: N trees, K topk, S num_steps, C candidates, M num_draft_tokens (the root counted), D draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from stages.params.tree_shape import SGLANG_SCORING, TreeShape, count_candidates

SMALL_ROW, SMALL_TOTAL = 128, 1 << 14  # scores in a row, or in all, that are searched at once


class TreeScoring(NamedTuple):
    """How nodes are scored."""

    score_logits: Callable[[Tensor], Tensor]  # a step's logits [..., D] float32 -> each token's own score
    combine_scores: Callable[[Tensor, Tensor], Tensor]  # a path's score, a token's own -> the longer path's
    score_probability: Callable[[Tensor], Tensor]  # a path's probability -> its score


TREE_SCORINGS: dict[str, TreeScoring] = {
    SGLANG_SCORING: TreeScoring(partial(torch.softmax, dim=-1), torch.mul, torch.clone),
    "eagle": TreeScoring(partial(torch.log_softmax, dim=-1), torch.add, torch.log),
}


def get_step_range(step: int, topk: int) -> tuple[int, int]:
    """Return the range [start, stop) of candidate numbers of a step, counted from 0."""
    return count_candidates(step, topk), count_candidates(step + 1, topk)


@dataclass
class Candidates:
    """All candidates that an expansion of N trees recorded, in candidate order."""

    scores: Tensor  # [N, C] float32
    tokens: Tensor  # [N, C] int64, target ids
    parents: Tensor  # [N, C] int64, candidate number of the parent, -1 for the root

    @classmethod
    def allocate(cls, scores: Tensor, tokens: Tensor, num_steps: int) -> "Candidates":
        """Return memory for all candidates [N, C], the first step's filled in: scores and tokens [N, K]."""
        (num_trees, topk), device = scores.shape, scores.device
        count = count_candidates(num_steps, topk)
        found = cls(
            torch.empty(num_trees, count, dtype=torch.float32, device=device),
            *torch.empty(2, num_trees, count, dtype=torch.int64, device=device),
        )
        found.scores[:, :topk], found.tokens[:, :topk], found.parents[:, :topk] = scores, tokens, -1
        return found


@dataclass
class DraftTree:
    """N trees of M nodes; node 0 is the root, parents come before children."""

    candidate_numbers: Tensor  # [N, M-1] of each drafted node, ascending
    tokens: Tensor  # [N, M-1] their tokens
    parents: Tensor  # [N, M] node index of the parent; the root's is 0
    ancestor_mask: Tensor  # [N, M, M] see `build_ancestor_mask`
    depths: Tensor  # [N, M], the root's is 0
    probabilities: Tensor | None = None  # [N, M-1, D] that the tokens of a chain were drawn from; None: not sampled


def check_tree(tree: TreeShape, draft_vocab_size: int, sliding_window: int | None = None) -> None:
    """Raise ValueError for a tree that can't be built with this draft."""
    tree.check()
    if tree.topk > draft_vocab_size:
        raise ValueError(
            f"{tree.name}: topk is {tree.topk}, expected at most {draft_vocab_size}, the tokens of the draft's vocabulary; "
            "lower topk"
        )
    if sliding_window is not None and sliding_window < tree.num_steps:
        raise ValueError(
            f"{tree.name}: num_steps is {tree.num_steps}, expected at most {sliding_window}, the draft's sliding_window: a "
            "deeper step would not see its own first; lower num_steps, or take another draft"
        )


def select_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of scores [..., C] and their indices, by (score descending, index ascending), on any device.

    torch.topk breaks ties arbitrarily, and is slow on a whole vocabulary. The k largest lie in the k chunks of the largest
    maxima, by the same order: each of those holds a score that precedes all of any other chunk.
    """
    assert scores.dtype == torch.float32
    count = scores.shape[-1]
    if count <= max(k, SMALL_ROW) or scores.numel() <= SMALL_TOTAL:
        indices = _find_topk_by_keys(scores, k)
        return torch.gather(scores, -1, indices), indices
    chunk = 1 << round(math.log2(count / k) / 2)  # so many maxima as scores in the chosen chunks
    whole = count // chunk * chunk
    maxima = [scores[..., :whole].unflatten(-1, (-1, chunk)).amax(-1)]
    maxima += [scores[..., whole:].amax(-1, keepdim=True)] if whole < count else []
    chunk_maxima = torch.cat(maxima, -1)
    chunks = _find_topk_by_keys(chunk_maxima, min(k, chunk_maxima.shape[-1])).sort(-1).values
    index = (chunks[..., None] * chunk + torch.arange(chunk, device=scores.device)).flatten(-2)  # ascending
    chosen = torch.gather(scores, -1, index.clamp(max=count - 1)).where(index < count, -torch.inf)
    indices = torch.gather(index, -1, _find_topk_by_keys(chosen, k))
    return torch.gather(scores, -1, indices), indices


def _find_topk_by_keys(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest [..., K].

    The bits of non-negative floats order as the floats, those of negative ones in reverse; so (bits, -index) in one int64 is
    a unique key that orders by score, then by index.
    """
    count = scores.shape[-1]
    bits = (scores + 0.0).contiguous().view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (bits << 32) | torch.arange(count - 1, -1, -1, device=scores.device)
    return count - 1 - (torch.topk(key, k, dim=-1).values & 0xFFFFFFFF)


def extend_beam(
    beam: Tensor, token_scores: Tensor, combine_scores: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Extend a beam by one step.

    beam [N, K] scores; token_scores [N, K, K] float32 of the best K successors of each beam node, best first. Returns the
    K*K candidates' scores [N, K*K] (parent by parent), and the next beam's scores [N, K] and indices among them [N, K];
    index // K is the parent's slot in the old beam.
    """
    scores = combine_scores(beam[..., None], token_scores).flatten(1)
    return scores, *select_topk(scores, beam.shape[1])


def build_tree(candidates: Candidates, num_draft_tokens: int) -> DraftTree:
    """Build the trees of the root and the best M - 1 candidates, in candidate order."""
    n, m = candidates.scores.shape[0], num_draft_tokens
    numbers = select_topk(candidates.scores, m - 1)[1].sort(dim=-1).values  # [N, M-1]
    parent_numbers = torch.gather(candidates.parents, 1, numbers)
    # A parent's node index: its rank among the kept candidates, plus one for the root; -1 finds the root at 0.
    parents = torch.searchsorted(numbers, parent_numbers, right=True)
    parents = torch.cat([parents.new_zeros(n, 1), parents], dim=1)
    mask = build_ancestor_mask(parents)
    return DraftTree(numbers, torch.gather(candidates.tokens, 1, numbers), parents, mask, mask.sum(-1) - 1)


def build_ancestor_mask(parents: Tensor) -> Tensor:
    """Return the attention mask [N, M, M] bool of parents [N, M]: each node attends to itself and its ancestors.

    root, a, b, aa, ba (parents 0 0 0 1 2):   1 . . . .
                                              1 1 . . .
                                              1 . 1 . .
                                              1 1 . 1 .
                                              1 . 1 . 1

    Each round doubles the generations covered, so the number of rounds depends on M alone and needs no device sync for the
    depth of the tree.
    """
    n, m = parents.shape
    mask = torch.eye(m, dtype=torch.bool, device=parents.device).expand(n, m, m)
    ancestors = parents  # 2**r generations up
    for _ in range((m - 1).bit_length()):
        mask = mask | torch.gather(mask, 1, ancestors[..., None].expand(n, m, m))
        ancestors = torch.gather(ancestors, 1, ancestors)
    return mask


def find_accepted_path(tree: DraftTree, target_tokens: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Return the path [N, S+1] of node indices that each target accepts, root first, and its length [N], at least 1.

    target_tokens [N, M]: the target's token after each node. A node is accepted if its token is the target's token after its
    parent, and its ancestors are accepted. Siblings carry different tokens, so the accepted nodes are a chain. Entries after
    the path's last node are 0.
    """
    n, m = target_tokens.shape
    rejected = tree.tokens != torch.gather(target_tokens, 1, tree.parents[:, 1:])  # [N, M-1]
    accepted = ~(tree.ancestor_mask[:, :, 1:] & rejected[:, None]).any(-1)  # [N, M]
    # [N, M]; the last column collects the others and is cut off
    column = torch.where(accepted, tree.depths, num_steps + 1)
    path = column.new_zeros(n, num_steps + 2).scatter_(1, column, torch.arange(m, device=column.device).expand(n, m))
    return path[:, : num_steps + 1], accepted.sum(-1)
