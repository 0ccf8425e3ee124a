"""target.json comes back as it went; the target's two tables are found in every layout Hugging Face writes."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from stages.target import manifest

V, H = 24, 8


def made_up(folder: Path, tied: bool = False) -> manifest.TargetManifest:
    return manifest.TargetManifest(
        model=str(folder), revision=None, modality="text", config_digest="c", tokenizer_digest="t",
        feature_layers=[2, 3, 4], hidden_size=H, intermediate_size=16,
        num_layers=7, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        vocab_size=V, rms_norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=64, tie_word_embeddings=tied, eos_token_ids=[1, 2],
    )  # fmt: skip


# --- target.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [lambda m: m.pop("rope"), lambda m: m.update(rope_theta=1.0)], ids=["key less", "key more"]
)
def test_a_manifest_of_another_version_names_what_differs(tmp_path: Path, change: object) -> None:
    fields = asdict(made_up(tmp_path))
    change(fields)  # type: ignore[operator]
    (tmp_path / "target.json").write_text(json.dumps(fields))
    with pytest.raises(
        ValueError, match=r"target\.json is of another version \(.*'rope(_theta)?'\); run: dvc repro prepare_target"
    ):
        manifest.read_manifest(tmp_path)


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", ["1MB", "1KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tables_are_those_transformers_computes_with(
    tmp_path: Path, tied: bool, shard: str, dtype: torch.dtype
) -> None:
    """A tied file holds one table; the head of an untied one is not its embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "1KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)

    embedding, head = manifest.read_embedding_and_head(made_up(tmp_path, tied))
    assert embedding.dtype == head.dtype == torch.float32 and embedding.shape == head.shape == (V, H)
    assert torch.equal(embedding, model.get_input_embeddings().weight.float())
    assert torch.equal(head, model.get_output_embeddings().weight.float())
    assert torch.equal(embedding, head) == tied


def test_a_copy_under_a_longer_name_is_not_taken(tmp_path: Path) -> None:
    """Checkpoints have blocks for more tokens, with tables of their own, and vision towers."""
    names = (
        "model.embed_tokens",
        "model.layers.7.embed_tokens",
        "visual.lm_head",
        "model.layers.7.shared.lm_head",
        "lm_head",
    )
    tensors = {f"{name}.weight": torch.randn(V, H) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    found = manifest.read_embedding_and_head(made_up(tmp_path))
    assert torch.equal(found[0], tensors["model.embed_tokens.weight"]) and torch.equal(
        found[1], tensors["lm_head.weight"]
    )
    save_file({"model.embed_tokens.weight": torch.randn(V, H)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no embed_tokens.weight and lm_head.weight, found \['embed_tokens'\]"):
        manifest.read_embedding_and_head(made_up(tmp_path))


# --- the weights of a local folder ----------------------------------------------------------------------------------


def pinned(folder: Path) -> manifest.TargetManifest:
    """As prepare_target pins a local folder."""
    digest, sample = manifest.digest_files(folder, manifest.WEIGHTS), manifest.sample_weights(folder)
    return replace(made_up(folder), weights_digest=digest, weights_sample=sample)


def replace_weights(folder: Path) -> None:
    """Other weights under the same names, of the same sizes and times."""
    path = folder / "model.safetensors"
    before = path.stat()
    save_file({name: torch.randn(V, H) for name in ("model.embed_tokens.weight", "lm_head.weight")}, path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_replaced_weights_of_a_local_folder_are_refused_until_they_are_prepared(tmp_path: Path) -> None:
    """Bug: the manifest digested config and tokenizer only, so results of two sets of weights stood beside each other."""
    tables = {name: torch.randn(V, H) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tables, tmp_path / "model.safetensors")
    made = pinned(tmp_path)
    assert manifest.resolve_weights_folder(made) == tmp_path
    replace_weights(tmp_path)
    for load in (manifest.resolve_weights_folder, manifest.read_embedding_and_head):
        with pytest.raises(
            ValueError, match=r"holds other weights .* run: dvc repro prepare_target, or restore the former"
        ):
            load(made)
    after = pinned(tmp_path)
    assert manifest.resolve_weights_folder(after) == tmp_path and after.weights_digest != made.weights_digest
