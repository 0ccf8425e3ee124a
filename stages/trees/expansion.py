"""From positions to candidate trees: the draft applied step by step to the beams of many positions at once.

Replay asks for all positions of many prompts and for several topks at once, the engine for one of each: the same `expand_beams`
serves both. What a node holds follows from its path alone, not from the topk whose beam it is in, so a node that several
beams hold is computed once.

Letters: N positions, K a topk, W the widest topk, M nodes of a step, S own ancestors with self, H hidden, A attention
heads, G key-value heads, E head width, C candidates; in `expand_candidates` N = B rows * P positions of a row, T prefix tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft, attend_prefix_and_ancestors, build_prefix_mask
from stages.trees import draft_tree
from stages.trees.draft_tree import Candidates

# The attention of a step's nodes over prefix and own ancestors: step, each node's position [M] (ascending), queries
# [M, A, E], own keys and values [M, S, G, E] -> [M, A, E].
StepAttention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]

# Numbers of an intermediate that are made at once: on a CPU they should stay in its cache, a GPU wants many.
MAX_INTERMEDIATE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 27}


class Beam(NamedTuple):
    """What the next step expands, of one topk."""

    scores: Tensor  # [N, K]
    children: Tensor  # [N, K] which it is of the W children that each of the M nodes before has, node by node
    numbers: Tensor  # [N, K] as candidates


def expand_candidates(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H] the target's
    hidden: Tensor,  # [B, P, H] step-0 output at each position: the state after the last verified token
    positions: Tensor,  # [B, P] p, where the next token fed is rotated to p + 1; or as `rope` takes them, [B, P, 3]
    keys: Tensor,  # [B, T, G, E] the prefix
    values: Tensor,  # [B, T, G, E]
    allowed: Tensor | None,  # [B, P, T] bool: tokens that step 0 sees, up to p; None: the whole prefix
    steps: int,
    topk: int,
    semantics: str = "sglang",  # of tree.SEMANTICS
) -> Candidates:
    """Every candidate of `steps` steps at each of the B*P positions, row by row: scores, tokens, parents [B*P, C]."""
    b, p, _ = hidden.shape
    window, tokens_seen = draft.config.sliding_window, keys.shape[1]

    # One query per beam node: K queries at each position see the same prefix.
    def by_node(allowed: Tensor) -> Tensor:
        return allowed[:, :, None].expand(b, p, topk, -1).flatten(1, 2)  # [B, P*K, T]

    def look(step: int, _place: Tensor, query: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        seen = None if allowed is None else by_node(allowed)
        if window is not None and allowed is not None:  # it moves on with the steps
            last = tokens_seen - 1 - allowed.flip(-1).int().argmax(-1)  # [B, P] p
            seen = by_node(build_prefix_mask(last, tokens_seen, window, step))
        query, own_k, own_v = (x.unflatten(0, (b, p * topk)) for x in (query, own_k, own_v))
        return attend_prefix_and_ancestors(query, keys, values, seen, own_k, own_v).flatten(0, 1)

    flat = hidden.flatten(0, 1), positions.flatten(0, 1)
    return expand_beams(draft, embedding, *flat, look, steps, [topk], semantics)[topk]


def expand_beams(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H] the target's
    hidden: Tensor,  # [N, H] as for `expand_candidates`
    positions: Tensor,  # [N] or [N, 3]
    look: StepAttention,
    steps: int,
    topks: Sequence[int],  # different ones
    semantics: str,
) -> dict[int, Candidates]:
    """Every candidate of `steps` steps at each of the N positions, by topk: scores, tokens, parents [N, C] each."""
    window, score, widest = draft.config.sliding_window, draft_tree.TREE_SCORINGS[semantics], max(topks)
    assert window is None or window >= steps, f"a window of {window} is left by own ancestors of {steps} steps"
    place = torch.arange(len(hidden), device=hidden.device)  # [M] which position a node belongs to; now M = N
    chances, ids = _score_children(draft, hidden, score, widest)  # [M, W]
    beams, found = {}, {k: ([chances[:, :k]], [ids[:, :k]], [torch.full_like(ids[:, :k], -1)]) for k in topks}
    for k in topks:
        slots = torch.arange(k, device=place.device).expand(len(place), k)
        beams[k] = Beam(chances[:, :k], place[:, None] * widest + slots, slots)
    own_k = own_v = None  # [M, S, G, E]
    for step in range(1, steps):
        children, nodes = _find_distinct_children([beams[k].children for k in topks], ids.numel())
        parents = children // widest  # [M]
        tokens, place, before = (
            _select_rows(ids.flatten(), children),
            _select_rows(place, parents),
            _select_rows(hidden, parents),
        )
        cos, sin = draft.compute_rope(positions + step)  # [N, 1, E/2]
        rope = _select_rows(cos, place), _select_rows(sin, place)
        mixed = draft.build_layer_input(_select_rows(embedding, tokens), before)
        key, value = draft.compute_keys_values(mixed, rope)
        own_k, own_v = _append_ancestors(own_k, parents, key), _append_ancestors(own_v, parents, value)
        attended = look(step, place, draft.compute_queries(mixed, rope), own_k, own_v)
        hidden = draft.finish_layer(draft.select_residual(before, mixed), attended)
        chances, ids = _score_children(draft, hidden, score, widest)

        for k, node in zip(topks, nodes, strict=True):  # [N, K]
            adds, new = chances, ids  # [M, W]; of one topk the nodes are its beam's, in order
            if len(topks) > 1:
                adds, new = (_select_rows(x, node.flatten())[:, :k] for x in (chances, ids))
            adds, new = adds.reshape(-1, k, k), new.reshape(-1, k * k)
            scores, beam, places = draft_tree.extend_beam(beams[k].scores, adds, score.join)
            records = scores, new, beams[k].numbers.repeat_interleave(k, dim=1)
            for record, more in zip(found[k], records, strict=True):
                record.append(more)
            chosen = torch.gather(node, 1, places // k) * widest + places % k
            beams[k] = Beam(beam, chosen, places + draft_tree.get_step_range(step, k)[0])
    return {k: Candidates(*(torch.cat(parts, 1) for parts in found[k])) for k in topks}


def _score_children(
    draft: Eagle3Draft, state: Tensor, score: draft_tree.TreeScoring, count: int
) -> tuple[Tensor, Tensor]:
    """state [M, H] -> what the best `count` successors of each add to its score, and their target ids, [M, W]."""
    rows = max(1, MAX_INTERMEDIATE_ELEMENTS[state.device.type] // draft.config.draft_vocab_size)
    parts = [draft_tree.select_topk(score.chances(draft.logits(part).float()), count) for part in state.split(rows)]
    chances, ids = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    return chances, draft.to_target(ids)


def _find_distinct_children(beams: list[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """Children below `count`, [N, K] of each beam -> the different ones [M], by position, and each beam's places therein."""
    if len(beams) == 1:  # siblings and cousins are different already
        (beam,) = beams
        return beam.flatten(), [torch.arange(beam.numel(), device=beam.device).view_as(beam)]
    held = torch.zeros(count, dtype=torch.bool, device=beams[0].device)
    for beam in beams:
        held[beam.flatten()] = True
    at = held.cumsum(0) - 1
    return held.nonzero()[:, 0], [at[beam] for beam in beams]


def _append_ancestors(own: Tensor | None, parents: Tensor, new: Tensor) -> Tensor:
    """The parents' own keys or values [., S-1, G, E], and each node's new one [M, G, E] -> [M, S, G, E]."""
    return new[:, None] if own is None else torch.cat([_select_rows(own, parents), new[:, None]], dim=1)


def _select_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], where a decoding step of one position waits for Python: half the time of that."""
    return x.index_select(0, index)
