"""Drafts are exchanged both ways: engines load what we write, and we read what other trainers write.

`Sglang` and `Vllm` below are the loading rules of SGLang 0.5.17 and vLLM, written out from their llama_eagle3.py, and of
vLLM's qwen3_eagle3.py: names and shapes that the model has, and what becomes of each tensor of the file.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from stages.draft import eagle3_checkpoint, published_eagle3_formats, published_files
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.runtime import atomic
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
MADE = TargetManifest(
    model="a/target", revision=None, modality="text", config_digest="", tokenizer_digest="", feature_layers=[2, 18, 33],
    hidden_size=H, intermediate_size=M, num_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=E,
    vocab_size=V, rms_norm_eps=1e-6, rope=ROPE, max_position_embeddings=640, tie_word_embeddings=False, eos_token_ids=[7],
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "window": {"sliding_window": 64},
    "qk_norm": {"qk_norm": True},
    "qk_norm and eagle31": {"qk_norm": True, "fc_norm": True, "norm_output": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
EMBEDDING, HEAD = torch.randn(2, V, H, generator=torch.Generator().manual_seed(7))


def export(
    place: Path, options: dict[str, Any], layers: list[int] | None = None, rope: Any = None
) -> dict[str, Tensor]:
    """A draft of random weights as we write it, in place/draft; returns its tensors."""
    config = eagle3_checkpoint.build_eagle3_config(SHAPE, rope or ROPE, layers or [2, 18, 33], LAYERS, [7], options)
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) for n, s in eagle3_checkpoint.list_tensor_shapes(config).items()}
    tensors["d2t"] = torch.tensor([token - place for place, token in enumerate(CHOSEN)])
    tensors["t2d"] = torch.tensor([token in CHOSEN for token in range(V)])
    eagle3_checkpoint.write_eagle3_draft(place, config, tensors)
    return tensors


# --- what engines make of our export --------------------------------------------------------------------------------

STACKED = (("qkv_proj", "q_proj"), ("qkv_proj", "k_proj"), ("qkv_proj", "v_proj"), ("gate_up_proj", "gate_proj"),
           ("gate_up_proj", "up_proj"))  # fmt: skip


def parameters(config: Any, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters, but the embedding, which it shares with the target."""
    h, layer = config.hidden_size, "model.layers.0."
    q, kv = config.head_dim * config.num_attention_heads, config.head_dim * config.num_key_value_heads
    made = {
        "model.fc.weight": (h, 3 * h),
        layer + "self_attn.qkv_proj.weight": (q + 2 * kv, 2 * h),
        layer + "self_attn.o_proj.weight": (h, q),
        layer + "mlp.gate_up_proj.weight": (2 * config.intermediate_size, h),
        layer + "mlp.down_proj.weight": (h, config.intermediate_size),
        "model.norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
    }
    made |= {f"{layer}{n}.weight": (h,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    if getattr(config, "fc_norm", False):
        made |= {f"model.fc_norm.{i}.weight": (h,) for i in range(3)}
    eagle = getattr(config, "eagle_config", None) or {}
    if eagle.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
        made["model.input_norm.weight"] = (3 * h,)
    if qk_norm:
        made |= {f"{layer}self_attn.{n}.weight": (config.head_dim,) for n in ("q_norm", "k_norm")}
    return made


class Engine:
    """Loads `folder`/draft: what each parameter was given, part by part, and what was left out."""

    qk_norm = False

    def __init__(self, folder: Path):
        self.config = AutoConfig.from_pretrained(folder / "draft")
        self.wanted = parameters(self.config, self.qk_norm)
        self.given: dict[str, dict[str, Tensor]] = {}
        self.ignored: list[str] = []
        self.targets = torch.arange(self.config.draft_vocab_size)
        for name, tensor in load_file(folder / "draft" / "model.safetensors").items():
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        raise NotImplementedError

    def place(self, name: str) -> tuple[str, str]:
        """The parameter that a tensor is part of, and which part; "" where it is all of it."""
        for stacked, part in STACKED:
            if f".{part}" in name:
                return name.replace(part, stacked), part
        return name, ""

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Every parameter whole, of the right shape, with our numbers in it; the maps as they should be."""
        assert self.ignored == []
        assert set(self.given) == set(self.wanted)
        for name, shape in self.wanted.items():
            parts = [(stacked, part) for stacked, part in STACKED if stacked in name] or [("", "")]
            ours = name.removeprefix("model.").replace("layers.0.", "midlayer.")
            loaded = torch.cat([self.given[name][part] for _, part in parts])
            written = torch.cat([tensors[ours.replace(stacked, part) if part else ours] for stacked, part in parts])
            assert len(self.given[name]) == len(parts) and tuple(loaded.shape) == shape, name
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
        name, part = self.place(name)
        name = name if name in self.wanted else f"model.{name}"
        if name in self.wanted:
            self.given.setdefault(name, {})[part] = tensor
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
        name, part = self.place(name.replace("midlayer.", "layers.0."))
        if name not in self.wanted:
            raise KeyError(name)
        self.given.setdefault(name, {})[part] = tensor

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


def test_the_rules_above_notice_a_lost_and_an_unknown_tensor(tmp_path: Path) -> None:
    """Otherwise the tests above could pass with anything."""
    tensors = export(tmp_path, {"fc_norm": True})
    file = tmp_path / "draft/model.safetensors"
    file.unlink()
    save_file({("extra" if n == "fc_norm.1.weight" else n): t for n, t in tensors.items()}, file, {"format": "pt"})
    assert Sglang(tmp_path).ignored == ["model.extra"]
    with pytest.raises(AssertionError):
        Sglang(tmp_path).check(tensors)
    with pytest.raises(KeyError, match=r"model\.extra"):
        Vllm(tmp_path)


# --- what we make of others' ----------------------------------------------------------------------------------------

Spelling = Callable[[dict[str, Any], dict[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]


def sglang(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config, tensors


def vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config, {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}


def prefixed(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return vllm(config, {n if n in ("lm_head.weight", "d2t", "t2d") else f"model.{n}": t for n, t in tensors.items()})


def speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    own = (*eagle3_checkpoint.NORM_OPTIONS, "draft_vocab_size")
    inner = {k: v for k, v in config.items() if k not in own and not k.startswith("eagle") and k != "architectures"}
    outer = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": inner,
        "draft_vocab_size": config["draft_vocab_size"], "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": MADE.feature_layers, "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3"}, "dtype": "float32",
    } | {k: bool(config.get(k)) for k in eagle3_checkpoint.NORM_OPTIONS}  # fmt: skip
    extra = {"embed_tokens.weight": EMBEDDING, "verifier_norm.weight": torch.ones(H), "verifier_lm_head.weight": HEAD}
    return outer, vllm(config, tensors)[1] | extra


def angelslim(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "eos_token_id")} | {"torch_dtype": "float32"}
    return old, tensors | {"d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].byte()}


def modelopt(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    eagle = {
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in MADE.feature_layers], "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "next_layer_regular": True, "parallel_draft_step": 1,
    }  # fmt: skip
    return config | {"eagle_config": eagle}, vllm(config, {n: t for n, t in tensors.items() if n != "t2d"})[1]


def official(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    angles = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2), "embed_tokens.weight": EMBEDDING}
    return config, tensors | angles


SPELLINGS: list[Spelling] = [sglang, vllm, prefixed, speculators, angelslim, modelopt, official]


def publish(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = (
        [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        if shards > 1
        else ["model.safetensors"]
    )
    for i, file in enumerate(files):
        save_file({n: tensors[n].contiguous() for n in names[i::shards]}, folder / file)
    if shards > 1:
        weight_map = {n: files[i % shards] for i, n in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(folder: Path, **more: Any) -> published_files.PublishedDraft:
    return published_eagle3_formats.read_published_draft(
        folder, more.pop("made", MADE), lambda: (EMBEDDING, HEAD), **more
    )


def ours(
    tmp_path: Path, options: dict[str, Any] | None = None, **more: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = export(tmp_path / "e003", options or {}, **more)
    return json.loads((tmp_path / "e003/draft/config.json").read_text()), tensors


@every_option
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_our_own_export_comes_back_from_every_spelling(
    tmp_path: Path, spelling: Spelling, options: dict[str, Any]
) -> None:
    config, tensors = ours(tmp_path, options)
    found = read(
        publish(tmp_path / "theirs", *spelling(dict(config), dict(tensors)), shards=1 + 2 * (spelling is official))
    )
    assert found.config == config
    assert set(found.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor), name
    assert found.options == options and found.notes == []
    expected = DraftConfig.from_json(config)
    assert {f.name: getattr(expected, f.name) for f in fields(expected) if f.name in options} == options
    assert Eagle3Draft.from_checkpoint(found.config, found.tensors).config == expected


@pytest.mark.parametrize("rope", [ROPE, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("gone", [[], ["rope_theta", "rope_scaling"], ["rope_parameters"]], ids=["both", "new", "old"])
def test_rope_is_read_in_both_spellings(tmp_path: Path, rope: dict[str, Any], gone: list[str]) -> None:
    config, tensors = ours(tmp_path, rope=rope)
    found = read(publish(tmp_path / "theirs", {k: v for k, v in config.items() if k not in gone}, tensors))
    assert found.config["rope_parameters"] == rope and found.config["rope_theta"] == rope["rope_theta"]


def test_rope_with_the_older_word_for_its_type(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path)
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "linear", "factor": 4.0}
    found = read(publish(tmp_path / "theirs", config, tensors)).config["rope_parameters"]
    assert found == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0}


def test_a_whole_vocabulary_needs_no_map_and_shares_the_targets_head(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path)
    bare = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d", "lm_head.weight")}
    found = read(publish(tmp_path / "theirs", config | {"draft_vocab_size": None}, bare))
    assert found.config["draft_vocab_size"] == V
    assert torch.equal(found.tensors["lm_head.weight"], HEAD)
    assert found.tensors["d2t"].tolist() == [0] * V and found.tensors["t2d"].all()
    assert ["head of its own" in note for note in found.notes] == [True]


def test_a_map_is_made_of_t2d_where_that_is_all_there_is(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path)
    found = read(publish(tmp_path / "theirs", config, {n: t for n, t in tensors.items() if n != "d2t"}))
    assert torch.equal(found.tensors["d2t"], tensors["d2t"])


def test_tokens_in_any_order_are_put_in_ascending_order_with_their_rows_of_the_head(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path)
    turn = torch.tensor([4, 0, 3, 1, 2])
    shuffled = {"d2t": torch.tensor(CHOSEN)[turn] - torch.arange(D), "lm_head.weight": tensors["lm_head.weight"][turn]}
    found = read(publish(tmp_path / "theirs", config, tensors | shuffled))
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in ("d2t", "t2d", "lm_head.weight"))


def test_half_precision_stays_and_a_mixture_becomes_the_wider(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path)
    floats = {n: t.bfloat16() for n, t in tensors.items() if t.is_floating_point()}
    found = read(publish(tmp_path / "half", config, tensors | floats))
    assert found.config["dtype"] == "bfloat16" and found.tensors["fc.weight"].dtype == torch.bfloat16
    mixed = tensors | floats | {"norm.weight": tensors["norm.weight"]}
    found = read(publish(tmp_path / "mixed", config, mixed))
    assert found.config["dtype"] == "float32"
    assert {t.dtype for n, t in found.tensors.items() if n not in ("d2t", "t2d")} == {torch.float32}


NOTES = {
    "another embedding": ({}, {"embed_tokens.weight": EMBEDDING + 1}, "", "embed_tokens differs from the target's"),
    "positions": ({"max_position_embeddings": 512}, {}, "", "max_position_embeddings is 512, the target's 640"),
    "a window of no layer": ({"sliding_window": 4096}, {}, "", "sliding_window is 4096, but layer_types names no"),
    "AngelSlim's theta": ({}, {}, "AngelSlim/Qwen3-8B_eagle3", "trained its drafts at rope_theta 10000"),
}


@pytest.mark.parametrize(("changes", "more", "name", "note"), NOTES.values(), ids=NOTES.keys())
def test_a_value_not_used_as_written_gives_a_note(
    tmp_path: Path, changes: dict[str, Any], more: dict[str, Tensor], name: str, note: str
) -> None:
    config, tensors = ours(tmp_path)
    (found,) = read(publish(tmp_path / "theirs", config | changes, tensors | more), name=name).notes
    assert note in found


def test_a_theta_of_ones_own(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path)
    found = read(publish(tmp_path / "theirs", config, tensors), name="AngelSlim/x", rope_theta=10_000.0)
    assert found.config["rope_theta"] == found.config["rope_parameters"]["rope_theta"] == 10_000.0
    assert found.notes == []


REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = {
    "NaN weights": (
        {}, lambda t: t["midlayer.mlp.up_proj.weight"][0].fill_(torch.nan),
        r"\.safetensors: \S*midlayer.mlp.up_proj.weight holds 8 NaN or infinite values of 160, expected finite .* export the"),
    "two layers": ({"num_hidden_layers": 2}, lambda t: None, "num_hidden_layers is 2, expected 1"),
    "another layer's tensors": ({}, lambda t: t.update({"layers.1.mlp.up_proj.weight": HEAD}), r"unknown \['layers.1.mlp"),
    "MLA": ({"kv_lora_rank": 512}, lambda t: None, "kv_lora_rank is 512, expected None"),
    "biases": ({"attention_bias": True}, lambda t: None, "attention_bias is True, expected False"),
    "bias tensors": ({}, lambda t: t.update({"fc.bias": torch.zeros(H)}), r"unknown \['fc.bias'\]"),
    "another activation": ({"hidden_act": "gelu"}, lambda t: None, "hidden_act is 'gelu', expected 'silu'"),
    "four feature layers": ({"num_aux_hidden_states": 4}, lambda t: None, "num_aux_hidden_states is 4, expected 3"),
    "EAGLE-1": ({}, lambda t: t.update({"fc.weight": torch.zeros(H, 2 * H)}), r"fc.weight is \(8, 16\), expected \(8, 24\)"),
    "no features": ({"eagle_config": {"use_aux_hidden_state": False}}, lambda t: None, "use_aux_hidden_state is False"),
    "parts of a rotation": (
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, lambda t: None, "partial_rotary_factor is 0.5"),
    "two thetas": ({"rope_theta": 1e4}, lambda t: None, "rope_theta is 10000.0 and in rope_parameters 500000.0"),
    "another width": ({"hidden_size": 16}, lambda t: None, r"hidden_size is 16, the target's \(a/target\) 8"),
    "another vocabulary": ({"vocab_size": 31}, lambda t: None, r"vocab_size is 31, the target's \(a/target\) 30"),
    "an embedding of its own": ({"target_hidden_size": 16}, lambda t: None, "target_hidden_size is 16, expected 8"),
    "a config without sizes": ({"hidden_size": None}, lambda t: None, "lacks hidden_size"),
    "SGLang's layers": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 31]}}, lambda t: None,
        r"as SGLang counts.* entering blocks \[2, 18, 32\], .* set target.feature_layers to \[2, 18, 32, 33\]"),
    "vLLM's layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}, lambda t: None,
        r"as vLLM counts\) reads .*entering blocks \[1, 17, 32\], .*without 1, 17, 32"),
    "layers in another order": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [17, 1, 32]}}, lambda t: None,
        r"layer_ids \[17, 1, 32\], as SGLang counts, expected ids in increasing order"),
    "two feature layers": ({"eagle_aux_hidden_state_layer_ids": [2, 33]}, lambda t: None,
                           r"\[2, 33\], as vLLM counts, expected 3 ids"),
    "lists that disagree": (
        {"eagle_aux_hidden_state_layer_ids": [2, 18, 33],
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}, lambda t: None,
        r"entering blocks \[3, 19, 34\] and \[2, 18, 33\], expected one list"),
    "a missing norm": ({}, lambda t: t.pop("midlayer.hidden_norm.weight"), r"missing tensors \['midlayer.hidden_norm"),
    "a norm unnamed": ({}, lambda t: t.update({"fc_norm.0.weight": torch.ones(H)}), r"unknown \['fc_norm.0"),
    "a tensor under two names": ({}, lambda t: t.update({"model.fc.weight": HEAD}), "fc.weight under two names"),
    "token ids for offsets": ({}, lambda t: t.update(d2t=torch.tensor(CHOSEN)), "d2t holds no offsets"),
    "a token twice": ({}, lambda t: t.update(d2t=torch.tensor([3, 3, 9, 8, 8])), "d2t holds no offsets"),
    "a map of floats": ({}, lambda t: t.update(d2t=t["d2t"].float()), "d2t is torch.float32"),
    "a map too short": ({}, lambda t: t.update(d2t=t["d2t"][:4]), r"expected int64 \(5,\)"),
    "no map": ({}, lambda t: (t.pop("d2t"), t.pop("t2d")), "has no d2t"),
    "maps that disagree": ({}, lambda t: t.update(t2d=t["t2d"].roll(1)), "t2d does not mark the tokens that d2t lists"),
    "no head": ({}, lambda t: t.pop("lm_head.weight"), "has no lm_head.weight"),
    "numbers of eight bits": (
        {}, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "holds float32, float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "spoil", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_we_can_not_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], spoil: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    config, tensors = ours(tmp_path)
    spoil(tensors)
    with pytest.raises(ValueError, match=message):
        read(publish(tmp_path / "theirs", config | changes, tensors))


def test_layers_that_the_target_was_extracted_with_are_taken(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path, layers=[1, 17, 32])
    found = read(publish(tmp_path / "theirs", config, tensors), made=replace(MADE, feature_layers=[1, 17, 32]))
    assert found.config == config
    with pytest.raises(ValueError, match=r"hidden states here are those of \[2, 18, 33\]"):
        read(tmp_path / "theirs")


@pytest.mark.parametrize("layers", [[2, 18, 33], [1, 17, 32], [10, 18, 34]])
def test_layers_among_those_extracted_are_taken_as_the_draft_lists_them(tmp_path: Path, layers: list[int]) -> None:
    """The target stores those of several families; config.json keeps the draft's own three, or the engines' default."""
    config, tensors = ours(tmp_path, layers=layers)
    union = replace(MADE, feature_layers=[1, 2, 10, 17, 18, 26, 32, 33, 34])
    found = read(publish(tmp_path / "theirs", config, tensors), made=union)
    assert found.config == config and eagle3_checkpoint.read_feature_layers(found.config, LAYERS) == layers


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path) -> None:
    config, tensors = ours(tmp_path)
    folder = publish(tmp_path / "theirs", config, tensors)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="found none"):
        read(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin, a pickle, which runs code .* weights_only=True"
    ) as refusal:
        read(folder)
    code = str(refusal.value).split('python -c "')[1].split('"')[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=folder).returncode == 0
    assert read(folder).config == config


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_cut_file_is_named(tmp_path: Path, name: str) -> None:
    folder = publish(tmp_path / "theirs", *ours(tmp_path), shards=2 if "index" in name else 1)
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"{folder / name} .*(broken|not valid JSON)"):
        read(folder)


def test_an_id_that_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ValueError, match=r"no/such-folder/draft is no folder here, and Hugging Face gave no such draft"
    ):
        published_files.fetch_draft("no/such-folder/draft", None)


def test_the_exported_file_is_one_that_transformers_opens(tmp_path: Path) -> None:
    export(tmp_path, {})
    with safe_open(tmp_path / "draft/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
