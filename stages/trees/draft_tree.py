"""Draft trees: which guesses exist, which are kept, what the target accepts. Pure functions on small tensors.

Semantics `sglang` (0.5.17 to 0.5.23, research/sglang.md section 1): a node's score is the product of the draft's
probabilities from the root to it, in float32. Step 1 records k candidates; each later step expands the beam of k nodes
by k tokens each, records all k*k products, and the best k of them are the next beam. The tree is the root and the best
num_draft_tokens - 1 candidates over all steps:

    topk 2, three steps:     step 1        step 2            step 3          candidates are numbered in this order:
                                a     ->  aa  ab  ba  bb  -> ...             0 1 | 2 3 4 5 | 6 7 8 9
                                b         (beam: best 2)                     k + (steps - 1) * k**2 = 10

Semantics `eagle` (EAGLE's own `topK_genrate`, and AngelSlim's): the sum of the logarithms instead. Its `depth` d is
num_steps d + 1 here, its `total_token` num_draft_tokens. The same trees but for rounding, and but for paths whose product
is 0 in float32: their logarithms still differ.

Ties are broken by (score descending, candidate number ascending), so a parent always comes before its children: a
product can't exceed its factor, a sum of numbers of at most 0 none of them, and a parent's number is the smaller. A child
is then never kept without its parent.

Letters: N trees, K topk, S num_steps, C candidates, M num_draft_tokens (the root counted), D draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

SMALL_ROW, SMALL_TOTAL = (
    128,
    1 << 14,
)  # scores in a row, in all: of fewer, the way that needs no second look is the faster


class TreeScoring(NamedTuple):
    """How a node is scored."""

    chances: Callable[[Tensor], Tensor]  # a step's logits [..., D] float32 -> what each token adds to a path's score
    join: Callable[[Tensor, Tensor], Tensor]  # a path's score and that
    score: Callable[[Tensor], Tensor]  # a path's probability -> its score


TREE_SCORINGS = {
    "sglang": TreeScoring(partial(torch.softmax, dim=-1), torch.mul, torch.clone),
    "eagle": TreeScoring(partial(torch.log_softmax, dim=-1), torch.add, torch.log),
}


def get_step_range(step: int, topk: int) -> tuple[int, int]:
    """The candidate numbers of a step, counted from 0: from the first to before the second."""
    return (topk + (step - 1) * topk * topk if step else 0), topk + step * topk * topk


@dataclass
class Candidates:
    """All that an expansion of N trees recorded, in candidate order."""

    scores: Tensor  # [N, C] float32
    tokens: Tensor  # [N, C] int64, target ids
    parents: Tensor  # [N, C] int64, candidate number of the parent, -1 for the root

    def first_steps(self, steps: int, topk: int) -> "Candidates":
        """The same expansion stopped earlier: what `steps` steps would have recorded."""
        count = count_candidates(steps, topk)
        return Candidates(self.scores[:, :count], self.tokens[:, :count], self.parents[:, :count])


@dataclass
class DraftTree:
    """N trees of M nodes; node 0 is the root, parents come before children."""

    nodes: Tensor  # [N, M-1] candidate number of each drafted node, ascending
    tokens: Tensor  # [N, M-1] their tokens
    parents: Tensor  # [N, M] node index of the parent; the root's is 0
    sees: Tensor  # [N, M, M] `build_ancestor_mask`
    depths: Tensor  # [N, M], the root's is 0


def count_candidates(steps: int, topk: int) -> int:
    """How many candidates an expansion records."""
    return get_step_range(steps - 1, topk)[1]


def check_tree(
    steps: int, topk: int, num_draft_tokens: int, draft_vocab_size: int, sliding_window: int | None = None
) -> None:
    """Raises ValueError for a tree that can't be built, with this draft or any."""
    name = f"t{steps}_{topk}_{num_draft_tokens}"
    if min(steps, topk) < 1 or num_draft_tokens < 2:
        raise ValueError(
            f"{name}: expected num_steps and topk of 1 or more, and num_draft_tokens of 2 or more (root counted)"
        )
    if num_draft_tokens - 1 > (most := count_candidates(steps, topk)):
        raise ValueError(
            f"{name} has {num_draft_tokens - 1} nodes under the root, expected at most the topk + (num_steps - 1) * topk**2 = "
            f"{most} candidates that its expansion records; lower num_draft_tokens to {most + 1} or raise num_steps or topk"
        )
    if topk > draft_vocab_size:
        raise ValueError(
            f"{name}: topk is {topk}, expected at most {draft_vocab_size}, the tokens of the draft's vocabulary; lower topk"
        )
    if sliding_window is not None and sliding_window < steps:
        raise ValueError(
            f"{name}: num_steps is {steps}, expected at most {sliding_window}, the draft's sliding_window: a deeper step would "
            "not see its own first; lower num_steps, or take another draft"
        )


def select_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of scores [..., C] and their places, by (score descending, place ascending), on any device.

    torch.topk promises nothing about ties. Of a vocabulary it is asked all the same, since that is the fastest way to the
    k largest values: where the next one is smaller, they have k places, to be put in order; where it is equal, and among
    few scores, `_find_topk_by_keys` finds them.
    """
    assert scores.dtype == torch.float32
    recorded = scores.is_cuda and torch.cuda.is_current_stream_capturing()  # a device that is can't be asked for ties
    if scores.shape[-1] <= max(k, SMALL_ROW) or scores.numel() <= SMALL_TOTAL or recorded:
        places = _find_topk_by_keys(scores, k)
        return torch.gather(scores, -1, places), places
    values, places = torch.topk(scores, k + 1, dim=-1)
    tied = values[..., k - 1] == values[..., k]
    places = places[..., :k].sort(dim=-1).values
    by_score = (torch.gather(scores, -1, places) + 0.0).sort(dim=-1, descending=True, stable=True).indices
    places = torch.gather(places, -1, by_score)
    if bool(tied.any()):
        places[tied] = _find_topk_by_keys(scores[tied], k)
    return torch.gather(scores, -1, places), places


def _find_topk_by_keys(scores: Tensor, k: int) -> Tensor:
    """The places of the k largest [..., K]. Non-negative floats order as their bits do, negative ones the other way round,
    so (bits, -place) in one int64 is a unique key with exactly the order we want.
    """
    count = scores.shape[-1]
    bits = (scores + 0.0).contiguous().view(torch.int32).to(torch.int64)  # + 0.0: there is but one zero
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (bits << 32) | torch.arange(count - 1, -1, -1, device=scores.device)
    return count - 1 - (torch.topk(key, k, dim=-1).values & 0xFFFFFFFF)


def extend_beam(
    beam: Tensor, chances: Tensor, join: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One more step. beam [N, K] scores, chances [N, K, K] float32 of the best K successors of each beam node, best first.

    Returns the K*K candidates' scores [N, K*K] (parent by parent), and the next beam's scores [N, K] and places among
    them [N, K]; place // K is the parent's slot in the old beam.
    """
    scores = join(beam[..., None], chances).flatten(1)
    return scores, *select_topk(scores, beam.shape[1])


def build_tree(candidates: Candidates, num_draft_tokens: int) -> DraftTree:
    """The best M - 1 candidates and the root, in candidate order."""
    n, m = candidates.scores.shape[0], num_draft_tokens
    nodes = select_topk(candidates.scores, m - 1)[1].sort(dim=-1).values  # [N, M-1]
    parent_candidates = torch.gather(candidates.parents, 1, nodes)
    # A parent's node index: its rank among the kept candidates, plus one for the root; -1 finds the root at 0.
    parents = torch.searchsorted(nodes, parent_candidates, right=True)
    parents = torch.cat([parents.new_zeros(n, 1), parents], dim=1)
    sees = build_ancestor_mask(parents)
    return DraftTree(nodes, torch.gather(candidates.tokens, 1, nodes), parents, sees, sees.sum(-1) - 1)


def build_ancestor_mask(parents: Tensor) -> Tensor:
    """parents [N, M] -> [N, M, M] bool: may node i see node j? Itself and its ancestors, the root always.

    root, a, b, aa, ba (parents 0 0 0 1 2):   1 . . . .
                                              1 1 . . .
                                              1 . 1 . .
                                              1 1 . 1 .
                                              1 . 1 . 1

    Who sees 2**r generations, and so does the one 2**r above, sees 2**(r + 1): no device is asked how deep a tree is.
    """
    n, m = parents.shape
    sees = torch.eye(m, dtype=torch.bool, device=parents.device).expand(n, m, m)
    above = parents
    for _ in range((m - 1).bit_length()):
        sees = sees | torch.gather(sees, 1, above[..., None].expand(n, m, m))
        above = torch.gather(above, 1, above)
    return sees


def find_accepted_path(tree: DraftTree, choices: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """What each target accepts: path [N, S+1] of node indices, root first, and count [N] of those that are one, >= 1.

    choices [N, M]: the target's token after each node. From the root, go to the child whose token the target chose there,
    until there is none: so a node is on the path if it and all its ancestors were chosen. Siblings carry different tokens,
    so these are a chain, in order. What follows the path's last node is 0.
    """
    n, m = choices.shape
    refused = tree.tokens != torch.gather(choices, 1, tree.parents[:, 1:])  # [N, M-1]
    taken = ~(tree.sees[:, :, 1:] & refused[:, None]).any(-1)  # [N, M]
    place = torch.where(taken, tree.depths, steps + 1)  # [N, M]; the last place is for the others, and is cut off
    path = place.new_zeros(n, steps + 2).scatter_(1, place, torch.arange(m, device=place.device).expand(n, m))
    return path[:, : steps + 1], taken.sum(-1)
