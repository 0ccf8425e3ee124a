"""We read the drafts that other trainers write, in every spelling, and refuse what we cannot run."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stages.draft import published_files
from stages.draft.eagle3 import DraftConfig
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.eagle3 import files as eagle3_files
from stages.params.families import EAGLE3
from tests.draft.eagle3_exports import CHOSEN, EMBEDDING, HEAD, LLAMA3, ROPE, TARGET, H, every_option, export

Spelling = Callable[[dict[str, Any], dict[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]


def sglang(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config, tensors


def vllm(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config, {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}


def prefixed(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return vllm(config, {n if n in ("lm_head.weight", "d2t", "t2d") else f"model.{n}": t for n, t in tensors.items()})


def speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    top_level_keys = (*eagle3_checkpoint.NORM_OPTIONS, "draft_vocab_size")
    inner = {
        k: v
        for k, v in config.items()
        if k not in top_level_keys and not k.startswith("eagle") and k != "architectures"
    }
    outer = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": inner,
        "draft_vocab_size": config["draft_vocab_size"], "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": TARGET.feature_layers, "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3"}, "dtype": "float32",
    } | {k: bool(config.get(k)) for k in eagle3_checkpoint.NORM_OPTIONS}  # fmt: skip
    extra = {"embed_tokens.weight": EMBEDDING, "verifier_norm.weight": torch.ones(H), "verifier_lm_head.weight": HEAD}
    return outer, vllm(config, tensors)[1] | extra


def angelslim(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "eos_token_id")} | {"torch_dtype": "float32"}
    return old, tensors | {"d2t": tensors["d2t"].int(), "t2d": tensors["t2d"].byte()}


def modelopt(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    eagle = {
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in TARGET.feature_layers], "use_aux_hidden_state": True,
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


def read(folder: Path, **options: Any) -> published_files.PublishedDraft:
    return eagle3_files.Files(EAGLE3).read_published_folder(
        folder, options.pop("target", TARGET), lambda: (EMBEDDING, HEAD), **options
    )


def export_own_draft(
    tmp_path: Path, options: dict[str, Any] | None = None, **changes: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = export(tmp_path / "e003", options or {}, **changes)
    return json.loads((tmp_path / "e003/draft/config.json").read_text()), tensors


@every_option
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_our_own_export_comes_back_from_every_spelling(
    tmp_path: Path, spelling: Spelling, options: dict[str, Any]
) -> None:
    config, tensors = export_own_draft(tmp_path, options)
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
    assert DraftConfig.from_json(found.config) == expected


@pytest.mark.parametrize("rope", [ROPE, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize(
    "removed_keys", [[], ["rope_theta", "rope_scaling"], ["rope_parameters"]], ids=["both", "new", "old"]
)
def test_rope_is_read_in_both_spellings(tmp_path: Path, rope: dict[str, Any], removed_keys: list[str]) -> None:
    config, tensors = export_own_draft(tmp_path, rope=rope)
    found = read(publish(tmp_path / "theirs", {k: v for k, v in config.items() if k not in removed_keys}, tensors))
    assert found.config["rope_parameters"] == rope and found.config["rope_theta"] == rope["rope_theta"]


def test_a_head_that_is_left_out_of_the_file_is_the_targets_rows(tmp_path: Path) -> None:
    config, tensors = export_own_draft(tmp_path)
    headless = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    found = read(publish(tmp_path / "theirs", config | {"lm_head_rows": "target"}, headless))
    assert torch.equal(found.tensors["lm_head.weight"], HEAD[tensors["t2d"]].to(tensors["fc.weight"].dtype))
    assert found.config == config and "the target's rows are taken" in found.notes[0]


def test_a_map_is_made_of_t2d_where_that_is_all_there_is(tmp_path: Path) -> None:
    config, tensors = export_own_draft(tmp_path)
    found = read(publish(tmp_path / "theirs", config, {n: t for n, t in tensors.items() if n != "d2t"}))
    assert torch.equal(found.tensors["d2t"], tensors["d2t"])


NOTES = {
    "another embedding": ({}, {"embed_tokens.weight": EMBEDDING + 1}, "", "embed_tokens differs from the target's"),
    "positions": ({"max_position_embeddings": 512}, {}, "", "max_position_embeddings is 512, the target's 640"),
    "a window of no layer": ({"sliding_window": 4096}, {}, "", "sliding_window is 4096, but layer_types names no"),
    "AngelSlim's theta": ({}, {}, "AngelSlim/Qwen3-8B_eagle3", "trained its drafts at rope_theta 10000"),
}


@pytest.mark.parametrize(("changes", "added_tensors", "name", "note"), NOTES.values(), ids=NOTES.keys())
def test_a_value_not_used_as_written_gives_a_note(
    tmp_path: Path, changes: dict[str, Any], added_tensors: dict[str, Tensor], name: str, note: str
) -> None:
    config, tensors = export_own_draft(tmp_path)
    (found,) = read(publish(tmp_path / "theirs", config | changes, tensors | added_tensors), name=name).notes
    assert note in found


REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = {
    "NaN weights": (
        {}, lambda t: t["midlayer.mlp.up_proj.weight"][0].fill_(torch.nan),
        r"\.safetensors: \S*midlayer.mlp.up_proj.weight holds 8 NaN or infinite values of 160, expected finite .* export the"),
    "MLA": ({"kv_lora_rank": 512}, lambda t: None, "kv_lora_rank is 512, expected None"),
    "no features": ({"eagle_config": {"use_aux_hidden_state": False}}, lambda t: None, "use_aux_hidden_state is False"),
    "parts of a rotation": (
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, lambda t: None, "partial_rotary_factor is 0.5"),
    "two thetas": ({"rope_theta": 1e4}, lambda t: None, "rope_theta is 10000.0 and in rope_parameters 500000.0"),
    "SGLang's layers": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 31]}}, lambda t: None,
        r"as SGLang counts.* entering blocks \[2, 18, 32\], .* set target.feature_layers to \[2, 18, 32, 33\]"),
    "vLLM's layers": (
        {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}, lambda t: None,
        r"as vLLM counts\) reads .*entering blocks \[1, 17, 32\], .*without 1, 17, 32"),
    "lists that disagree": (
        {"eagle_aux_hidden_state_layer_ids": [2, 18, 33],
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}}, lambda t: None,
        r"entering blocks \[3, 19, 34\] and \[2, 18, 33\], expected one list"),
    "a missing norm": ({}, lambda t: t.pop("midlayer.hidden_norm.weight"), r"missing tensors \['midlayer.hidden_norm"),
    "a tensor under two names": ({}, lambda t: t.update({"model.fc.weight": HEAD}), "fc.weight under two names"),
    "token ids for offsets": ({}, lambda t: t.update(d2t=torch.tensor(CHOSEN)), "d2t holds no offsets"),
    "no map": ({}, lambda t: (t.pop("d2t"), t.pop("t2d")), "has no d2t"),
    "numbers of eight bits": (
        {}, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "holds float32, float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "spoil", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_we_can_not_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], spoil: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    config, tensors = export_own_draft(tmp_path)
    spoil(tensors)
    with pytest.raises(ValueError, match=message):
        read(publish(tmp_path / "theirs", config | changes, tensors))


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = export_own_draft(tmp_path)
    folder = publish(tmp_path / "theirs", config, tensors)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="found none"):
        read(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin, a pickle, which runs code .* weights_only=True"
    ) as refusal:
        read(folder)
    monkeypatch.chdir(folder)
    exec(str(refusal.value).split('python -c "')[1].split('"')[0], {})
    assert read(folder).config == config
