"""A slow block draft for comparison: one anchor and one slot at a time, context sliced to what precedes it, no masks.

It shares only the weights with `stages.families.block.model`; rotation (complex numbers), attention (a loop over heads) and norms
are its own.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.families.block.config import EVERYTHING, BlockDraftConfig, Sight
from stages.families.block.model import BlockDraft
from stages.params.families import BlockLossWeights

CONFIG = BlockDraftConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=23, max_position_embeddings=64, rms_norm_eps=1e-6, rope={"rope_theta": 100.0, "rope_type": "default"},
    method="dflash", block_size=4, mask_token_id=22, feature_layers=(1, 2, 3, 4, 5),
)  # fmt: skip
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {
        "method": "dflash2", "conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 4,
    },
    "dspark": {"method": "dspark", "markov_rank": 3, "confidence_head": True},
    "dflash_windows": {"sights": (Sight(2, is_causal=True), EVERYTHING)},  # one shorter than a block
    "dflash_causal": {"sights": (Sight(5, is_causal=True),) * 2},
    "dspark_plain": {
        "method": "dspark", "markov_rank": 3, "confidence_head": True, "confidence_head_with_markov": False,
    },
}  # fmt: skip
# Keys of a segment of train_draft.checkpoints beside those that all methods have.
SEGMENT_KEYS: dict[str, dict[str, Any]] = {
    "dflash": {}, "dflash2": {name: size for name, size in METHOD_OPTIONS["dflash2"].items() if name != "method"},
    "dspark": {"markov_rank": METHOD_OPTIONS["dspark"]["markov_rank"]},
}  # fmt: skip


def random_block_draft(
    seed: int, scale: float = 0.4, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[BlockDraft, Tensor, Tensor]:
    """A draft whose weights are large enough that its drafts differ, and a target's embedding and head [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    draft = BlockDraft(replace(CONFIG, **options)).to(dtype)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 and len(parameter) > 1 else scale * noise
    tables = torch.randn(2, draft.config.vocab_size, draft.config.hidden_size, generator=generator, dtype=dtype)
    return draft.requires_grad_(False), tables[0], tables[1]


class SlowContext(NamedTuple):
    """The keys and values of a document's t features, by layer; an anchor's block reads those before it."""

    keys: list[Tensor]  # [t, G, E]
    values: list[Tensor]  # [t, G, E]


def read_context(draft: BlockDraft, features: Tensor) -> SlowContext:
    """Return what every block of a document reads of its features [t, K*H]."""
    c = draft.config
    context = [norm(draft.fc.weight @ f, draft.hidden_norm.weight, c.rms_norm_eps) for f in features]
    keys, values = zip(*(key_values(layer.self_attn, context, 0, c) for layer in draft.layers), strict=True)
    return SlowContext([*keys], [*values])


def key_values(w: Any, rows: list[Tensor], first: int, c: BlockDraftConfig) -> tuple[Tensor, Tensor]:
    """Keys and values [n, G, E] of n rows at the positions from `first` on."""
    keys, values = [torch.zeros(0, c.num_key_value_heads, c.head_dim).to(w.k_proj.weight)] * 2
    for i, x in enumerate(rows):
        heads = (w.k_proj.weight @ x).split(c.head_dim)
        turned = [turn(norm(k, w.k_norm.weight, c.rms_norm_eps), first + i, c) for k in heads]
        keys = torch.cat([keys, torch.stack(turned)[None]])
        values = torch.cat([values, (w.v_proj.weight @ x).view(1, -1, c.head_dim)])
    return keys, values


def block_states(
    draft: BlockDraft, embedding: Tensor, ids: list[int], features: Tensor, a: int, context: SlowContext | None = None
) -> list[Tensor]:
    """The states of all B slots of the block at anchor a of one document, from ids[a] and the features before it.

    `context` is that of the whole document, where its blocks have it in common.
    """
    c = draft.config
    context = context or read_context(draft, features[:a])
    rows = [embedding[ids[a]]] + [embedding[c.mask_token_id]] * (c.block_size - 1)
    for layer, sight, context_keys, context_values in zip(draft.layers, c.layer_sights, *context, strict=True):
        w = layer.self_attn
        inputs = [norm(h, layer.input_layernorm.weight, c.rms_norm_eps) for h in rows]
        normed = convolve(layer.attention_conv, inputs, inputs, 0, c)
        own_keys, own_values = key_values(w, normed, a, c)
        keys, values = torch.cat([context_keys[:a], own_keys]), torch.cat([context_values[:a], own_values])
        attended = []
        for i, x in enumerate(normed):
            heads, first, end = [], 0, len(keys)  # the rows that slot i sees
            if sight.window is not None:
                first = max(0, a + i + 1 - sight.window)
            if sight.is_causal:
                end = a + i + 1
            for index, q in enumerate((w.q_proj.weight @ x).split(c.head_dim)):
                g = index // (c.num_attention_heads // c.num_key_value_heads)
                q = turn(norm(q, w.q_norm.weight, c.rms_norm_eps), a + i, c)
                heads.append(torch.softmax(keys[first:end, g] @ q / c.head_dim**0.5, 0) @ values[first:end, g])
            attended.append(w.o_proj.weight @ torch.cat(heads))
        attended = convolve(layer.attention_conv, attended, inputs, 1, c)
        rows = [row + out for row, out in zip(rows, attended, strict=True)]
        inputs = [norm(h, layer.post_attention_layernorm.weight, c.rms_norm_eps) for h in rows]
        out_rows = []
        for z in convolve(layer.mlp_conv, inputs, inputs, 0, c):
            gate = layer.mlp.gate_proj.weight @ z
            out_rows.append(layer.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ z)))
        rows = [h + out for h, out in zip(rows, convolve(layer.mlp_conv, out_rows, inputs, 1, c), strict=True)]
    return [norm(h, draft.norm.weight, c.rms_norm_eps) for h in rows]


def convolve(conv: Any, rows: list[Tensor], inputs: list[Tensor], side: int, c: BlockDraftConfig) -> list[Tensor]:
    """The rows of one block after DFlash2's convolution, row by row; kernels follow the sublayer's `inputs`."""
    if conv is None:
        return rows
    taps, groups = c.conv_kernel_size, c.hidden_size // c.conv_group_size
    mixed = []
    for i, u in enumerate(inputs):
        dynamic = conv.kernel_projection.weight @ u  # by side, tap and group
        total = torch.zeros_like(rows[i])
        for t in range(min(taps, i + 1)):
            of_channel = [(side * taps + t) * groups + channel // c.conv_group_size for channel in range(len(u))]
            total = total + (conv.base_kernel[side, t] + dynamic[of_channel]) * rows[i - t]
        mixed.append(total)
    return mixed


def select(draft: BlockDraft, logits: Tensor, state: Tensor, previous: int) -> Tensor:
    """The logits of a slot after the token `previous` by DFlash2's selector; -inf but for its candidates."""
    s, chosen = draft.candidate_selector, torch.full_like(logits, -torch.inf)
    context = s.predecessor_codebook[previous] * (s.hidden_projection.weight @ state)
    for token in rank(logits)[: draft.config.selector_top_k]:
        chosen[token] = logits[token] + (context * s.successor_codebook[token]).sum()
    return chosen


def draft_logits(draft: BlockDraft, states: list[Tensor], head: Tensor, previous: list[int]) -> list[Tensor]:
    """Logits of each draft of a block, where `previous` are the tokens before the drafts, the anchor first."""
    drafting = states if draft.config.method == "dspark" else states[1:]
    return [logits_after(draft, head, h, token) for h, token in zip(drafting, previous, strict=True)]


def logits_after(draft: BlockDraft, head: Tensor, state: Tensor, previous: int) -> Tensor:
    """Logits of a slot after the token `previous`."""
    logits = head @ state
    if draft.markov_head is not None:
        return logits + draft.markov_head.markov_w2.weight @ draft.markov_head.markov_w1.weight[previous]
    return logits if draft.candidate_selector is None else select(draft, logits, state, previous)


def confidences(draft: BlockDraft, states: list[Tensor], previous: list[int]) -> list[Tensor]:
    """Logits of the confidence head for each draft."""
    proj, inputs = draft.confidence_head.proj, states
    if draft.config.confidence_head_with_markov:
        inputs = [torch.cat([h, draft.markov_head.markov_w1.weight[t]]) for h, t in zip(states, previous, strict=True)]
    return [proj.weight[0] @ x + proj.bias[0] for x in inputs]


class Document(NamedTuple):
    """One row of t tokens."""

    ids: Tensor  # [t]
    is_supervised: Tensor  # [t] bool
    features: Tensor  # [t, K*H]
    last: Tensor  # [t, H]


class DraftLoss(NamedTuple):
    """The loss of one draft of a block."""

    weight: float
    loss: Tensor
    is_match: bool  # the most probable token is the label


def block_losses(
    draft: BlockDraft, embedding: Tensor, head: Tensor, row: Document, a: int, objective: BlockLossWeights
) -> list[DraftLoss]:
    """The losses of the drafts at anchor a, up to the first token that is not supervised."""
    ids = row.ids.tolist()
    states = block_states(draft, embedding, ids, row.features, a)
    previous = [*ids, *[0] * draft.config.block_size][a : a + draft.config.num_drafts]
    logits, selected = draft_logits(draft, states, head, previous), None
    if draft.candidate_selector is not None:  # the slots' own logits are supervised too
        logits, selected = [head @ h for h in states[1:]], logits
    confidence = None if draft.confidence_head is None else confidences(draft, states, previous)
    losses: list[DraftLoss] = []
    for d, of_draft in enumerate(logits):
        t = a + 1 + d
        if t >= len(ids) or not row.is_supervised[t]:
            break
        q, p = torch.softmax(of_draft, 0), torch.softmax(head @ row.last[t - 1], 0)
        loss = -objective.ce * q[ids[t]].log() + objective.l1 * (q - p).abs().sum()
        alpha = torch.minimum(p, q).sum().detach()
        if confidence is not None:
            s = torch.sigmoid(confidence[d])
            loss = loss - objective.confidence * (alpha * s.log() + (1 - alpha) * (1 - s).log())
        is_match = int(q.argmax()) == ids[t]
        if selected is not None:
            loss = loss - objective.selector * log_select(draft, of_draft, states[1 + d], previous[d], ids[t])
            is_match = int(selected[d].argmax()) == ids[t]
        weight = 1.0 if objective.decay is None else math.exp(-d / objective.decay)
        losses.append(DraftLoss(weight, loss, is_match))
    return losses


def rank(logits: Tensor) -> list[int]:
    """Tokens, the most probable first."""
    values = logits.tolist()
    return sorted(range(len(values)), key=lambda token: -values[token])


def log_select(draft: BlockDraft, logits: Tensor, state: Tensor, previous: int, label: int) -> Tensor:
    """The log-probability of a label among the candidates; a label that is no candidate replaces the last one."""
    s, candidates = draft.candidate_selector, rank(logits)[: draft.config.selector_top_k]
    if label not in candidates:
        candidates[-1] = label
    context = s.predecessor_codebook[previous] * (s.hidden_projection.weight @ state)
    scores = torch.stack([logits[v] + context @ s.successor_codebook[v] for v in candidates])
    return torch.log_softmax(scores, 0)[candidates.index(label)]


def greedy_block(
    draft: BlockDraft, embedding: Tensor, head: Tensor, ids: list[int], features: Tensor, a: int
) -> list[int]:
    """The drafts at anchor a, one after the other."""
    states = block_states(draft, embedding, ids, features, a)
    drafting = states if draft.config.method == "dspark" else states[1:]
    tokens = [ids[a]]
    for h in drafting:
        tokens.append(int(logits_after(draft, head, h, tokens[-1]).argmax()))
    return tokens[1:]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turn(x: Tensor, position: int, c: BlockDraftConfig) -> Tensor:
    """Rotate pairs (i, i + E/2) by position * theta**(-2i/E), as complex numbers; angles in float32, as engines have them."""
    half = c.head_dim // 2
    cos, sin = turn_of(position, half, c.rope["rope_theta"])
    turned = torch.complex(x[:half], x[half:]) * torch.complex(cos.to(x.dtype), sin.to(x.dtype))
    return torch.cat([turned.real, turned.imag])


@cache
def turn_of(position: int, half: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of a position's angles, one a pair."""
    angles = position * (1 / theta ** (torch.arange(half, dtype=torch.float32) / half))
    return angles.cos(), angles.sin()
