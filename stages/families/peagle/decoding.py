"""P-EAGLE as a proposer: one pass over the rows that the last cycle verified and the slots after them drafts a chain.

As a block draft's (families/block/decoding.py), the slots' draft cache has the heads of each layer side by side, and rows beyond
the accepted ones are overwritten before they are seen. Keys and values of slots are not kept.

Letters as in families/block/decoding.py; S num_steps, R rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput
from stages.engine.proposer import Drafter
from stages.families.block.decoding import BlockDrafter, BlockMethod
from stages.families.block.model import BlockContext, build_dense_attention
from stages.families.draft_files import LoadedDraft
from stages.families.peagle.model import PEagleDraft
from stages.params.families import BLOCK_TITLES
from stages.params.tree_shape import TreeShape


class PEagleDrafter(BlockDrafter):
    """A draft for a target."""

    draft: PEagleDraft

    def __init__(self, draft: PEagleDraft, embedding: Tensor, feature_layers: Sequence[int], tree_scoring: str):
        tables = draft.choose_embedding(embedding), draft.lm_head.weight
        super().__init__(draft, *tables, feature_layers, tree_scoring, draft.d2t)

    def build_method(self, shape: TreeShape, draft_temperature: float | None = None) -> BlockMethod:
        """Raise ValueError for sampled drafts."""
        if draft_temperature is not None:
            raise ValueError(
                f"benchmark.draft_sampling is sampled and the draft is P-EAGLE's, expected a block draft, {BLOCK_TITLES}; set "
                "it to greedy"
            )
        return BlockMethod(self, shape)

    def read_prompt(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, count: int) -> None:
        assert prefill.features is not None
        following = torch.tensor(prompt[1 : count + 1], device=self.embedding.device)
        context = self.draft.read_rows(self.embedding[following], prefill.features[:count])
        new = BlockContext(tuple(context.keys), tuple(context.values))
        self.view_context(slot, 1, slot.capacity).write(new, slot.positions[None, :count])

    def draft_states(
        self, slots: CacheSlots, state: DecodeState, anchors: Tensor, visible_length: int, num_steps: int
    ) -> Tensor:
        num_slots, count = state.next_tokens.shape
        if slots.has_dynamic_shapes:
            count = int(state.num_verified)
        rows = state.cache_length - state.num_verified + slots.positions[:count]  # [B, R]
        depths = slots.positions[1:num_steps]
        positions = torch.cat([rows, state.cache_length - 1 + depths], 1)  # [B, R + S - 1]
        inputs = self.embedding[state.next_tokens[:, :count]], state.features[:, :count], self.embedding, len(depths)
        embeds, fused = self.draft.append_slots(*inputs)
        # Rows see those up to their own, slots all verified rows, and slots up to their own.
        last_seen = torch.cat([rows, (state.cache_length - 1).expand(-1, len(depths))], 1)
        in_text = slots.positions[:visible_length] <= last_seen[..., None]  # [B, R + S - 1, visible_length]
        own = torch.ones(count + len(depths), len(depths), dtype=torch.bool, device=rows.device).tril(-count)
        dense = build_dense_attention(torch.cat([in_text, own.expand(num_slots, -1, -1)], -1))
        context, request = self.view_context(slots, num_slots, slots.capacity), slots.numbers[:num_slots]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = []
            for kept, new in ((context.keys[i], k), (context.values[i], v)):
                kept[request, rows] = new[:, :count]
                seen.append(torch.cat([kept[:, :visible_length], new[:, count:]], 1))
            return dense(q, *seen)

        states = self.draft.run_layers(embeds, fused, positions, attend)
        first = (state.num_verified - 1)[..., None].expand(-1, -1, states.shape[-1])
        return self.draft.normalise_output(torch.cat([states.gather(1, first), states[:, count:]], 1))


def build_drafter(draft: LoadedDraft, embedding: Tensor, head: Tensor, tree_scoring: str) -> Drafter:
    assert isinstance(draft.module, PEagleDraft)
    return PEagleDrafter(draft.module, embedding, draft.feature_layers, tree_scoring)
