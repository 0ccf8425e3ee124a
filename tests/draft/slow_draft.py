"""A slow EAGLE-3 draft for comparison: one position at a time, nothing cached, written from the paper.

It shares only the weights with `stages.draft.eagle3` and has its own rotation (complex numbers), its own attention (a Python
loop over heads), its own norm.
"""

from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from stages.draft.eagle3 import DraftConfig, Eagle3Draft

CONFIG = DraftConfig(
    hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=23,
    draft_vocab_size=11, max_position_embeddings=64, rms_norm_eps=1e-6, rope={"rope_theta": 100.0, "rope_type": "default"},
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "fc_norm": True},
    "norm_before_residual": {"norm_before_residual": True},
    "qk_norm": {"qk_norm": True},
    "window": {"sliding_window": 4},
    "all": {
        "fc_norm": True, "norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "qk_norm": True,
        "sliding_window": 5,
    },
}  # fmt: skip


def random_draft(seed: int, scale: float = 0.4, **options: Any) -> tuple[Eagle3Draft, Tensor, Tensor]:
    """A draft whose weights are large enough that its guesses differ, and a target's embedding and head [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    draft = Eagle3Draft(replace(CONFIG, **options))
    _scatter(draft, scale, generator)
    chosen = torch.randperm(CONFIG.vocab_size, generator=generator)[: CONFIG.draft_vocab_size].sort().values
    draft.d2t.copy_(chosen - torch.arange(len(chosen)))
    draft.t2d[chosen] = True
    tables = torch.randn(2, CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    return draft.requires_grad_(False), tables[0], tables[1]


def scatter(module: torch.nn.Module, scale: float, seed: int) -> None:
    """Weights drawn again, norms near 1."""
    _scatter(module, scale, torch.Generator().manual_seed(seed))


def _scatter(module: torch.nn.Module, scale: float, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 else scale * noise


def small_target(vocab_size: int, seed: int, num_layers: int = 4, **options: Any) -> transformers.PreTrainedModel:
    """A random target as wide as CONFIG, whose next token is far from certain: its answers scatter above temperature 0."""
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, **{"max_position_embeddings": 128, **options},
        )
    )  # fmt: skip
    scatter(model, 0.3, seed)
    return model.eval().requires_grad_(False)


def guess(draft: Eagle3Draft, embedding: Tensor, ids: list[int], features: Tensor, p: int, path: list[int]) -> Tensor:
    """Probabilities [D] of the token after `path`, drafted from position p: ids up to p + 1 are known, features up to p."""
    layer, w, c = draft.midlayer, draft.midlayer.self_attn, draft.config
    inputs = [(embedding[ids[j + 1]], draft.fc.weight @ normed_features(draft, features[j]), j) for j in range(p + 1)]
    state = None
    for step in range(len(path) + 1):
        if step:  # the recurrent state, not yet normed (or normed once), with the drafted token, one position on
            inputs.append((embedding[path[step - 1]], state, p + step))
        visible = [x for x in inputs if c.sliding_window is None or x[2] > p + step - c.sliding_window]
        mixed = [torch.cat([norm(e, layer.input_layernorm), norm(h, layer.hidden_norm)]) for e, h, _ in visible]
        positions = [j for _, _, j in visible]
        heads_of = [split(w.k_proj.weight @ m) for m in mixed]
        if c.qk_norm:
            heads_of = [[norm(x, w.k_norm) for x in heads] for heads in heads_of]
        keys = [[turn(x, j) for x in heads] for heads, j in zip(heads_of, positions, strict=True)]
        values = [split(w.v_proj.weight @ m) for m in mixed]
        asking = split(w.q_proj.weight @ mixed[-1])
        queries = [turn(norm(x, w.q_norm) if c.qk_norm else x, positions[-1]) for x in asking]
        heads = []
        for a, q in enumerate(queries):
            g = a // (CONFIG.num_attention_heads // CONFIG.num_key_value_heads)
            weights = torch.softmax(torch.stack([q @ k[g] for k in keys]) / CONFIG.head_dim**0.5, 0)
            heads.append(sum(x * v[g] for x, v in zip(weights, values, strict=True)))
        residual = norm(inputs[-1][1], layer.hidden_norm) if c.norm_before_residual else inputs[-1][1]
        hidden = residual + w.o_proj.weight @ torch.cat(heads)
        x = norm(hidden, layer.post_attention_layernorm)
        gated = torch.nn.functional.silu(layer.mlp.gate_proj.weight @ x) * (layer.mlp.up_proj.weight @ x)
        out = hidden + layer.mlp.down_proj.weight @ gated
        state = norm(out, draft.norm) if c.norm_output else out
    return torch.softmax(draft.lm_head.weight @ norm(out, draft.norm), 0)


def normed_features(draft: Eagle3Draft, features: Tensor) -> Tensor:
    """Return the input of fc for a position's features [3H]."""
    if draft.config.norm_before_fc:
        features = norm(features, draft.input_norm)
    if draft.config.fc_norm:
        features = torch.cat(
            [norm(x, n) for x, n in zip(features.split(CONFIG.hidden_size), draft.fc_norm, strict=True)]
        )
    return features


def norm(x: Tensor, module) -> Tensor:
    return x / (x.pow(2).mean() + CONFIG.rms_norm_eps).sqrt() * module.weight


def split(x: Tensor) -> list[Tensor]:
    return list(x.split(CONFIG.head_dim))


def turn(x: Tensor, position: int) -> Tensor:
    """Rotate pairs (i, i + E/2) by position * theta**(-2i/E), as complex numbers."""
    half = CONFIG.head_dim // 2
    angles = position * CONFIG.rope["rope_theta"] ** (-2 * torch.arange(half, dtype=torch.float64) / CONFIG.head_dim)
    turned = torch.complex(x[:half].double(), x[half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag]).float()
