"""How much better than the static rule trees could be, from the same candidates. Two measures, docs/metrics.md:

**oracle**: whoever knew the answer would need no node off its path, so a budget of m - 1 nodes holds the answer's path as
far as it is among the candidates, m - 1 deep at most. No rule of any kind accepts more at a place; but the longest step is
not always the best, since it matters where one lands. `find_fewest_cycles` therefore looks for the fewest cycles of all choices.

**adaptive**: what the draft itself expects. Under its own probabilities a tree accepts the sum of its nodes' scores
(products), and no node's score is above its parent's: so for a given number of nodes the best tree is just the best
candidates, which are connected by themselves. OPT-Tree's and Sequoia's optimum for these candidates is the static rule.
What it gives away is that each place gets the same number. The sum over all places, for a number of nodes shared by all, is
largest where every node stays whose score reaches one threshold: wide trees where the draft is sure of much, small ones
where it isn't. `evaluate_threshold_trees` says what such trees accept and hold.

Letters: N places, L of all answers, B answers, S steps, C candidates, G trees, Q thresholds.
"""

import numpy as np
import torch
from torch import Tensor

# Probabilities of a path, half an octave apart, from "nothing is sure enough" to "everything that was expanded".
PATH_PROBABILITY_THRESHOLDS = (2.0, *(2.0 ** (-i / 2) for i in range(51)), 0.0)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def narrowest(most: int) -> torch.dtype:
    """Return the smallest signed integer type that holds `most`: tables of places are large, and the walk reads all of them."""
    return next(dtype for dtype in INTEGERS if most <= torch.iinfo(dtype).max)


def find_fewest_cycles(reach: Tensor, counts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Accepted drafts and verify cycles [B, G] of the best choices of all.

    reach [G, L + 1]: at each place, how many drafts may be accepted at most, those of all answers one behind the other, and
    one that is nobody's; counts [B] places. From a place one steps on by 1 to reach + 1. The fewest cycles count first, then
    whether the last one accepts the answer's end too, so that no bonus is left: f is twice the cycles, less that one.
    """
    begin, longest = counts.cumsum(0) - counts, int(counts.max())
    dtype, taken = narrowest(2 * longest), torch.arange(steps + 1, device=reach.device)
    never = torch.iinfo(dtype).max  # nothing is added to it: one step on is always possible, and its f is less
    best = torch.zeros(len(reach), len(counts), dtype=dtype, device=reach.device)  # [G, B] f from the first place on
    ahead = torch.full((*best.shape, steps + 1), never, dtype=dtype, device=reach.device)  # f of the next S + 1 places
    ahead[..., 0] = 0  # the answer's end
    ahead[..., 1:2] = -1  # and beyond its bonus
    for left in range(1, longest + 1):  # places from here to the answer's end
        here = reach[:, begin + (counts - left).clamp(min=0)]  # [G, B]
        f = 2 + torch.where(taken <= here[..., None], ahead, never).amin(-1)
        best = torch.where(counts == left, f, best)
        ahead = torch.cat([f[..., None], ahead[..., :-1]], dim=-1)
    cycles = (best.long() + 1) // 2
    accepted = counts + (2 * cycles - best) - cycles
    return accepted.T, cycles.T


def evaluate_threshold_trees(scores: Tensor, numbers: Tensor, topk: int, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Trees of all candidates whose score reaches a threshold: drafts that they accept, and nodes, [Q, S, N], in the `narrowest`
    types that hold the most of each.

    scores [N, C]; numbers [N, S] of the candidates that match the answer, negative from where none does; thresholds [Q], falling,
    the last below every score.
    """
    (count, steps), q = numbers.shape, len(thresholds)
    # The first threshold that lets a candidate in: of Q, those that are above its score come before.
    entry = q - torch.bucketize(scores, thresholds.flip(0), right=True)  # [N, C]
    of_level = torch.cat([torch.full((topk if step == 0 else topk * topk,), step) for step in range(steps)])  # [C]
    nodes = torch.zeros(count, steps * q, dtype=torch.int32, device=scores.device)
    nodes.scatter_add_(1, of_level.to(entry.device) * q + entry, torch.ones_like(entry, dtype=torch.int32))
    matching = torch.gather(entry, 1, numbers.clamp(min=0)).masked_fill(numbers < 0, q)  # [N, S]
    accepted = matching[..., None] <= torch.arange(q, device=entry.device)  # [N, S, Q]
    drafts = accepted.cumsum(1, dtype=narrowest(steps))
    held = nodes.unflatten(1, (steps, q)).cumsum(1).cumsum(2).to(narrowest(scores.shape[1]))
    return drafts.permute(2, 1, 0), held.permute(2, 1, 0)


def interpolate_adaptive_tau(found: np.ndarray, tokens: int) -> float:
    """tau of the trees cut at such a threshold that a cycle's tree has `tokens` nodes in the mean, its root counted; between
    two thresholds in proportion. found [3, Q]: accepted drafts, cycles and drafted nodes, each summed over all answers; the
    last threshold must give as many.
    """
    accepted, cycles, nodes = found
    tau, width = 1 + accepted / np.maximum(cycles, 1), 1 + nodes / np.maximum(cycles, 1)
    above = max(1, int(np.argmax(width >= tokens)))  # the first threshold that gives as wide trees
    return float(np.interp(tokens, width[above - 1 : above + 1], tau[above - 1 : above + 1]))
