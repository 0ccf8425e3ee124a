"""The target's passes over slots of caches: prefill of one prompt, and verification of trees behind all of them.

Letters: B slots of a pass, T prompt tokens, M num_draft_tokens, H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput
from stages.engine.kv_cache import KVCache, KVShape
from stages.engine.slot_pool import SlotPool
from stages.engine.target_kernels import FusedDecoder
from stages.engine.tree_masks import build_layer_masks
from stages.target.hooks import capture_residual_streams, tap_decoder_inputs
from stages.target.multimodal import ImagePatches, build_multimodal_inputs, build_pixel_kwargs, is_multimodal

GROUPED_ATTENTION = "aerie_grouped"  # its name in transformers' registry


@contextmanager
def use_grouped_attention(config: PretrainedConfig) -> Iterator[None]:
    """Replace sdpa by grouped attention inside the block; other implementations are left as they are."""
    before = config._attn_implementation
    config._attn_implementation = GROUPED_ATTENTION if before == "sdpa" else before
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend_by_key_group(
    module: Any,
    query: Tensor,  # [B, heads, M, E]
    key: Tensor,  # [B, G, T, E]
    value: Tensor,
    attention_mask: Tensor | None,  # [B, 1, M, T] bool; of a class with a mask of its own [B, heads, M, T]
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [B, M, heads, E]. The heads of a group become additional queries of one head."""
    groups, width = key.shape[1], query.shape[2]
    unknown = any(others.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "sliding_window"))
    if attention_mask is None or attention_mask.shape[1] != 1 or query.shape[1] == groups or unknown:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    rows = query.unflatten(1, (groups, -1)).flatten(2, 3)  # [B, G, heads / G * M, E]
    mask = attention_mask.repeat(1, 1, rows.shape[2] // width, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    out = out.unflatten(2, (-1, width)).flatten(1, 2).transpose(1, 2)
    return out.contiguous(), None  # as transformers' sdpa returns it: some classes view it


AttentionInterface.register(GROUPED_ATTENTION, _attend_by_key_group)


class TargetRunner:
    """A target on transformers' modules, or on fused kernels where CUDA graphs are used and its architecture is supported."""

    def __init__(self, model: PreTrainedModel, pool: SlotPool):
        self.model, self.decoder, self.device = model, model.get_decoder(), model.device
        self.embedding = model.get_input_embeddings().weight  # [V, H]
        self.fused_decoder = self._build_fused_decoder(pool.kv_shapes) if pool.uses_cuda_graphs else None

    def _build_fused_decoder(self, kv_shapes: list[tuple[KVShape, KVShape]]) -> FusedDecoder | None:
        """Return the target on fused kernels, or None where its architecture is not supported."""
        cache = KVCache(kv_shapes, 8, self.model.dtype, self.device)
        return FusedDecoder.build_if_supported(self.model, cache)

    def prefill(
        self, slot: CacheSlots, prompt: list[int], images: ImagePatches | None, layers: list[int]
    ) -> PrefillOutput:
        """Read the whole prompt. Raises ValueError where it has not one token for each merged patch of its images."""
        ids = torch.tensor([prompt], device=self.device)
        count = ids.shape[1]
        rows = slot.positions[None, :count]
        causal = torch.ones(1, 1, count, count, dtype=torch.bool, device=ids.device).tril()
        embeds, positions, rope_offset = self.embedding[ids], None, 0
        with capture_residual_streams(self.model, layers) as streams:
            if is_multimodal(self.model):
                hidden, embeds, positions, rope_offset = self._prefill_multimodal(slot, ids, rows, causal, images)
            else:
                hidden = self.forward(slot, ids, rows, causal, rows, count)
        features = torch.cat([stream[0].to(self.device) for stream in streams], dim=-1) if streams else None
        return PrefillOutput(hidden[0], embeds, positions, rope_offset, features)

    def _prefill_multimodal(
        self, slot: CacheSlots, ids: Tensor, rows: Tensor, causal: Tensor, images: ImagePatches | None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the last hidden [1, T, H], and embeds, positions and rope_offset of `PrefillOutput`."""
        inputs = build_multimodal_inputs(self.model, ["the prompt"], [ids[0].cpu()], [images])
        tapped: list[tuple[Tensor, Tensor]] = []
        with tap_decoder_inputs(self.model, lambda embeds, positions: tapped.append((embeds, positions))):
            out = self.model.base_model(
                input_ids=ids,
                position_ids=inputs.positions[:, None].to(ids.device),
                attention_mask=causal,
                past_key_values=slot.target_cache.bind(rows, ids.shape[1]),
                use_cache=True,
                **build_pixel_kwargs(self.model, inputs),
            )
        return out.last_hidden_state, *tapped[0], int(inputs.positions.max()) + 1 - ids.shape[1]

    def verify(
        self,
        slots: CacheSlots,
        state: DecodeState,
        ids: Tensor,
        positions: Tensor,
        ancestor_mask: Tensor,
        visible_length: int,
        layers: list[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the target over trees behind the caches: ids [B, M] at positions [B, M], ancestor_mask [B, M, M] bool.

        Returns the last hidden [B, M, H] and the streams [B, M, H] entering `layers`.
        """
        width = ids.shape[1]
        rows, positions = state.cache_length + slots.positions[:width], positions + state.rope_offset  # [B, M]
        cache_rows = slots.locate_rows(rows)
        if self.fused_decoder is not None and not slots.exceeds_window:
            hidden, streams = self.fused_decoder.forward(
                ids.flatten(),
                positions.flatten(),
                ancestor_mask,
                state.cache_length[:, 0],
                cache_rows.flatten(),
                slots.target_cache,
                layers,
                slots.capacity,
            )
            return hidden.unflatten(0, ids.shape), [stream.unflatten(0, ids.shape) for stream in streams]
        if not slots.has_dynamic_shapes:
            mask = (slots.positions[:visible_length] < state.cache_length)[:, None].repeat(1, width, 1)
            mask.scatter_(2, rows[:, None].expand(-1, width, -1), ancestor_mask)  # [B, M, visible_length]
        elif width == 1:
            mask = slots.all_true[:, :, :visible_length]
        else:
            prefix = slots.all_true[:, :, : visible_length - width].expand(-1, width, -1)
            mask = torch.cat([prefix, ancestor_mask], dim=2)
        with capture_residual_streams(self.model, layers) as streams:
            hidden = self.forward(slots, ids, positions, mask[:, None], cache_rows, visible_length)
        return hidden, [stream.to(self.device) for stream in streams]

    def forward(
        self, slots: CacheSlots, ids: Tensor, positions: Tensor, mask: Tensor, rows: Tensor, visible_length: int
    ) -> Tensor:
        """ids, positions, cache rows to write [B, M], mask [B, 1, M, visible_length] bool -> last hidden [B, M, H]."""
        cache = slots.target_cache.bind(rows, visible_length)
        masks: Tensor | dict[str, Tensor] = mask
        if slots.exceeds_window:  # of a text target, whose rotary positions are those of its tokens
            own_rows, cached = rows - slots.starts[: len(rows)], slots.positions[:visible_length].expand(len(rows), -1)
            masks = build_layer_masks(self.decoder.config, mask, positions, cached.scatter(1, own_rows, positions))
        with use_grouped_attention(self.decoder.config) if slots.num_slots > 1 else nullcontext():
            out = self.decoder(
                input_ids=ids, position_ids=positions, attention_mask=masks, past_key_values=cache, use_cache=True
            )
        return out.last_hidden_state
