"""Load the frozen target through transformers' Auto classes: text or vision-language, safetensors only."""

from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

import stages.runtime.torch_warmup  # noqa: F401 - imported for its effect


def load_target(source: str, dtype: str, device: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the target in evaluation mode, without gradients, its weights from safetensors only.

    Raises ValueError naming the source, where its config or its weights are missing, cut or broken.
    """
    logging.disable_progress_bar()  # one bar per tensor
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        model = select_auto_class(config).from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{source}: expected the target's config.json and safetensors, found none that can be read "
            f"({type(error).__name__}: {str(error)[:300]}); get the target's files again, those of a builtin target by: "
            "dvc repro -f -s prepare_target"
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    for weight in model.parameters():
        # Mapped weights on the CPU may be unaligned; sums then round differently in one process of ten (docs/LOG.md).
        if weight.data_ptr() % 64:
            weight.data = weight.data.clone()
    return model


def select_auto_class(config: PretrainedConfig) -> Any:
    """Return the Auto class of this model: a vision-language config has no causal language model."""
    is_known = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if is_known and hasattr(config, "vision_config") else AutoModelForCausalLM
