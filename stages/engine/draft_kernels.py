"""The draft's part of a cycle in few kernels: what `expand` does, with fixed places for all it keeps.

Own ancestors' keys are not carried along with beams but lie behind the prefix, K rows a step, in the draft's own cache; who
may see which is a small table [K, T] that the beams' bookkeeping moves on. So attention is that of the target's tree.

Letters: B prompts, R rows read of each, H hidden, G key-value heads, E head width, K topk, C candidates,
T = (num_steps - 1) * K nodes.
"""

import math
from typing import Any

import torch
from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft
from stages.engine.kernels_torch import mark_own_nodes_seen
from stages.engine.target_kernels import SUPPORTED_HEAD_DIMS, fuse_linear_weights, select_kernels
from stages.params.tree_sections import count_candidates
from stages.trees.draft_tree import Candidates


class FusedDraft:
    """A draft, ready to grow trees behind prompts."""

    def __init__(self, draft: Eagle3Draft, embedding: Tensor):
        self.draft, self.embedding = draft, embedding
        self.kernels: Any = select_kernels(embedding.device)
        layer, attention = draft.midlayer, draft.midlayer.self_attn
        self.norms = layer.input_layernorm.weight, layer.hidden_norm.weight
        self.qkv = fuse_linear_weights([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = fuse_linear_weights([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.eps, self.scale = draft.config.rms_norm_eps, 1 / math.sqrt(draft.config.head_dim)
        self.heads = (
            (attention.q_norm.weight, attention.k_norm.weight, self.eps) if draft.config.qk_norm else None
        )  # fmt: skip

    @classmethod
    def of(cls, draft: Eagle3Draft, embedding: Tensor) -> "FusedDraft | None":
        """None where the kernels don't take this draft: `expand` does."""
        fits = draft.config.head_dim in SUPPORTED_HEAD_DIMS and draft.fc.weight.dtype == embedding.dtype
        return cls(draft, embedding) if fits else None

    def grow(
        self,
        tokens: Tensor,  # [B * R] after each row that is read, of B prompts
        features: Tensor,  # [B * R, 3H]
        turns: Tensor,  # [B * R], or [B * R, 3], as `rope` takes them
        last: Tensor,  # [B] which of these rows to grow from
        rows: Tensor,  # [B * R] where their keys and values go
        length: Tensor,  # [B] tokens in each prompt's cache, with these up to the last
        keys: Tensor,  # [G, room, E], prompt b's from row b * each on
        values: Tensor,
        steps: int,
        topk: int,
        semantics: str,
        each: int = 0,
    ) -> Candidates:
        """Read rows, then grow: every candidate of `steps` steps, [B, C]."""
        k, draft, device, prompts = self.kernels, self.draft, tokens.device, len(last)
        fused = draft.fuse_features(features.to(draft.fc.weight.dtype))  # [B * R, H]
        mixed, _ = k.mix_inputs(
            self.embedding, tokens, fused, torch.arange(len(tokens), device=device), self.norms, self.eps
        )
        query = k.rotate_and_cache(k.matmul(mixed, self.qkv), self.heads, *self._rope(turns), keys, values, rows)
        nobody = torch.zeros(prompts, 1, 0, dtype=torch.bool, device=device)
        everything = torch.zeros(prompts * topk, dtype=torch.int64, device=device)  # seen from the first token on
        cache = keys, values, each, length, everything
        state, logits = self._finish(mixed[last], fused[last], query[last], *cache, nobody, 0)

        beam, ids = k.select_topk(logits, topk, semantics)  # [B, K]
        count = count_candidates(steps, topk)
        found = Candidates(
            torch.empty(prompts, count, dtype=torch.float32, device=device),
            *torch.empty(2, prompts, count, dtype=torch.int64, device=device),
        )
        beam_tokens = draft.to_target(ids)
        found.scores[:, :topk], found.tokens[:, :topk], found.parents[:, :topk] = beam, beam_tokens, -1
        beam_tokens, numbers = beam_tokens.flatten(), torch.arange(topk, device=device).repeat(prompts, 1)
        starts = torch.arange(prompts, device=device)
        slots = starts.repeat_interleave(topk)  # [B * K] of the states
        ahead = torch.arange(1, steps, device=device)[:, None]  # [S-1, 1]
        later = turns[last] + (ahead if turns.ndim == 1 else ahead[..., None])  # [S-1, B], or [S-1, B, 3]
        shape = steps - 1, prompts, draft.config.head_dim
        cos, sin = (
            x.view(*shape).repeat_interleave(topk, 1) for x in self._rope(later.flatten(0, 1))
        )  # [S-1, B * K, E]
        nodes = (steps - 1) * topk
        behind = (starts * each + length)[:, None] + torch.arange(nodes, device=device)  # [B, T]
        behind = behind.view(prompts, steps - 1, topk).transpose(0, 1).flatten(1)  # [S-1, B * K]
        sees = mark_own_nodes_seen(torch.zeros(prompts, topk, nodes, dtype=torch.bool, device=device), 0)
        for step in range(1, steps):
            mixed, residual = k.mix_inputs(self.embedding, beam_tokens, state, slots, self.norms, self.eps)
            qkv = k.matmul(mixed, self.qkv)
            query = k.rotate_and_cache(qkv, self.heads, cos[step - 1], sin[step - 1], keys, values, behind[step - 1])
            state, logits = self._finish(mixed, residual, query, *cache, sees, step)
            chances, ids = k.select_topk(logits, topk, semantics)
            beam, numbers, sees, beam_tokens, slots = k.extend_beam(
                step, beam, numbers, sees, chances, ids, draft.d2t, found, semantics
            )
        return found

    def _rope(self, turns: Tensor) -> tuple[Tensor, ...]:
        """cos and sin [R, E], halves alike."""
        return tuple(x[:, 0].repeat(1, 2) for x in self.draft.compute_rope(turns))

    def _finish(
        self, mixed: Tensor, residual: Tensor, query: Tensor, keys: Tensor, values: Tensor, each: int, length: Tensor,
        first: Tensor, sees: Tensor, step: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """From queries [M, A, E] to states [M, H] and logits [M, D]."""
        k, draft, layer = self.kernels, self.draft, self.draft.midlayer
        window = draft.config.sliding_window
        if window is not None:  # it moves on with the steps
            first = (length + step - window).clamp(min=0).repeat_interleave(len(query) // len(length))
        out = k.attend_tree(query, keys, values, length, sees, first[: len(query)], self.scale, each)
        if draft.config.norm_before_residual:
            residual = mixed[:, residual.shape[1] :].contiguous()
        attended = k.matmul(out.flatten(1), layer.self_attn.o_proj.weight)
        stream, normed = k.add_rms_norm(residual, layer.post_attention_layernorm.weight, self.eps, attended)
        fed = k.matmul(k.gated_matmul(normed, self.gate_up), layer.mlp.down_proj.weight)
        stream, read = k.add_rms_norm(stream, draft.norm.weight, self.eps, fed)
        return (read if draft.config.norm_output else stream), k.matmul(read, draft.lm_head.weight)
