"""From positions to candidate trees: the draft applied step by step to the beams of many positions at once.

Replay asks for all positions of many prompts, the engine for one position: the same function serves both.

Letters: B rows, P positions of a row, K topk, T prefix tokens, H hidden, G key-value heads, E head width, C candidates.
"""

import torch
from torch import Tensor

from stages.drafting import tree
from stages.drafting.draft import Draft, attend, in_sight
from stages.drafting.tree import Candidates


def expand(
    draft: Draft,
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
    n = b * p
    score = tree.SEMANTICS[semantics]
    beam, ids = tree.first_step(score.chances(draft.logits(hidden).flatten(0, 1).float()), topk)  # [N, K]
    ids = draft.to_target(ids)
    slots = torch.arange(topk, device=ids.device).expand(n, topk)
    scores, tokens, parents = [beam], [ids], [torch.full_like(ids, -1)]

    # One query per beam node: K queries at each position see the same prefix.
    def by_node(allowed: Tensor) -> Tensor:
        return allowed[:, :, None].expand(b, p, topk, -1).flatten(1, 2)  # [B, P*K, T]

    window, tokens_seen = draft.config.sliding_window, keys.shape[1]
    assert window is None or window >= steps, f"a window of {window} is left by own ancestors of {steps} steps"
    seen = None if allowed is None else by_node(allowed)
    state = hidden.flatten(0, 1)[:, None].expand(n, topk, -1)  # [N, K, H]
    beam_tokens, beam_numbers = ids, slots
    own_k = own_v = None  # [N, K, ancestors, G, E]
    for step in range(1, steps):
        rope = draft.rope((positions + step).flatten(0, 1)[:, None])  # [N, 1, 1, E/2], for all K
        mixed = draft.mix(embedding[beam_tokens], state)
        key, value = draft.keys_values(mixed, rope)
        own_k = key[:, :, None] if own_k is None else torch.cat([own_k, key[:, :, None]], dim=2)
        own_v = value[:, :, None] if own_v is None else torch.cat([own_v, value[:, :, None]], dim=2)
        query = draft.queries(mixed, rope)
        if window is not None and allowed is not None:  # it moves on with the steps
            last = tokens_seen - 1 - allowed.flip(-1).int().argmax(-1)  # [B, P] p
            seen = by_node(in_sight(last, tokens_seen, window, step))
        out = attend(
            query.unflatten(0, (b, p)).flatten(1, 2), keys, values, seen,
            own_k.unflatten(0, (b, p)).flatten(1, 2), own_v.unflatten(0, (b, p)).flatten(1, 2),
        )  # fmt: skip
        state = draft.finish(state, out.unflatten(1, (p, topk)).flatten(0, 1))  # [N, K, H]

        chances = score.chances(draft.logits(state).float())  # [N, K, D]
        new_scores, new_ids, beam, places = tree.next_step(beam, chances, score.join)
        new_tokens = draft.to_target(new_ids)
        scores.append(new_scores)
        tokens.append(new_tokens)
        parents.append(beam_numbers.repeat_interleave(topk, dim=1))

        # The next beam's nodes: their parents' slots carry the state and the ancestors' keys along.
        slot = places // topk  # [N, K]
        beam_tokens = torch.gather(new_tokens, 1, places)
        beam_numbers = places + topk + (step - 1) * topk * topk
        state, own_k, own_v = _pick(state, slot), _pick(own_k, slot), _pick(own_v, slot)
    return Candidates(torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1))


def _pick(x: Tensor, slot: Tensor) -> Tensor:
    """x [N, K, ...], slot [N, K] -> x with its slots rearranged."""
    index = slot.reshape(*slot.shape, *([1] * (x.ndim - 2))).expand(*slot.shape, *x.shape[2:])
    return torch.gather(x, 1, index)
