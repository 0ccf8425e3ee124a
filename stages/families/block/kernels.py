"""Expansion of a block in few GPU kernels: `expansion.expand_block`, with fixed memory for the candidates.

A vocabulary of 150,000 logits is read once for each slot, all slots at once where they are independent of the drafts before.

Letters: B prompts, S num_steps, H hidden, K topk, V vocabulary, C candidates.
"""

from typing import Any

import torch
from torch import Tensor

from stages.engine.target_kernels import select_kernels
from stages.trees.draft_tree import Candidates


class FusedBlockExpansion:
    """The expansion of a draft's blocks."""

    def __init__(self, draft: Any, offsets: Tensor):
        """`offsets` [V] of the ids of logits to the target's; zeros of a block draft."""
        self.draft, self.kernels, self.offsets = draft, select_kernels(offsets.device), offsets

    def expand(
        self,
        logits: Tensor,  # [B, S, V] of the slots that draft, each by itself
        states: Tensor,  # [B, S, H] of these slots
        anchors: Tensor,  # [B]
        topk: int,
        tree_scoring: str,
    ) -> Candidates:
        """Return the candidates [B, C] of S levels."""
        k, (prompts, num_steps, _), device = self.kernels, logits.shape, logits.device
        independent = None if self.draft.is_conditional else self._score_slots(logits, topk, tree_scoring)
        shortlist = self.draft.build_shortlist(logits)

        def score(slot: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            """Return scores and ids [B * M, K] of the successors of tokens [B * M]."""
            if independent is not None:
                scores, ids = (x[slot, :, : len(tokens) // prompts].flatten(0, 1).contiguous() for x in independent)
                return scores, ids
            of_slot = shortlist.select((slice(None), slot, None))
            successors = self.draft.condition_shortlist(of_slot, states[:, slot, None], tokens.view(prompts, -1))
            scores, indices = k.select_topk(successors.flatten(0, 1), topk, tree_scoring)
            return scores, of_slot.get_tokens(indices.view(prompts, -1, topk)).flatten(0, 1)

        beam, ids = score(0, anchors)  # [B, K]
        tokens = ids + self.offsets[ids]
        found = Candidates.allocate(beam, tokens, num_steps)
        tokens, numbers = tokens.flatten(), torch.arange(topk, device=device).repeat(prompts, 1)
        no_mask = torch.zeros(prompts, topk, 1, dtype=torch.bool, device=device)  # a block's nodes attend to no other
        for step in range(1, num_steps):
            scores, ids = score(step, tokens)
            beam, numbers, _, tokens, _ = k.extend_beam(
                step, beam, numbers, no_mask, scores, ids, self.offsets, found, tree_scoring
            )
        return found

    def _score_slots(self, logits: Tensor, topk: int, tree_scoring: str) -> tuple[Tensor, Tensor]:
        """Return scores and ids [S, B, K, K] of the successors of each node of a beam, the same for all."""
        prompts, num_steps, _ = logits.shape
        best = self.kernels.select_topk(logits.flatten(0, 1), topk, tree_scoring)  # [B * S, K]
        by_slot = (x.view(prompts, num_steps, 1, topk).transpose(0, 1) for x in best)
        scores, ids = (x.expand(-1, -1, topk, -1).contiguous() for x in by_slot)
        return scores, ids
