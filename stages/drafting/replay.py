"""Exact replay: what every tree would accept, from cached hidden states alone (research/replay.md).

At temperature 0 the target's answer does not depend on the draft, and what the draft proposes after token t depends on
the tokens and features up to t only. So expand once at *every* position of the answer, find how deep the answer stays
inside the candidates, and walk: accept, step over the bonus token, repeat. One expansion per topk holds every smaller
num_steps and every num_draft_tokens: a node is in the tree of (steps, tokens) iff fewer than tokens - 1 candidates of
the first `steps` steps come before it.

Letters: B rows, T tokens, P positions of a row's answer (padded), N = B*P, S steps, C candidates, G trees of the grid.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stages.drafting.draft import Draft, Seen, first_state, in_sight, prefix
from stages.drafting.expand import expand
from stages.drafting.tree import Candidates, best, check

NEVER = torch.iinfo(torch.int64).max  # the rank of a node that does not exist


class Replayed(NamedTuple):
    """Of every answer and tree, as integers."""

    accepted: Tensor  # [B, G] drafts
    cycles: Tensor  # [B, G] verify cycles
    reached: Tensor  # [B, G, S] cycles that accepted at least s + 1 drafts
    depth: Tensor  # [B, G] depths of the trees of those cycles, summed


@torch.inference_mode()
def replay(
    draft: Draft,
    embedding: Tensor,  # [V, H]
    ids: Tensor,  # [B, T] prompt and answer, right-padded
    features: Tensor,  # [B, T, 3H]
    starts: Tensor,  # [B] index of each answer's first token
    ends: Tensor,  # [B] index after its last
    topk: int,
    trees: Sequence[tuple[int, int]],  # (num_steps, num_draft_tokens), all of this topk
    seen: Seen | None = None,  # of a target that sees
    semantics: str = "sglang",  # of tree.SEMANTICS
) -> Replayed:
    """What every tree accepts of every answer, and how deep trees are where decoding stands. Raises ValueError for a tree that
    can't be built.
    """
    for s, m in trees:
        check(s, topk, m, draft.config.draft_vocab_size)
    steps = max(s for s, _ in trees)
    count = (ends - starts - 1).clamp(min=0)  # [B] places where decoding may stand: bonus token y_0 .. y_{n-2}
    most = max(int(count.max()), 1)
    place = torch.arange(most, device=ids.device)  # [P]
    where = (starts[:, None] - 1 + place).clamp(
        max=ids.shape[1] - 1
    )  # [B, P] p: the last verified token before the bonus

    fused, keys, values = prefix(draft, ids, features, embedding, seen)
    allowed = in_sight(where, ids.shape[1], draft.config.sliding_window)
    bonus = torch.gather(ids, 1, (where + 1).clamp(max=ids.shape[1] - 1))
    picked = torch.gather(fused, 1, where[..., None].expand(-1, -1, fused.shape[-1]))
    theirs = None if seen is None else torch.gather(seen.positions, 1, where[..., None].expand(-1, -1, 3))
    positions = draft.turning(where, theirs)
    state = first_state(draft, embedding[bonus], picked, positions, keys, values, allowed)
    candidates = expand(draft, embedding, state, positions, keys, values, allowed, steps, topk, semantics)

    wanted = _following(ids, where, ends, steps).flatten(0, 1)  # [N, S]
    rank = ranks(candidates, wanted, steps, topk)
    accepted = torch.stack([(rank[:, :s, s - 1] < m - 1).sum(1) for s, m in trees])  # [G, N]
    deep = depths(candidates, trees, topk)
    return walk(accepted.unflatten(1, where.shape), deep.unflatten(1, where.shape), count, steps)


def depths(candidates: Candidates, trees: Sequence[tuple[int, int]], topk: int) -> Tensor:
    """[G, N]: how deep the deepest node of each tree is; num_steps at most, and less where shallow nodes take the places."""
    numbers = torch.arange(candidates.scores.shape[1], device=candidates.scores.device)
    level = torch.where(numbers < topk, 1, (numbers - topk) // (topk * topk) + 2)  # [C] the step that made a candidate
    deepest: dict[int, Tensor] = {}
    for s in {s for s, _ in trees}:
        most = max(m for steps, m in trees if steps == s) - 1
        first = candidates.first_steps(s, topk).scores
        deepest[s] = level[best(first, most)[1]].cummax(1).values  # [N, most]: of the best 1, 2, ... candidates
    return torch.stack([deepest[s][:, m - 2] for s, m in trees])


def ranks(candidates: Candidates, wanted: Tensor, steps: int, topk: int) -> Tensor:
    """wanted [N, S]: the answer's next tokens, -1 past its end -> rank [N, S, S].

    rank[n, d, s] is how many candidates of the first s + 1 steps come before the node that matches the answer at depth
    d + 1, by (score descending, number ascending); NEVER where no candidate matches that far or the step is later.
    """
    n, count = candidates.scores.shape
    ends = [topk + s * topk * topk for s in range(steps)]  # candidates of the first s + 1 steps
    numbers = torch.arange(count, device=wanted.device)
    rank = torch.full((n, steps, steps), NEVER, device=wanted.device)
    parent = torch.full((n, 1), -1, device=wanted.device)
    for depth, end in enumerate(ends):
        begin = ends[depth - 1] if depth else 0
        here = candidates.parents[:, begin:end] == parent
        here &= candidates.tokens[:, begin:end] == wanted[:, depth, None]
        found = here.any(1)
        number = begin + here.int().argmax(1)  # at most one matches: siblings carry different tokens
        score = torch.gather(candidates.scores, 1, number[:, None])
        before = (candidates.scores > score) | ((candidates.scores == score) & (numbers < number[:, None]))
        before_by_step = before.cumsum(1)[:, [e - 1 for e in ends]]  # [N, S]
        rank[:, depth, depth:] = torch.where(found[:, None], before_by_step, NEVER)[:, depth:]
        parent = torch.where(found, number, -2)[:, None]  # -2 is nobody's parent
    return rank


def walk(accepted: Tensor, deep: Tensor, count: Tensor, steps: int) -> Replayed:
    """The cycles of each tree: from the first place on, accept, step over the bonus token, and stand at the next.

    accepted [G, B, P]: drafts if decoding stands at a place; deep [G, B, P]: the tree's depth there; count [B] places.
    """
    stand = torch.zeros(accepted.shape[:2], dtype=torch.int64, device=accepted.device)  # [G, B]
    total, cycles, depth = torch.zeros_like(stand), torch.zeros_like(stand), torch.zeros_like(stand)
    reached = torch.zeros(*stand.shape, steps, dtype=torch.int64, device=accepted.device)
    least = torch.arange(1, steps + 1, device=accepted.device)
    last = accepted.shape[2] - 1
    while bool((going := stand < count).any()):
        here = stand.clamp(max=last)[..., None]
        step = torch.gather(accepted, 2, here)[..., 0]
        total += step * going
        cycles += going
        depth += torch.gather(deep, 2, here)[..., 0] * going
        reached += (step[..., None] >= least) & going[..., None]
        stand = torch.where(going, stand + step + 1, stand)
    return Replayed(total.T, cycles.T, reached.transpose(0, 1), depth.T)


def _following(ids: Tensor, where: Tensor, ends: Tensor, steps: int) -> Tensor:
    """[B, P, S]: the answer's tokens after the bonus token of each place, -1 past the answer's end."""
    index = where[..., None] + 2 + torch.arange(steps, device=ids.device)
    tokens = torch.gather(ids[:, None].expand(-1, where.shape[1], -1), 2, index.clamp(max=ids.shape[1] - 1))
    return torch.where(index < ends[:, None, None], tokens, -1)
