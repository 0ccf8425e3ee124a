"""The EAGLE-3 draft: one decoder layer that guesses the target's next tokens from the target's own features.

EAGLE-3, section 3, https://arxiv.org/abs/2503.01840; tensor names and shapes as SGLang's `LlamaForCausalLMEagle3` and
vLLM load them. Three users share the one layer below, so that what is trained is what is replayed and what is served:
training (`ttt`), replay and the engine (`expand`).

    position p:   embed(token p+1), fc(features of p)  --layer-->  hidden p  --norm, lm_head-->  guess for token p+2
    one step on:  embed(guess),     hidden p           --layer-->  ...                        guess for token p+3

The recurrent state is the layer's output *before* the final norm, unless `norm_output`; step k of position p is rotated
to position p + k, which is where serving feeds it. Where token p + 1 stands for a piece of a picture, its embedding is
the piece's, as the target's vision tower made it, and positions are the target's own, on three axes (`mrope`). Attention
of a step sees the prefix (step-0 keys of tokens up to p) and its own ancestors only:

                 prefix 0 .. p      own ancestors, self
    step 0:      1 1 1 1 . .        -
    step 2:      1 1 1 1 . .        1 1

With a `sliding_window` W, a step that stands at position p + k sees W positions, its own among them, as vLLM and
transformers count them: of the prefix those after p + k - W. Own ancestors are always seen, so W is at least the steps.

Letters: B rows, T prefix tokens, Q queries of a row, S own ancestors with self, H hidden, D draft vocabulary, V target
vocabulary, A attention heads, G key-value heads, E head width.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

import stages.runtime.torch_warmup  # noqa: F401 - its import is its use
from stages.target.mrope import assign_frequency_axes


@dataclass(frozen=True)
class DraftConfig:
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
    # Options, as engines call them; config.json names those that are on.
    fc_norm: bool = False  # EAGLE-3.1: a norm of each feature layer before fc
    norm_before_fc: bool = False  # one norm of all three instead
    norm_output: bool = False  # EAGLE-3.1: the recurrent state is the normed one
    norm_before_residual: bool = False  # the layer's residual is the normed state (speculators' drafts)
    qk_norm: bool = False  # queries and keys normed by head, as in Qwen3
    sliding_window: int | None = None  # W

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "DraftConfig":
        """From a draft's config.json, which holds more keys than these."""
        given = {f.name: config[f.name] for f in fields(cls) if f.name in config}
        return cls(**given, rope=config["rope_parameters"], qk_norm=config["model_type"] == "qwen3")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class DraftAttention(nn.Module):
    """Projections of [embedding, hidden] (2H wide), as EAGLE-3 has them; the attention itself is `attend_prefix_and_ancestors`."""

    def __init__(self, c: DraftConfig):
        super().__init__()
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(c.head_dim, c.rms_norm_eps) for _ in "qk")


class DraftMLP(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # of the embedding
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # of the features or the recurrent state
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = DraftMLP(c)


class Eagle3Draft(nn.Module):
    """The draft's weights and its few operations. The embedding is the target's and is passed in."""

    inverse_frequency: Tensor  # [E/2] float32, whatever the weights are
    axes: Tensor | None  # [E/2] int64: the axis that turns each frequency, where positions have three
    d2t: Tensor  # [D] int64 offsets: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool: is this target token in the draft's vocabulary?

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self._add_layers(config)
        self.register_buffer(
            "inverse_frequency", compute_inverse_frequency(config.rope, config.head_dim), persistent=False
        )
        self.register_buffer("axes", assign_frequency_axes(config.rope, config.head_dim), persistent=False)

    def _add_layers(self, c: DraftConfig) -> None:
        """Add the modules with weights, and the vocabulary; EAGLE's draft has others."""
        self.fc = nn.Linear(3 * c.hidden_size, c.hidden_size, bias=False)
        self.midlayer = DraftLayer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(3 * c.hidden_size, c.rms_norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(3))
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))

    def _apply(self, fn, recurse=True):
        """Moves and casts as any module, but angles stay float32: a table rounded to bfloat16 is off by whole turns."""
        super()._apply(fn, recurse)
        device = self.inverse_frequency.device
        self.inverse_frequency = compute_inverse_frequency(self.config.rope, self.config.head_dim).to(device)
        return self

    @classmethod
    def of(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> "Eagle3Draft":
        """A draft from a checkpoint's config.json and tensors."""
        draft = cls(DraftConfig.from_json(config))
        draft.load_state_dict(tensors)
        return draft

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [..., 3H] -> [..., H]."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = zip(self.fc_norm, features.chunk(3, dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(features)

    def mix(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """What the projections read: embeds [..., H], hidden [..., H] -> [..., 2H]."""
        return torch.cat([self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden)], dim=-1)

    def turning(self, places: Tensor, positions: Tensor | None) -> Tensor:
        """What `rope` takes: places [...] of tokens in their row, or the target's positions [..., 3] of them.

        The latter for a draft with sections; text, whose positions may be None, is at its place on all three axes.
        """
        if self.axes is None:
            return places
        return places[..., None].expand(*places.shape, 3) if positions is None else positions

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...], or [..., 3] (see `turning`) -> cos and sin [..., 1, E/2]; angles in float32, then as the layer."""
        by_frequency = positions[..., None] if self.axes is None else positions[..., self.axes]
        angles = by_frequency[..., None, :].to(torch.float32) * self.inverse_frequency
        return angles.cos().to(self.fc.weight.dtype), angles.sin().to(self.fc.weight.dtype)

    def queries(self, mixed: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """mixed [..., 2H] -> rotated queries [..., A, E]."""
        q = self.midlayer.self_attn.q_proj(mixed).unflatten(-1, (-1, self.config.head_dim))
        return apply_rotary(self.midlayer.self_attn.q_norm(q) if self.config.qk_norm else q, *rope)

    def keys_values(self, mixed: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """mixed [..., 2H] -> rotated keys and values, [..., G, E] each."""
        k = self.midlayer.self_attn.k_proj(mixed).unflatten(-1, (-1, self.config.head_dim))
        v = self.midlayer.self_attn.v_proj(mixed).unflatten(-1, (-1, self.config.head_dim))
        return apply_rotary(self.midlayer.self_attn.k_norm(k) if self.config.qk_norm else k, *rope), v

    def residual(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What attention adds to: here the un-normed hidden [..., H]; other drafts (`eagle`) take what they mixed."""
        return hidden

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer: hidden [..., H] (its residual is un-normed), attended [..., A, E] -> state [..., H]."""
        if self.config.norm_before_residual:
            hidden = self.midlayer.hidden_norm(hidden)
        hidden = hidden + self.midlayer.self_attn.o_proj(attended.flatten(-2))
        hidden = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.config.norm_output else hidden

    def readout(self, state: Tensor) -> Tensor:
        """What the head reads: state [..., H] -> [..., H], normed once."""
        return state if self.config.norm_output else self.norm(state)

    def logits(self, state: Tensor) -> Tensor:
        """state [..., H] -> [..., D] over the draft vocabulary."""
        return self.lm_head(self.readout(state))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft token ids -> target token ids, any shape."""
        return draft_ids + self.d2t[draft_ids]


def attend_prefix_and_ancestors(
    q: Tensor,  # [B, Q, A, E]
    k: Tensor,  # [B, T, G, E] the prefix
    v: Tensor,  # [B, T, G, E]
    allowed: Tensor | None,  # [B, Q, T] bool: which prefix tokens a query sees; None: all
    own_k: Tensor | None = None,  # [B, Q, S, G, E] a query's own ancestors and itself
    own_v: Tensor | None = None,  # [B, Q, S, G, E]
) -> Tensor:  # [B, Q, A, E]
    """One softmax over the prefix and the query's own ancestors; grouped heads read their keys without copying them."""
    groups = k.shape[2]
    q = q.unflatten(2, (groups, -1)) / math.sqrt(q.shape[-1])  # [B, Q, G, R, E], R queries heads a key head
    scores = torch.einsum("bqgre,btge->bqgrt", q, k)
    if allowed is not None:
        scores = scores.masked_fill(~allowed[:, :, None, None], float("-inf"))
    if own_k is None or own_v is None:
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.einsum("bqgrt,btge->bqgre", weights, v).flatten(2, 3)
    own = torch.einsum("bqgre,bqsge->bqgrs", q, own_k)
    weights = torch.softmax(torch.cat([scores, own], dim=-1), dim=-1, dtype=torch.float32).to(q.dtype)
    prefix_weights, own_weights = weights.split([k.shape[1], own_k.shape[2]], dim=-1)
    out = torch.einsum("bqgrt,btge->bqgre", prefix_weights, v)
    return (out + torch.einsum("bqgrs,bqsge->bqgre", own_weights, own_v)).flatten(2, 3)


def build_prefix_mask(where: Tensor, tokens: int, window: int | None, step: int = 0) -> Tensor:
    """where [B, Q]: p of each query -> [B, Q, T] bool, the prefix tokens that a step drafted from p sees."""
    index, p = torch.arange(tokens, device=where.device), where[..., None]
    return index <= p if window is None else (index <= p) & (index > p + step - window)


def compute_inverse_frequency(rope: dict[str, Any], head_dim: int) -> Tensor:
    """RoPE's 1/theta**(2i/E) in float32, [E/2], with the target's own scaling.

    The table is never rounded to bfloat16: a rival's was, and its angles were wrong by up to 2 (research/specforge.md
    W1). Raises ValueError for a rope_type that is not implemented rather than training a wrong one.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (float(rope["rope_theta"]) ** exponents)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return frequency
    if kind == "linear":
        return frequency / rope["factor"]
    if kind == "llama3":  # Llama 3.1: long wavelengths are stretched, short ones kept, a smooth ramp between
        low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        turns = old * frequency / (2 * math.pi)
        ramp = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (ramp + (1 - ramp) / rope["factor"])
    if kind == "dynamic" and rope.get("alpha"):  # Hunyuan: a base stretched once, whatever the length
        return 1.0 / ((float(rope["rope_theta"]) * rope["alpha"] ** (head_dim / (head_dim - 2))) ** exponents)
    raise ValueError(
        f"the target's rope_type {kind!r} is not supported by the draft; known are default, linear, llama3, and dynamic "
        "with an alpha"
    )


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, E], cos and sin [..., 1, E/2] -> x rotated, in half-split pairs as in Llama."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


@dataclass(frozen=True)
class MultimodalFeatures:
    """What rows of a target that sees hold beside tokens."""

    positions: Tensor  # [B, T, 3] the target's rotary positions
    pictured: Tensor  # [B, T] bool: tokens that stand for a piece of a picture
    visual: Tensor  # [M, H] the pieces' embeddings, row by row


def encode_prefix(
    draft: Eagle3Draft, ids: Tensor, features: Tensor, embedding: Tensor, seen: MultimodalFeatures | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The step-0 side of whole rows: ids [B, T], features [B, T, 3H], embedding [V, H].

    Position p pairs its features with token p + 1; the last position has no next token yet and takes token 0, so the
    caller never queries it. Returns fused hidden [B, T, H] and prefix keys and values [B, T, G, E].
    """
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    hidden, embeds = draft.fuse(features), embedding[following]
    if seen is not None:  # a picture that a row begins with follows no position
        after = seen.pictured.nonzero()[:, 1] > 0
        embeds[:, :-1][seen.pictured[:, 1:]] = seen.visual[after].to(embeds.dtype)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    positions = draft.turning(places, None if seen is None else seen.positions)
    return hidden, *draft.keys_values(draft.mix(embeds, hidden), draft.rope(positions))


def compute_first_state(
    draft: Eagle3Draft,
    embeds: Tensor,
    fused: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor | None,
) -> Tensor:
    """Step 0 at chosen positions [B, Q], as `rope` takes them: embeds, fused [B, Q, H], allowed [B, Q, T] or None -> state."""
    mixed = draft.mix(embeds, fused)
    attended = attend_prefix_and_ancestors(draft.queries(mixed, draft.rope(positions)), keys, values, allowed)
    return draft.finish(draft.residual(fused, mixed), attended)
