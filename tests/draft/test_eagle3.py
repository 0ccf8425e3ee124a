"""The draft's rotation and attention against plain formulas, and what a cast must not touch."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stages.draft import eagle3 as d
from stages.draft import rotary

YARN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10000.0, "rope_type": "default"},
        {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.5},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"original_max_position_embeddings": 7},  # all frequencies are scaled
    ],
    ids=lambda r: r["rope_type"],
)
def test_rotations_are_transformers_own(rope: dict) -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=1, head_dim=128, rope_parameters=dict(rope))
    positions = torch.tensor([[0, 1, 700, 9000]])
    expected = LlamaRotaryEmbedding(config)(torch.empty(1, 4, 128), positions)
    module = rotary.RotaryModule()
    module.register_rope(rope, 128)
    for found, whole in zip(module.compute_cos_sin(positions[..., None], torch.float32), expected, strict=True):
        assert torch.allclose(found[:, :, 0], whole[..., :64], atol=2e-3)  # angles of 9,000 in float32
        assert torch.allclose(found[:, :3, 0], whole[:, :3, :64], atol=1e-4)


def test_attention_is_a_softmax_over_the_prefix_and_the_own_ancestors() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, groups, width = 4, 2, 8
    q = torch.randn(1, 3, heads, width, generator=generator)
    k, v = torch.randn(2, 1, 5, groups, width, generator=generator)
    own_k, own_v = torch.randn(2, 1, 3, 2, groups, width, generator=generator)
    allowed = torch.tensor([[[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]]).bool()
    out = d.attend_prefix_and_ancestors(q, k, v, allowed, own_k, own_v)
    for i in range(3):
        for a in range(heads):
            g = a // (heads // groups)
            keys = [k[0, t, g] for t in range(5) if allowed[0, i, t]] + [own_k[0, i, s, g] for s in range(2)]
            values = [v[0, t, g] for t in range(5) if allowed[0, i, t]] + [own_v[0, i, s, g] for s in range(2)]
            scores = [math.exp((q[0, i, a] @ key).item() / math.sqrt(width)) for key in keys]
            expected = sum(s * value for s, value in zip(scores, values, strict=True)) / sum(scores)
            assert torch.allclose(out[0, i, a], expected, atol=1e-5)
