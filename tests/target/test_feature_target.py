"""A live target says what transformers says of each document alone, for every class; and gradients may be taken beside it."""

import pytest
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from stages.target.feature_target import FeatureTarget
from tests.target import multimodal_documents
from tests.target.test_target_forward import TEXT, V

LAYERS = multimodal_documents.TAPPED


def test_a_block_that_does_not_run_leaves_no_hidden_states() -> None:
    """Bug: Mllama skips its blocks of cross-attention for texts, and what lay in memory was stored as their residual stream."""
    text = TEXT | {"cross_attention_layers": [3], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    sight = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
        "image_size": 28, "vision_output_dim": 32, "intermediate_layers_indices": [0],
    }  # fmt: skip
    model = MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=sight)).eval()
    ids = torch.randint(7, V, (9,))
    assert FeatureTarget(model, [2, 3, 5], None).compute_hidden_states(ids, [9], None).features.shape == (9, 96)
    with pytest.raises(
        ValueError, match=r"MllamaForConditionalGeneration skipped the blocks before feature layers \[4\], expected"
    ):
        FeatureTarget(model, [2, 4, 5], None).compute_hidden_states(ids, [9], None)
