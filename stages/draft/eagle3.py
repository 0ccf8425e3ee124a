"""The EAGLE-3 draft: one decoder layer that predicts the target's next tokens from the target's hidden features.

EAGLE-3, section 3, https://arxiv.org/abs/2503.01840; tensor names and shapes as SGLang's `LlamaForCausalLMEagle3` and
vLLM load them. Training (`training/ttt.py`), replay and the engine (`trees/expansion.py`) all call this one layer.

    position p:   embed(token p+1), fc(features of p)  --layer-->  hidden p  --norm, lm_head-->  draft of token p+2
    next step:    embed(draft),     hidden p           --layer-->  ...                           draft of token p+3

The recurrent state is the layer's output before the final norm, or after it with `norm_output`. Step k of position p has
rotary position p + k, as in serving. Where token p + 1 is an image token, its embedding is the output of the target's
vision tower, and rotary positions are the target's, on three axes (`target/config_facts.py`). A step attends to the prefix
(step-0 keys of tokens up to p) and to its own ancestors:

                 prefix 0 .. p      own ancestors, self
    step 0:      1 1 1 1 . .        -
    step 2:      1 1 1 1 . .        1 1

With a `sliding_window` W, a step at position p + k attends to W positions including its own, counted as in vLLM and
transformers: to prefix tokens after p + k - W. Own ancestors are never masked, so W must be at least the number of steps.

Dimensions: B rows, T prefix tokens, Q queries of a row, S own ancestors including self, H hidden, D draft vocabulary,
V target vocabulary, A attention heads, G key-value heads, E head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn

import stages.runtime.mkl_first_calls  # noqa: F401 - imported for its side effect
from stages.draft.config_types import check_types
from stages.draft.rotary import RotaryModule
from stages.target.config_facts import assign_frequency_axes
from stages.target.feature_layers import NUM_EAGLE3_FEATURES

SIZE_KEYS = (  # keys of config.json that give the sizes of the layer
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "draft_vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
REQUIRED_KEYS = (*SIZE_KEYS, "model_type", "rope_parameters")


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and options of the draft layer, as config.json has them."""

    hidden_size: int  # H, the target's
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V
    draft_vocab_size: int  # D
    max_position_embeddings: int
    rms_norm_eps: float
    rope: dict[str, Any]  # the target's rope_parameters: rope_theta, rope_type, ...
    # Options, by the engines' names; config.json lists those that are on.
    fc_norm: bool = False  # EAGLE-3.1: RMSNorm of each feature layer before fc
    norm_before_fc: bool = False  # one RMSNorm of the three concatenated features
    norm_output: bool = False  # EAGLE-3.1: the recurrent state is the output after the final norm
    norm_before_residual: bool = False  # the residual is the normed hidden state (speculators' drafts)
    qk_norm: bool = False  # RMSNorm of queries and keys per head, as in Qwen3
    sliding_window: int | None = None  # W

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        """Return the fields found in a draft's config.json; its other keys are ignored.

        Raises ValueError for a missing key and a wrong value.
        """
        check_types(config)
        if missing := [key for key in REQUIRED_KEYS if config.get(key) is None]:
            raise ValueError(f"config.json lacks {missing[0]!r}")
        values = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        return cls(**values, rope=config["rope_parameters"], qk_norm=config["model_type"] == "qwen3")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class DraftAttention(nn.Module):
    """Projections of rows to queries, keys and values, with norms of queries and keys per head or without."""

    def __init__(self, c: Any, num_inputs: int, qk_norm: bool):
        super().__init__()
        self.head_dim, self.qk_norm = c.head_dim, qk_norm
        self.q_proj = nn.Linear(num_inputs, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(num_inputs, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(num_inputs, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        if qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps) for _ in "qk")

    def compute_queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return rotated queries [..., A, E] of normed rows x [..., num_inputs]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return apply_rotary(self.q_norm(q) if self.qk_norm else q, *rope)

    def compute_keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, [..., G, E] each, of normed rows x [..., num_inputs]."""
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        return apply_rotary(self.k_norm(k) if self.qk_norm else k, *rope), v


class DraftMLP(nn.Module):
    """Gated SiLU feed-forward block of the draft layer."""

    def __init__(self, c: Any):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A decoder layer, whose attention reads `num_inputs` numbers of each row; of `norms` it has those named."""

    input_layernorm: RMSNorm  # for the embedding; of a layer that reads no embedding, for its input
    hidden_norm: RMSNorm  # for the fused features or the recurrent state

    def __init__(self, c: Any, num_inputs: int, qk_norm: bool, norms: Sequence[str]):
        super().__init__()
        for name in norms:
            self.add_module(name, RMSNorm(c.hidden_size, c.rms_norm_eps))
        self.self_attn = DraftAttention(c, num_inputs, qk_norm)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = DraftMLP(c)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the output [..., H] from the attention's residual [..., H] and attended [..., A, E]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(RotaryModule):
    """Weights and operations of the draft. Callers pass in the target's embedding."""

    frequency_axes: Tensor | None  # [E/2] int64: position axis of each frequency; None: one axis
    d2t: Tensor  # [D] int64 offsets: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool: target tokens that are in the draft vocabulary

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self._add_layers(config)
        self.register_rope(config.rope, config.head_dim)
        self.register_buffer("frequency_axes", assign_frequency_axes(config.rope, config.head_dim), persistent=False)

    def _add_layers(self, c: DraftConfig) -> None:
        """Add the modules with weights, and the vocabulary; EAGLE's draft has others."""
        self.fc = nn.Linear(NUM_EAGLE3_FEATURES * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = DraftLayer(c, 2 * c.hidden_size, c.qk_norm, ("input_layernorm", "hidden_norm"))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(NUM_EAGLE3_FEATURES * c.hidden_size, c.rms_norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(NUM_EAGLE3_FEATURES))
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))

    def fuse_features(self, features: Tensor) -> Tensor:
        """Fuse the target's features [..., 3H] into [..., H]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = zip(self.fc_norm, features.chunk(NUM_EAGLE3_FEATURES, dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(features)

    def build_layer_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Return the input of the projections [..., 2H] from embeds [..., H] and hidden [..., H]."""
        return torch.cat([self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden)], dim=-1)

    def get_rope_positions(self, positions: Tensor, target_positions: Tensor | None) -> Tensor:
        """Return the argument of `compute_rope` for tokens at `positions` [...] of their row.

        With multimodal RoPE these are the target's positions [..., 3]; for text, where `target_positions` is None, the
        position in the row on all three axes.
        """
        if self.frequency_axes is None:
            return positions
        return positions[..., None].expand(*positions.shape, 3) if target_positions is None else target_positions

    def compute_rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., 1, E/2] for positions of `get_rope_positions`, in the weights' dtype; angles are float32."""
        by_frequency = positions[..., None] if self.frequency_axes is None else positions[..., self.frequency_axes]
        return self.compute_cos_sin(by_frequency, self.fc.weight.dtype)

    def compute_queries(self, layer_input: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return rotated queries [..., A, E] from the layer input [..., 2H]."""
        return self.midlayer.self_attn.compute_queries(layer_input, rope)

    def compute_keys_values(self, layer_input: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, [..., G, E] each, from the layer input [..., 2H]."""
        return self.midlayer.self_attn.compute_keys_values(layer_input, rope)

    def select_residual(self, hidden: Tensor, layer_input: Tensor) -> Tensor:
        """Return the residual of the attention: here hidden [..., H] before its norm; EAGLE overrides it with the layer input."""
        return hidden

    def finish_layer(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [..., H] from its residual, hidden [..., H] before the norm, and attended [..., A, E]."""
        if self.config.norm_before_residual:
            hidden = self.midlayer.hidden_norm(hidden)
        hidden = self.midlayer.finish(hidden, attended)
        return self.norm(hidden) if self.config.norm_output else hidden

    def normalise_output(self, state: Tensor) -> Tensor:
        """Return the input of lm_head: state [..., H] after the final norm, which is applied exactly once."""
        return state if self.config.norm_output else self.norm(state)

    def logits(self, state: Tensor) -> Tensor:
        """Return logits [..., D] over the draft vocabulary for state [..., H]."""
        return self.lm_head(self.normalise_output(state))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Map draft token ids of any shape to target token ids."""
        return draft_ids + self.d2t[draft_ids]


def attend_prefix_and_ancestors(
    q: Tensor,  # [B, Q, A, E]
    k: Tensor,  # [B, T, G, E] the prefix
    v: Tensor,  # [B, T, G, E]
    attention_mask: Tensor | None,  # [B, Q, T] bool: prefix tokens that a query attends to; None: all
    own_k: Tensor | None = None,  # [B, Q, S, G, E] a query's own ancestors and itself
    own_v: Tensor | None = None,  # [B, Q, S, G, E]
) -> Tensor:  # [B, Q, A, E]
    """Attend with one softmax over the prefix and the query's own ancestors; grouped heads share keys without copies."""
    groups = k.shape[2]
    q = q.unflatten(2, (groups, -1)) / math.sqrt(q.shape[-1])  # [B, Q, G, R, E], R query heads per key head
    scores = torch.einsum("bqgre,btge->bqgrt", q, k)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[:, :, None, None], float("-inf"))
    if own_k is None or own_v is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.einsum("bqgrt,btge->bqgre", weights, v).flatten(2, 3)
    own_scores = torch.einsum("bqgre,bqsge->bqgrs", q, own_k)
    weights = torch.softmax(torch.cat([scores, own_scores], dim=-1), dim=-1, dtype=torch.float32).to(q.dtype)
    prefix_weights, own_weights = weights.split([k.shape[1], own_k.shape[2]], dim=-1)
    out = torch.einsum("bqgrt,btge->bqgre", prefix_weights, v)
    return (out + torch.einsum("bqgrs,bqsge->bqgre", own_weights, own_v)).flatten(2, 3)


def build_prefix_mask(positions: Tensor, num_tokens: int, window: int | None, step: int = 0) -> Tensor:
    """Return the prefix mask [B, Q, T] of a step drafted from positions p [B, Q]."""
    index, p = torch.arange(num_tokens, device=positions.device), positions[..., None]
    return index <= p if window is None else (index <= p) & (index > p + step - window)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, E] by cos and sin [..., 1, E/2], in half-split pairs as in Llama."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


@dataclass(frozen=True)
class MultimodalFeatures:
    """Inputs of a draft for a multimodal target, in addition to tokens and features."""

    positions: Tensor  # [B, T, 3] the target's rotary positions
    image_token_mask: Tensor  # [B, T] bool
    image_embeddings: Tensor  # [M, H] of the image tokens, row by row


def encode_prefix(
    draft: Eagle3Draft, ids: Tensor, features: Tensor, embedding: Tensor, multimodal: MultimodalFeatures | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fused hidden states [B, T, H] and step-0 keys and values [B, T, G, E] of rows ids [B, T], features [B, T, 3H].

    Position p pairs its features with token p + 1. The last position has no next token and takes token 0; do not query it.
    """
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    hidden, embeds = draft.fuse_features(features), embedding[following]
    if multimodal is not None:
        mask = multimodal.image_token_mask
        has_predecessor = mask.nonzero()[:, 1] > 0  # no position precedes an image token at index 0
        embeds[:, :-1][mask[:, 1:]] = multimodal.image_embeddings[has_predecessor].to(embeds.dtype)
    index_in_row = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    positions = draft.get_rope_positions(index_in_row, None if multimodal is None else multimodal.positions)
    return hidden, *draft.compute_keys_values(draft.build_layer_input(embeds, hidden), draft.compute_rope(positions))


def compute_first_state(
    draft: Eagle3Draft,
    embeds: Tensor,
    fused: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """Return the state [B, Q, H] of step 0 at rope positions [B, Q], or [B, Q, 3], from embeds and fused [B, Q, H].

    attention_mask [B, Q, T], or None, selects the prefix keys.
    """
    layer_input = draft.build_layer_input(embeds, fused)
    attended = attend_prefix_and_ancestors(
        draft.compute_queries(layer_input, draft.compute_rope(positions)), keys, values, attention_mask
    )
    return draft.finish_layer(draft.select_residual(fused, layer_input), attended)
