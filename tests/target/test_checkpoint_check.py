"""A target's files: each weight there, of its shape, finite; end tokens in the vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from stages.target import checkpoint_check

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), r"lack lm_head\.weight"),
        (lambda t: t.update({UP: t[UP][:5].clone()}), rf"have {UP} \(5, 16\) where its config says \(24, 16\)"),
        (lambda t: t[UP].__setitem__((0, 0), torch.nan), rf"{UP} hold NaN or infinity"),
    ],
)
def test_a_target_that_transformers_would_complete_at_random_is_refused(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    """Bug: transformers drew what was missing, in each process another; two runs at temperature 0 differed, all exit 0."""
    change(folder, edit)
    with pytest.raises(ValueError, match=message):
        checkpoint_check.check_checkpoint("mine", folder, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 3}, r"lack model\.layers\.2\."),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"transformers can't load it \(its weights are quantised\): ",
        ),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.raises(ValueError, match=message) as refused:
        checkpoint_check.check_checkpoint("mine", folder, False)
    assert "\n" not in str(refused.value)


def test_an_end_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="eos_token_id is 49152, expected ids below 49152"):
        checkpoint_check.check_end_tokens("mine", 49_152, [2, 49_152])
