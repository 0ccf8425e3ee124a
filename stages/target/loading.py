"""Load the frozen target through transformers' Auto classes: text or vision-language, safetensors only."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_accelerate_available, logging

import stages.runtime.mkl_first_calls  # noqa: F401 - imported for its effect
from stages.target import foreign_files, quantisation


def load_target(source: str, dtype: str, device: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the target in evaluation mode, without gradients, its weights from safetensors only.

    Raises ValueError naming the source, where its config or its weights are missing, cut or broken.
    """
    with foreign_files.refuse_unreadable(source, "the target's config.json and safetensors"):
        config = foreign_files.read_config(source, trust_remote_code)
        model = read_model(
            source,
            config,
            trust_remote_code,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            # At once to a GPU, which saves a copy of all weights.
            device_map=device if device.startswith("cuda") and is_accelerate_available() else None,
        )
    model = model.to(device).eval().requires_grad_(False)
    for weight in model.parameters():
        # Mapped weights on the CPU may be unaligned; sums then round differently in one process of ten (docs/LOG.md).
        if weight.data_ptr() % 64:
            weight.data = weight.data.clone()
    return model


def read_model(source: str, config: PretrainedConfig, trust_remote_code: bool, **options: Any) -> Any:
    """Return what `from_pretrained` of the Auto class does, of safetensors, without a bar for each tensor or lists of them."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        return quantisation.load_dequantised(
            select_auto_class(config),
            source,
            config,
            use_safetensors=True,
            generation_config=GenerationConfig(),  # in place of the target's, which transformers may refuse
            trust_remote_code=trust_remote_code,
            **options,
        )
    finally:
        logging.set_verbosity(before)


def check_attention(config: PretrainedConfig, name: str) -> None:
    """Raise ValueError for a class that PyTorch's scaled_dot_product_attention can't compute; remote code is not known here."""
    model_class = select_auto_class(config)._model_mapping.get(type(config), None)
    if not getattr(model_class, "_supports_sdpa", True):
        raise ValueError(
            f"params.yaml: target.model {name} is a {config.model_type}, whose attention scaled_dot_product_attention can't "
            "compute (capped logits, sinks); take another target, as Llama, Qwen3 or Gemma 3"
        )


def check_layers(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError for a model whose decoder has no `layers`."""
    if not hasattr(model.get_decoder(), "layers"):
        raise ValueError(
            f"params.yaml: target.model {name}: {type(model).__name__}.get_decoder() has no `layers`, expected the blocks "
            "there; such a model can't be a target yet"
        )


def select_auto_class(config: PretrainedConfig) -> Any:
    """Return the Auto class of this model: a vision-language config has no causal language model."""
    is_known = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if is_known and hasattr(config, "vision_config") else AutoModelForCausalLM
