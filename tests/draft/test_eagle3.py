"""The draft's rotation and attention against plain formulas, and what a cast must not touch."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stages.draft import rotary

YARN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


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
