"""Expansion of draft trees in few GPU kernels: `expand_candidates` with fixed memory for everything it keeps.

Own ancestors' keys are not copied along with the beams but written behind the prefix, K rows a step, in the draft's cache.
A small mask [K, T], updated with the beams, admits them; so attention is the same as that of the target's tree.

Letters: B prompts, R rows read of each, H hidden, G key-value heads, E head width, K topk, C candidates, D draft vocabulary,
A query heads, S num_steps, T = (S - 1) * K nodes.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft
from stages.engine.kernels_torch import extend_tree_mask
from stages.engine.target_kernels import SUPPORTED_HEAD_DIMS, fuse_linear_weights, select_kernels
from stages.trees.draft_tree import Candidates


@dataclass(frozen=True)
class DraftRows:
    """Rows that a draft reads before it grows a tree: R of each of B prompts, with the token after each."""

    tokens: Tensor  # [B * R] the token after each row
    features: Tensor  # [B * R, 3H]
    rope_positions: Tensor  # [B * R] or [B * R, 3]
    cache_rows: Tensor  # [B * R] where their keys and values are written
    last: Tensor  # [B] index of the row to grow from


@dataclass(frozen=True)
class DraftCache:
    """Keys and values of the draft, prompt b's from row b * slot_capacity on."""

    keys: Tensor  # [G, capacity, E]
    values: Tensor  # [G, capacity, E]
    length: Tensor  # [B] tokens of each prompt, the rows to read up to the last included
    slot_capacity: int = 0


class FusedDraft:
    """A draft on fused kernels."""

    def __init__(self, draft: Eagle3Draft, embedding: Tensor):
        self.draft, self.embedding = draft, embedding
        self.kernels: Any = select_kernels(embedding.device)
        layer, attention = draft.midlayer, draft.midlayer.self_attn
        self.input_norms = layer.input_layernorm.weight, layer.hidden_norm.weight
        self.qkv = fuse_linear_weights([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = fuse_linear_weights([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.eps, self.scale = draft.config.rms_norm_eps, 1 / math.sqrt(draft.config.head_dim)
        self.head_norms = (attention.q_norm.weight, attention.k_norm.weight, self.eps) if draft.config.qk_norm else None

    @classmethod
    def build_if_supported(cls, draft: Eagle3Draft, embedding: Tensor) -> "FusedDraft | None":
        """Return None where the kernels don't support the draft; trees.expansion does."""
        fits = draft.config.head_dim in SUPPORTED_HEAD_DIMS and draft.fc.weight.dtype == embedding.dtype
        return cls(draft, embedding) if fits else None

    def expand_candidates(
        self, rows: DraftRows, cache: DraftCache, num_steps: int, topk: int, tree_scoring: str
    ) -> Candidates:
        """Read rows, then grow: return all candidates of `num_steps` steps, [B, C]."""
        k, draft, device = self.kernels, self.draft, rows.tokens.device
        keys, values, last, prompts = cache.keys, cache.values, rows.last, len(rows.last)
        fused = draft.fuse_features(rows.features.to(draft.fc.weight.dtype))  # [B * R, H]
        indices = torch.arange(len(rows.tokens), device=device)
        mixed, _ = k.mix_inputs(self.embedding, rows.tokens, fused, indices, self.input_norms, self.eps)
        qkv = k.matmul(mixed, self.qkv)
        rope = self._compute_rope(rows.rope_positions)
        query = k.rotate_and_cache(qkv, self.head_norms, *rope, keys, values, rows.cache_rows)
        no_nodes = torch.zeros(prompts, 1, 0, dtype=torch.bool, device=device)
        from_first = torch.zeros(prompts * topk, dtype=torch.int64, device=device)  # the whole prefix is visible
        state, logits = self._finish_layer(mixed[last], fused[last], query[last], cache, from_first, no_nodes, 0)

        beam, ids = k.select_topk(logits, topk, tree_scoring)  # [B, K]
        beam_tokens = draft.to_target(ids)
        found = Candidates.allocate(beam, beam_tokens, num_steps)
        beam_tokens, numbers = beam_tokens.flatten(), torch.arange(topk, device=device).repeat(prompts, 1)
        starts = torch.arange(prompts, device=device)
        parents = starts.repeat_interleave(topk)  # [B * K] index of the state that each beam continues
        cos, sin = self._compute_step_ropes(rows.rope_positions[last], num_steps, topk)  # [S-1, B * K, E]
        nodes = (num_steps - 1) * topk
        behind = (starts * cache.slot_capacity + cache.length)[:, None] + torch.arange(nodes, device=device)  # [B, T]
        behind = behind.view(prompts, num_steps - 1, topk).transpose(0, 1).flatten(1)  # [S-1, B * K]
        mask = extend_tree_mask(torch.zeros(prompts, topk, nodes, dtype=torch.bool, device=device), 0)
        for step in range(1, num_steps):
            mixed, residual = k.mix_inputs(self.embedding, beam_tokens, state, parents, self.input_norms, self.eps)
            qkv, rope = k.matmul(mixed, self.qkv), (cos[step - 1], sin[step - 1])
            query = k.rotate_and_cache(qkv, self.head_norms, *rope, keys, values, behind[step - 1])
            state, logits = self._finish_layer(mixed, residual, query, cache, from_first, mask, step)
            scores, ids = k.select_topk(logits, topk, tree_scoring)
            beam, numbers, mask, beam_tokens, parents = k.extend_beam(
                step, beam, numbers, mask, scores, ids, draft.d2t, found, tree_scoring
            )
        return found

    def _compute_step_ropes(self, positions: Tensor, num_steps: int, topk: int) -> tuple[Tensor, ...]:
        """positions [B] or [B, 3] of the roots' states -> cos and sin [S-1, B * K, E] of the steps after the first."""
        prompts = len(positions)
        ahead = torch.arange(1, num_steps, device=positions.device)[:, None]  # [S-1, 1]
        later = positions + (ahead if positions.ndim == 1 else ahead[..., None])  # [S-1, B], or [S-1, B, 3]
        shape = num_steps - 1, prompts, self.draft.config.head_dim
        return tuple(x.view(*shape).repeat_interleave(topk, 1) for x in self._compute_rope(later.flatten(0, 1)))

    def _compute_rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Return cos and sin [R, E]; both halves are equal."""
        return tuple(x[:, 0].repeat(1, 2) for x in self.draft.compute_rope(positions))

    def _finish_layer(
        self, mixed: Tensor, residual: Tensor, query: Tensor, cache: DraftCache, first: Tensor, mask: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Queries [M, A, E] of M states -> states [M, H] and logits [M, D]."""
        k, draft, layer = self.kernels, self.draft, self.draft.midlayer
        window = draft.config.sliding_window
        if window is not None:  # it advances with the steps
            first = (cache.length + step - window).clamp(min=0).repeat_interleave(len(query) // len(cache.length))
        seen = cache.keys, cache.values, cache.length, mask, first[: len(query)]
        out = k.attend_tree(query, *seen, self.scale, cache.slot_capacity)
        if draft.config.norm_before_residual:
            residual = mixed[:, residual.shape[1] :].contiguous()
        attended = k.matmul(out.flatten(1), layer.self_attn.o_proj.weight)
        stream, normed = k.add_rms_norm(residual, layer.post_attention_layernorm.weight, self.eps, attended)
        mlp_output = k.matmul(k.gated_matmul(normed, self.gate_up), layer.mlp.down_proj.weight)
        stream, output = k.add_rms_norm(stream, draft.norm.weight, self.eps, mlp_output)
        return (output if draft.config.norm_output else stream), k.matmul(output, draft.lm_head.weight)
