"""EAGLE-3 drafts of random weights as we write them, for tests of what others make of them and we of theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.draft import checkpoint
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.target.manifest import TargetManifest

H, HEADS, KV, E, M, V, D, LAYERS = 8, 4, 2, 4, 20, 30, 5, 36
SHAPE = {
    "hidden_size": H, "intermediate_size": M, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": E, "vocab_size": V, "draft_vocab_size": D, "max_position_embeddings": 640, "rms_norm_eps": 1e-6,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CHOSEN = [3, 4, 11, 12, 29]
TARGET = TargetManifest(
    model="a/target", revision=None, modality="text", config_digest="", tokenizer_digest="", feature_layers=[2, 18, 33],
    hidden_size=H, intermediate_size=M, num_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=E,
    vocab_size=V, rms_norm_eps=1e-6, rope=ROPE, max_position_embeddings=640, tie_word_embeddings=False, eos_token_ids=[7],
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {}, "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True},
    "eagle31": {"fc_norm": True, "norm_output": True}, "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True}, "window": {"sliding_window": 64},
    "qk_norm": {"qk_norm": True}, "qk_norm and eagle31": {"qk_norm": True, "fc_norm": True, "norm_output": True},
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
EMBEDDING, HEAD = torch.randn(2, V, H, generator=torch.Generator().manual_seed(7))


def export(
    folder: Path, options: dict[str, Any], layers: list[int] | None = None, rope: Any = None
) -> dict[str, Tensor]:
    """A draft of random weights as we write it, in folder/draft; returns its tensors."""
    sizes = DraftConfig(**SHAPE, rope=rope or ROPE, **(options or {}))
    config = eagle3_checkpoint.build_eagle3_config(sizes, layers or [2, 18, 33], LAYERS, [7])
    generator = torch.Generator().manual_seed(0)
    tensors = {
        n: torch.randn(s, generator=generator) for n, s in checkpoint.list_shapes(lambda: Eagle3Draft(sizes)).items()
    }
    tensors["d2t"] = torch.tensor([token - index for index, token in enumerate(CHOSEN)])
    tensors["t2d"] = torch.tensor([token in CHOSEN for token in range(V)])
    eagle3_checkpoint.ROOT_FILES.write(folder, config, tensors)
    return tensors
