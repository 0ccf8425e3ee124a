"""Expansion: run the draft step by step over the beams of many positions at once, and record the candidates.

Replay expands all positions of many prompts for several topks at once, the engine one position of each prompt for one topk;
both use `expand_beams`. A node's state depends on its path alone, not on the topk whose beam holds it, so a node that several
beams share is computed once.

Letters: N positions, K a topk, W the largest topk, M nodes of a step, S ancestors of a node with itself, H hidden, A
attention heads, G key-value heads, E head width, C candidates; in `expand_candidates` N = B rows * P positions of a row, T
prefix tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft, attend_prefix_and_ancestors, build_prefix_mask
from stages.params.tree_shape import SGLANG_SCORING
from stages.trees import draft_tree
from stages.trees.draft_tree import Candidates

# The attention of a step's nodes over prefix and ancestors: step, each node's index into the positions [M] (ascending), queries
# [M, A, E], the ancestors' keys and values [M, S, G, E] -> [M, A, E].
StepAttention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]

# Elements of an intermediate tensor: few enough for a CPU's cache, many for a GPU.
MAX_INTERMEDIATE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 27}
LEAST_LOGIT_ROWS = 32  # whose logits are computed at once, however wide: each time the whole head is read


class Beam(NamedTuple):
    """The nodes of one topk that the next step expands."""

    scores: Tensor  # [N, K]
    children: Tensor  # [N, K] index among the M * W children of the step's nodes, node by node
    candidate_numbers: Tensor  # [N, K]


def expand_candidates(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H] the target's
    hidden: Tensor,  # [B, P, H] step-0 output at each position: the state after the last verified token
    positions: Tensor,  # [B, P] p, where the next token fed is rotated to p + 1; with mrope [B, P, 3]
    keys: Tensor,  # [B, T, G, E] the prefix
    values: Tensor,  # [B, T, G, E]
    prefix_mask: Tensor | None,  # [B, P, T] bool: tokens that step 0 attends to, up to p; None: the whole prefix
    num_steps: int,
    topk: int,
    tree_scoring: str = SGLANG_SCORING,  # a key of TREE_SCORINGS
) -> Candidates:
    """Expand `num_steps` steps at each of the B*P positions, row by row: scores, tokens, parents [B*P, C]."""
    b, p, _ = hidden.shape
    window, prefix_length = draft.config.sliding_window, keys.shape[1]

    def repeat_by_node(mask: Tensor) -> Tensor:
        """[B, P, T] -> [B, P*K, T]: the K beam nodes of a position attend to the same prefix."""
        return mask[:, :, None].expand(b, p, topk, -1).flatten(1, 2)

    def attend(step: int, _position: Tensor, query: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        mask = None if prefix_mask is None else repeat_by_node(prefix_mask)
        if window is not None and prefix_mask is not None:  # the window moves on with the steps
            last = prefix_length - 1 - prefix_mask.flip(-1).int().argmax(-1)  # [B, P] p
            mask = repeat_by_node(build_prefix_mask(last, prefix_length, window, step))
        query, own_k, own_v = (x.unflatten(0, (b, p * topk)) for x in (query, own_k, own_v))
        return attend_prefix_and_ancestors(query, keys, values, mask, own_k, own_v).flatten(0, 1)

    flat = hidden.flatten(0, 1), positions.flatten(0, 1)
    return expand_beams(draft, embedding, *flat, attend, num_steps, [topk], tree_scoring)[topk]


def expand_beams(
    draft: Eagle3Draft,
    embedding: Tensor,  # [V, H] the target's
    hidden: Tensor,  # [N, H] as for `expand_candidates`
    positions: Tensor,  # [N] or [N, 3]
    attend: StepAttention,
    num_steps: int,
    topks: Sequence[int],  # distinct
    tree_scoring: str,
) -> dict[int, Candidates]:
    """Expand `num_steps` steps at each of the N positions; return candidates [N, C] by topk."""
    window, scoring, widest = draft.config.sliding_window, draft_tree.TREE_SCORINGS[tree_scoring], max(topks)
    assert window is None or window >= num_steps, f"ancestors of {num_steps} steps exceed a window of {window}"
    position = torch.arange(len(hidden), device=hidden.device)  # [M] index of each node's position; at first M = N
    token_scores, ids = _score_children(draft, hidden, scoring, widest)  # [M, W]
    beams, records = {}, {k: ([token_scores[:, :k]], [ids[:, :k]], [torch.full_like(ids[:, :k], -1)]) for k in topks}
    for k in topks:
        slots = torch.arange(k, device=position.device).expand(len(position), k)
        beams[k] = Beam(token_scores[:, :k], position[:, None] * widest + slots, slots)
    own_k = own_v = None  # [M, S, G, E]
    for step in range(1, num_steps):
        children, nodes = _find_distinct_children([beams[k].children for k in topks], ids.numel())
        parents = children // widest  # [M]
        tokens, position = _select_rows(ids.flatten(), children), _select_rows(position, parents)
        before = _select_rows(hidden, parents)
        cos, sin = draft.compute_rope(positions + step)  # [N, 1, E/2]
        rope = _select_rows(cos, position), _select_rows(sin, position)
        mixed = draft.build_layer_input(_select_rows(embedding, tokens), before)
        key, value = draft.compute_keys_values(mixed, rope)
        own_k, own_v = _append_ancestors(own_k, parents, key), _append_ancestors(own_v, parents, value)
        attended = attend(step, position, draft.compute_queries(mixed, rope), own_k, own_v)
        hidden = draft.finish_layer(draft.select_residual(before, mixed), attended)
        token_scores, ids = _score_children(draft, hidden, scoring, widest)

        for k, node in zip(topks, nodes, strict=True):  # [N, K]
            own_scores, new_ids = token_scores, ids  # [M, W]; with a single topk the nodes are its beam's, in order
            if len(topks) > 1:
                own_scores, new_ids = (_select_rows(x, node.flatten())[:, :k] for x in (token_scores, ids))
            own_scores, new_ids = own_scores.reshape(-1, k, k), new_ids.reshape(-1, k * k)
            scores, beam, chosen = draft_tree.extend_beam(beams[k].scores, own_scores, scoring.combine_scores)
            new = scores, new_ids, beams[k].candidate_numbers.repeat_interleave(k, dim=1)
            for record, more in zip(records[k], new, strict=True):
                record.append(more)
            children = torch.gather(node, 1, chosen // k) * widest + chosen % k
            beams[k] = Beam(beam, children, chosen + draft_tree.get_step_range(step, k)[0])
    return {k: Candidates(*(torch.cat(parts, 1) for parts in records[k])) for k in topks}


def count_logit_rows(width: int, device: torch.device) -> int:
    """Return of how many rows logits, and what is sorted beside them, are held at once: `width` elements of each."""
    return max(LEAST_LOGIT_ROWS, MAX_INTERMEDIATE_ELEMENTS[device.type] // width)


def _score_children(
    draft: Eagle3Draft, state: Tensor, scoring: draft_tree.TreeScoring, count: int
) -> tuple[Tensor, Tensor]:
    """Return the scores and target ids [M, count] of each node's best successors; state [M, H]."""
    rows = count_logit_rows(draft.config.draft_vocab_size, state.device)
    logits = (draft.logits(part).float() for part in state.split(rows))
    parts = [draft_tree.select_topk(scoring.score_logits(x), count) for x in logits]
    scores, ids = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    return scores, draft.to_target(ids)


def _find_distinct_children(beams: list[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """Return the distinct children [M] of several beams [N, K], ascending, and the index of each beam's nodes among them.

    Children are numbers below `count`.
    """
    if len(beams) == 1:  # a single beam holds no child twice
        (beam,) = beams
        return beam.flatten(), [torch.arange(beam.numel(), device=beam.device).view_as(beam)]
    is_held = torch.zeros(count, dtype=torch.bool, device=beams[0].device)
    for beam in beams:
        is_held[beam.flatten()] = True
    index = is_held.cumsum(0) - 1
    return is_held.nonzero()[:, 0], [index[beam] for beam in beams]


def _append_ancestors(own: Tensor | None, parents: Tensor, new: Tensor) -> Tensor:
    """Append each node's key or value [M, G, E] to its parent's ancestors [., S-1, G, E]: [M, S, G, E]."""
    return new[:, None] if own is None else torch.cat([_select_rows(own, parents), new[:, None]], dim=1)


def _select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index]; index_select takes half the time, which counts in a decoding step of one position."""
    return x.index_select(0, index)
