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

import stages.runtime.torch_warmup  # noqa: F401 - its import is its use


def load_target(
    source: str, revision: str | None, dtype: str, device: str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The target in evaluation mode, without gradients, its weights from safetensors only.

    Raises:
        ValueError: naming the source, where its config or its weights are missing, cut or broken.
    """
    logging.disable_progress_bar()  # it prints a bar a tensor
    pinned: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **pinned)
        model = select_auto_class(config).from_pretrained(
            source, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True, **pinned
        )
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{source}: expected the target's config.json and safetensors, found none that can be read "
            f"({type(error).__name__}: {str(error)[:300]}); get the target's files again, those of a builtin target by: "
            "dvc repro -f -s prepare_target"
        ) from error
    model = model.to(device).eval().requires_grad_(False)
    for weight in model.parameters():
        # On the CPU they lie in the mapped file, anywhere, and sums then round otherwise in one process of ten (docs/LOG.md).
        if weight.data_ptr() % 64:
            weight.data = weight.data.clone()
    return model


def select_auto_class(config: PretrainedConfig) -> Any:
    """Which of transformers' Auto classes makes this model: a vision-language config names no causal language model."""
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees and hasattr(config, "vision_config") else AutoModelForCausalLM
