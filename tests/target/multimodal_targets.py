"""Tiny random targets that see, of two classes, with the processor that transformers itself would use; and pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.target.chat_templates import tokenizer

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = {
    "qwen3-vl": (
        Qwen3VLForConditionalGeneration, Qwen3VLConfig, Qwen3VLProcessor,
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16, "out_hidden_size": 64,
         "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, Qwen2_5_VLProcessor,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64,
         "window_size": 56, "fullatt_block_indexes": [1]},
    ),
}  # fmt: skip


def save(kind: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    """A target in `folder`, as prepare_target finds one: the model, and transformers' own processor for it."""
    model_class, config_class, processor_class, text, vision = KINDS[kind]
    tok, eos = tokenizer("qwen3-vl")
    tok.add_special_tokens({"additional_special_tokens": ["<|video_pad|>"]})
    ids = {
        f"{name}_token_id": tok.convert_tokens_to_ids(f"<|{mark}|>")
        for name, mark in (
            ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")
        )
    }  # fmt: skip
    torch.manual_seed(5)
    sizes = {"vocab_size": len(tok), "bos_token_id": None, "eos_token_id": eos[0], "pad_token_id": eos[0]}
    model = model_class(config_class(text_config={**TEXT, **text, **sizes}, vision_config=vision, **ids)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # so that pictures and positions matter, as they do not at first
            if weight.ndim > 1:
                weight.mul_(6 if "visual" in name else 3)
    images = Qwen2VLImageProcessorPil(
        patch_size=vision["patch_size"], merge_size=2, size={"shortest_edge": 1024, "longest_edge": 128 * 128}
    )
    for part in (model, tok, images):
        part.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:  # films need torchvision; pictures do not
        patch.setattr(processor_class, "check_argument_for_proper_class", lambda *_: None)
        made = processor_class(images, tok, video_processor=None, chat_template=tok.chat_template)
        return model, made


def picture(path: Path, height: int, width: int, seed: int = 0, mode: str = "RGB", **how: Any) -> str:
    """A file of noise in broad strokes, that resizing does not wash out."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (3, 4, len(mode) if mode in ("RGB", "RGBA") else 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST).convert(mode).save(path, **how)
    return str(path)
