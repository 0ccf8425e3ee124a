"""Engines load what we write.

`Sglang` and `Vllm` below are the loading rules of SGLang 0.5.17 and vLLM, written out from their llama_eagle3.py, and of
vLLM's qwen3_eagle3.py: names and shapes that the model has, and what becomes of each tensor of the file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from stages.draft import eagle3_checkpoint
from stages.runtime import atomic
from tests.draft.eagle3_exports import CHOSEN, LAYERS, every_option, export

STACKED = (("qkv_proj", "q_proj"), ("qkv_proj", "k_proj"), ("qkv_proj", "v_proj"), ("gate_up_proj", "gate_proj"),
           ("gate_up_proj", "up_proj"))  # fmt: skip


def parameters(config: Any, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters, but the embedding, which it shares with the target."""
    h, layer = config.hidden_size, "model.layers.0."
    q, kv = config.head_dim * config.num_attention_heads, config.head_dim * config.num_key_value_heads
    shapes = {
        "model.fc.weight": (h, 3 * h),
        layer + "self_attn.qkv_proj.weight": (q + 2 * kv, 2 * h),
        layer + "self_attn.o_proj.weight": (h, q),
        layer + "mlp.gate_up_proj.weight": (2 * config.intermediate_size, h),
        layer + "mlp.down_proj.weight": (h, config.intermediate_size),
        "model.norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
    }
    shapes |= {f"{layer}{n}.weight": (h,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    if getattr(config, "fc_norm", False):
        shapes |= {f"model.fc_norm.{i}.weight": (h,) for i in range(3)}
    eagle = getattr(config, "eagle_config", None) or {}
    if eagle.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
        shapes["model.input_norm.weight"] = (3 * h,)
    if qk_norm:
        shapes |= {f"{layer}self_attn.{n}.weight": (config.head_dim,) for n in ("q_norm", "k_norm")}
    return shapes


class Engine:
    """Loads `folder`/draft: what each parameter was given, part by part, and what was left out."""

    qk_norm = False

    def __init__(self, folder: Path):
        self.config = AutoConfig.from_pretrained(folder / "draft")
        self.expected_shapes = parameters(self.config, self.qk_norm)
        self.loaded: dict[str, dict[str, Tensor]] = {}
        self.ignored: list[str] = []
        self.targets = torch.arange(self.config.draft_vocab_size)
        for name, tensor in load_file(folder / "draft" / "model.safetensors").items():
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        raise NotImplementedError

    def locate_parameter(self, name: str) -> tuple[str, str]:
        """The parameter that a tensor is part of, and which part; "" where it is all of it."""
        for stacked, part in STACKED:
            if f".{part}" in name:
                return name.replace(part, stacked), part
        return name, ""

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Every parameter whole, of the right shape, with our numbers in it; the maps as they should be."""
        assert self.ignored == []
        assert set(self.loaded) == set(self.expected_shapes)
        for name, shape in self.expected_shapes.items():
            parts = [(stacked, part) for stacked, part in STACKED if stacked in name] or [("", "")]
            own_name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
            loaded = torch.cat([self.loaded[name][part] for _, part in parts])
            written = torch.cat(
                [tensors[own_name.replace(stacked, part) if part else own_name] for stacked, part in parts]
            )
            assert len(self.loaded[name]) == len(parts) and tuple(loaded.shape) == shape, name
            assert torch.equal(loaded, written), name
        assert self.targets.tolist() == CHOSEN and self.targets.dtype == torch.int64


class Sglang(Engine):
    """Unknown names are left out without a word, missing ones stay random."""

    def load(self, name: str, tensor: Tensor) -> None:
        for old, new in (("midlayer", "layers.0"), ("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"),
                         ("aux_norm_high", "fc_norm.2")):  # fmt: skip
            name = name.replace(old, new)
        if "d2t" in name:
            self.targets = tensor + torch.arange(tensor.shape[0])
            return
        if "t2d" in name:
            return
        name, part = self.locate_parameter(name)
        name = name if name in self.expected_shapes else f"model.{name}"
        if name in self.expected_shapes:
            self.loaded.setdefault(name, {})[part] = tensor
        else:
            self.ignored.append(name)

    def captured(self) -> list[int]:
        """The blocks whose entering residual stream feeds the draft."""
        ids = (getattr(self.config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
        return [i + 1 for i in ids] if ids else [2, LAYERS // 2, LAYERS - 3]


class Vllm(Engine):
    """Unknown names raise."""

    def load(self, name: str, tensor: Tensor) -> None:
        if "t2d" in name:
            return
        if "d2t" in name:
            assert tensor.shape == (self.config.draft_vocab_size,)
            self.targets = torch.arange(self.config.draft_vocab_size) + tensor
            return
        if "lm_head" not in name:
            name = "model." + name
        name, part = self.locate_parameter(name.replace("midlayer.", "layers.0."))
        if name not in self.expected_shapes:
            raise KeyError(name)
        self.loaded.setdefault(name, {})[part] = tensor

    def captured(self) -> list[int]:
        ids = getattr(self.config, "eagle_aux_hidden_state_layer_ids", None)
        return list(ids) if ids else [2, LAYERS // 2, LAYERS - 3]

    def window(self) -> int | None:
        kinds = getattr(self.config, "layer_types", None)
        return self.config.sliding_window if kinds and kinds[0] == "sliding_attention" else None


class VllmQwen3(Vllm):
    qk_norm = True


@every_option
def test_engines_load_what_we_write(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = export(tmp_path, options)
    engine = (VllmQwen3 if "qk_norm" in options else Vllm)(tmp_path)
    engine.check(tensors)
    for key in eagle3_checkpoint.NORM_OPTIONS:
        assert bool(getattr(engine.config, key, False)) == (key in options)
    assert engine.window() == options.get("sliding_window")
    architecture = engine.config.architectures
    if "qk_norm" in options:  # SGLang has no such class and stops; as a Llama it would have dropped the norms
        assert architecture == ["Eagle3Qwen3ForCausalLM"] and engine.config.model_type == "qwen3"
        as_llama = json.loads((tmp_path / "draft/config.json").read_text()) | {"model_type": "llama"}
        atomic.write_json(tmp_path / "draft/config.json", as_llama)
        assert sorted(n.split(".")[-2] for n in Sglang(tmp_path).ignored) == ["k_norm", "q_norm"]
        return
    assert architecture == ["LlamaForCausalLMEagle3"] and engine.config.model_type == "llama"
    Sglang(tmp_path).check(tensors)


@pytest.mark.parametrize("layers", [[2, 18, 33], [1, 17, 32], [3, 18, 35]], ids=str)
def test_engines_capture_the_layers_we_trained_on(tmp_path: Path, layers: list[int]) -> None:
    export(tmp_path, {}, layers)
    assert Sglang(tmp_path).captured() == Vllm(tmp_path).captured() == layers


def test_the_exported_file_is_one_that_transformers_opens(tmp_path: Path) -> None:
    export(tmp_path, {})
    with safe_open(tmp_path / "draft/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
