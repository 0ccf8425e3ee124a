"""Bounds: how much better than the static rule trees from the same candidates could be, by two measures (docs/metrics.md).

**Oracle**: with the answer known, a tree needs no node off the answer's path, so num_draft_tokens - 1 nodes hold the path as
far as it is among the candidates, at most num_draft_tokens - 1 deep. No rule accepts more at a position; but accepting the most
is not always best, since the position of the next cycle matters too. `find_fewest_cycles` therefore minimises the cycles over
all choices.

**Adaptive**: the best that the draft's own scores allow. By its own probabilities a tree accepts the sum of its nodes' scores
(products), and a node's score never exceeds its parent's; so for a given number of nodes the best tree is the best candidates,
which are always connected. The static rule therefore already is the optimum of OPT-Tree and Sequoia for these candidates. Its
loss is that every position gets the same number of nodes. For a number of nodes shared by all positions, the sum is largest if
every node is kept whose score reaches one threshold: wide trees where the draft is sure of much, small ones elsewhere.
`evaluate_threshold_trees` computes what such trees accept and hold.

Letters: N positions, L of all answers, B answers, S num_steps, C candidates, G trees, Q thresholds.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

# Probabilities of a path, half an octave apart; at 2 no node is kept, at 0 every candidate.
PATH_PROBABILITY_THRESHOLDS = (2.0, *(2.0 ** (-i / 2) for i in range(51)), 0.0)
INTEGER_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def choose_integer_type(maximum: int) -> torch.dtype:
    """Return the smallest signed integer type that holds `maximum`: tables of positions are large, and walks read all of them."""
    return next(dtype for dtype in INTEGER_TYPES if maximum <= torch.iinfo(dtype).max)


def find_fewest_cycles(acceptable: Tensor, counts: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Return accepted drafts and verify cycles [B, G] of the best choices.

    acceptable [G, L + 1]: how many drafts a cycle may accept at each position, those of all answers concatenated, with one
    padding entry at index L; counts [B]: positions of each answer. A cycle moves on by 1 to acceptable + 1 positions. Fewest
    cycles count first, then whether the last one accepts the answer's end too, so that no bonus is left: the cost f is twice the
    cycles, less one in that case.
    """
    offsets, longest = counts.cumsum(0) - counts, int(counts.max())
    dtype, drafts = choose_integer_type(2 * longest), torch.arange(num_steps + 1, device=acceptable.device)
    unreachable = torch.iinfo(dtype).max  # never added to: accepting no draft is always possible, and costs less
    on: dict[str, Any] = {"dtype": dtype, "device": acceptable.device}
    best = torch.zeros(len(acceptable), len(counts), **on)  # [G, B] f from the first position on
    ahead = torch.full((*best.shape, num_steps + 1), unreachable, **on)  # f of the next S + 1 positions
    ahead[..., 0] = 0  # the answer's end
    ahead[..., 1:2] = -1  # and beyond its bonus
    for remaining in range(1, longest + 1):  # positions from here to the answer's end
        max_accepted = acceptable[:, offsets + (counts - remaining).clamp(min=0)]  # [G, B]
        f = 2 + torch.where(drafts <= max_accepted[..., None], ahead, unreachable).amin(-1)
        best = torch.where(counts == remaining, f, best)
        ahead = torch.cat([f[..., None], ahead[..., :-1]], dim=-1)
    cycles = (best.long() + 1) // 2
    accepted = counts + (2 * cycles - best) - cycles
    return accepted.T, cycles.T


def evaluate_threshold_trees(scores: Tensor, numbers: Tensor, topk: int, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accepted drafts and the nodes [Q, S, N] of the trees of all candidates whose score reaches a threshold.

    scores [N, C]; numbers [N, S] of the candidates on the answer's path, negative from the first that is missing;
    thresholds [Q], descending, the last below every score. The results have the smallest integer types that hold them.
    """
    (count, steps), q = numbers.shape, len(thresholds)
    # Index of the first threshold that admits a candidate: the number of thresholds above its score.
    entry = q - torch.bucketize(scores, thresholds.flip(0), right=True)  # [N, C]
    step_of = torch.cat([torch.full((topk if step == 0 else topk * topk,), step) for step in range(steps)])  # [C]
    nodes = torch.zeros(count, steps * q, dtype=torch.int32, device=scores.device)
    nodes.scatter_add_(1, step_of.to(entry.device) * q + entry, torch.ones_like(entry, dtype=torch.int32))
    on_path = torch.gather(entry, 1, numbers.clamp(min=0)).masked_fill(numbers < 0, q)  # [N, S]
    accepted = on_path[..., None] <= torch.arange(q, device=entry.device)  # [N, S, Q]
    drafts = accepted.cumsum(1, dtype=choose_integer_type(steps))
    node_counts = nodes.unflatten(1, (steps, q)).cumsum(1).cumsum(2).to(choose_integer_type(scores.shape[1]))
    return drafts.permute(2, 1, 0), node_counts.permute(2, 1, 0)


def interpolate_adaptive_tau(sums: np.ndarray, num_draft_tokens: int) -> float:
    """Return the tau of threshold trees that have `num_draft_tokens` nodes a cycle on average, the root counted.

    sums [3, Q]: accepted drafts, cycles and drafted nodes, each summed over all answers; the last threshold must give at least
    as many nodes. Between two thresholds tau is interpolated linearly.
    """
    accepted, cycles, nodes = sums
    tau, mean_nodes = 1 + accepted / np.maximum(cycles, 1), 1 + nodes / np.maximum(cycles, 1)
    index = max(1, int(np.argmax(mean_nodes >= num_draft_tokens)))  # the first threshold that gives as many
    return float(np.interp(num_draft_tokens, mean_nodes[index - 1 : index + 1], tau[index - 1 : index + 1]))
