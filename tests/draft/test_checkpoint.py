"""A draft on disk is what SGLang and vLLM load: names, shapes and maps by hand, config.json read by transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.draft import checkpoint
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.runtime import atomic

H, HEADS, KV_HEADS, HEAD_DIM, M, V, D = 8, 4, 2, 6, 20, 30, 5  # HEADS * HEAD_DIM is not H, as in Qwen3
SHAPE = {
    "hidden_size": H, "intermediate_size": M, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "vocab_size": V, "draft_vocab_size": D, "max_position_embeddings": 640, "rms_norm_eps": 1e-6,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
LAYERS = 36
SIZES = DraftConfig(**SHAPE, rope=ROPE)
CONFIG = eagle3_checkpoint.build_eagle3_config(SIZES, [2, 18, 33], LAYERS, [7])
CHOSEN = [3, 4, 11, 12, 29]  # the target's tokens that the draft knows, ascending

# As in SpecForge's checkpoints and SGLang 0.5.17's llama_eagle3.py; attention reads cat([embedding, feature]), 2H.
EXPECTED = {
    "fc.weight": (8, 24), "midlayer.input_layernorm.weight": (8,), "midlayer.hidden_norm.weight": (8,),
    "midlayer.post_attention_layernorm.weight": (8,), "midlayer.self_attn.q_proj.weight": (24, 16),
    "midlayer.self_attn.k_proj.weight": (12, 16), "midlayer.self_attn.v_proj.weight": (12, 16),
    "midlayer.self_attn.o_proj.weight": (8, 24), "midlayer.mlp.gate_proj.weight": (20, 8),
    "midlayer.mlp.up_proj.weight": (20, 8), "midlayer.mlp.down_proj.weight": (8, 20), "norm.weight": (8,),
    "lm_head.weight": (5, 8), "d2t": (5,), "t2d": (30,),
}  # fmt: skip


def draft() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=g) for name, shape in EXPECTED.items()}
    tensors["d2t"] = torch.tensor([token - index for index, token in enumerate(CHOSEN)])
    tensors["t2d"] = torch.tensor([token in CHOSEN for token in range(V)])
    return tensors


def write_unchecked(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a draft as another program, or an older version, might, without checks."""
    (folder / "draft").mkdir(parents=True)
    atomic.write_json(folder / "draft" / "config.json", config)
    save_file(tensors, folder / "draft" / "model.safetensors")


# --- round trips ----------------------------------------------------------------------------------------------------


def test_a_written_draft_is_read_unchanged(tmp_path: Path) -> None:
    tensors = draft()
    tensors["fc.weight"] = tensors["fc.weight"].T.contiguous().T  # as a transposed warm start is: not contiguous
    eagle3_checkpoint.ROOT_FILES.write(tmp_path / "e003", CONFIG, tensors)
    config, found = eagle3_checkpoint.ROOT_FILES.read_checked(tmp_path / "e003", "train_draft@e003")
    assert config == CONFIG and set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_draft_of_the_whole_vocabulary_has_no_maps_in_its_file(tmp_path: Path) -> None:
    """Bug: vLLM has no parameter for them then, and did not start."""
    config = eagle3_checkpoint.build_eagle3_config(replace(SIZES, draft_vocab_size=V), [2, 18, 33], LAYERS, [7])
    tensors = draft() | {"lm_head.weight": torch.randn(V, 8), "d2t": torch.zeros(V, dtype=torch.int64)}
    tensors["t2d"] = torch.ones(V, dtype=torch.bool)
    eagle3_checkpoint.ROOT_FILES.write(tmp_path / "e003", config, tensors)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "e003/draft/model.safetensors").keys()
    found = eagle3_checkpoint.ROOT_FILES.read_checked(tmp_path / "e003", "train_draft@e003")[1]
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_file_holds_the_names_and_shapes_engines_ask_for(tmp_path: Path) -> None:
    """SGLang skips an unknown name and leaves what is missing random, without a word."""
    eagle3_checkpoint.ROOT_FILES.write(tmp_path, CONFIG, draft())
    assert sorted(p.name for p in (tmp_path / "draft").iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "draft" / "model.safetensors", framework="pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == EXPECTED  # noqa: SIM118
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file that doesn't say so
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert [int(offset) + index for index, offset in enumerate(d2t)] == CHOSEN  # SGLang: hot_token_id = d2t + arange
    assert t2d.nonzero().flatten().tolist() == CHOSEN


# By option: tensors beside EXPECTED, and keys of config.json, as vLLM's llama_eagle3.py and qwen3_eagle3.py have them; SGLang
# reads the same but q_norm and k_norm, of which it has no class and stops.
NORMS = {f"fc_norm.{i}.weight": (H,) for i in range(3)}
QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
QK_NORMS = {f"midlayer.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
BY_OPTION: list[tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, Any]]] = [
    ({"fc_norm": True, "norm_output": True}, NORMS, {"fc_norm": True, "norm_output": True}),
    ({"norm_before_fc": True}, {"input_norm.weight": (3 * H,)}, {"norm_before_fc": True}),
    ({"norm_before_residual": True}, {}, {"norm_before_residual": True}),
    ({"sliding_window": 64}, {}, {"sliding_window": 64, "layer_types": ["sliding_attention"]}),
    ({"qk_norm": True}, QK_NORMS, QWEN3),
    ({"qk_norm": True, "fc_norm": True}, QK_NORMS | NORMS, QWEN3 | {"fc_norm": True}),
]


@pytest.mark.parametrize(("options", "added", "keys"), BY_OPTION, ids=[" ".join(row[0]) for row in BY_OPTION])
def test_an_option_adds_the_tensors_and_the_keys_that_engines_ask_for(
    options: dict[str, Any], added: dict[str, tuple[int, ...]], keys: dict[str, Any]
) -> None:
    sizes = replace(SIZES, **options)
    assert checkpoint.list_shapes(lambda: Eagle3Draft(sizes)) == EXPECTED | added
    config = eagle3_checkpoint.build_eagle3_config(sizes, [2, 18, 33], LAYERS, [7])
    assert config == CONFIG | keys


def test_layers_other_than_the_default_are_named_as_each_engine_counts_them() -> None:
    """SGLang captures the stream after layer k, which enters the block k + 1; vLLM names the block."""
    config = eagle3_checkpoint.build_eagle3_config(SIZES, [1, 17, 32], LAYERS, [7])
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 16, 31]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 17, 32]
    assert (
        not {"eagle_config", "eagle_aux_hidden_state_layer_ids"} & CONFIG.keys()
    )  # both have the default by themselves


# --- refusals -------------------------------------------------------------------------------------------------------

SPOILT = {
    "a missing tensor": (lambda t: t.pop("midlayer.hidden_norm.weight"), r"missing tensors \['midlayer.hidden_norm"),
    "an unknown name": (lambda t: t.update({"layers.0.x": torch.zeros(1)}), r"unknown \['layers.0.x'\]"),
    "another shape": (lambda t: t.update({"fc.weight": torch.zeros(8, 16)}), r"is \(8, 16\), expected \(8, 24\)"),
    "d2t in int32": (lambda t: t.update(d2t=t["d2t"].int()), "d2t is torch.int32 and t2d torch.bool, expected int64"),
    "d2t as token ids": (lambda t: t.update(d2t=torch.tensor(CHOSEN)), "does not list the tokens that t2d marks"),
    "t2d of other tokens": (lambda t: t.update(t2d=t["t2d"].roll(1)), "does not list the tokens that t2d marks"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT.keys())
def test_what_would_mislead_an_engine_is_neither_written_nor_read(tmp_path: Path, spoil: Any, message: str) -> None:
    tensors = draft()
    spoil(tensors)
    with pytest.raises(AssertionError, match=message):
        eagle3_checkpoint.ROOT_FILES.write(tmp_path, CONFIG, tensors)
    assert list(tmp_path.iterdir()) == []
    write_unchecked(tmp_path / "e003", CONFIG, tensors)
    with pytest.raises(
        ValueError, match=f"e003/draft is no EAGLE-3 draft: .*{message}.*; run: dvc repro -f -s train_draft@e003"
    ):
        eagle3_checkpoint.ROOT_FILES.read_checked(tmp_path / "e003", "train_draft@e003")


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-float("inf"), torch.float16)]
)
def test_weights_that_are_not_finite_are_neither_written_nor_read(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    """Bug: a draft with NaN weights was read, decoded, accepted nothing, and was reported as one of tau 1.000."""
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in draft().items()}
    tensors["fc.weight"][2, 5:8] = value
    with pytest.raises(
        AssertionError, match=r"fc\.weight holds 3 NaN or infinite values of 192, expected finite weights"
    ):
        eagle3_checkpoint.ROOT_FILES.write(tmp_path / "e003", CONFIG, tensors)
    tensors["norm.weight"][0] = value
    write_unchecked(tmp_path / "e003", CONFIG, tensors)
    expected = (
        r"e003/draft/model\.safetensors: \S+ holds \d NaN or infinite values of \d+ \(and 1 more tensors hold some\), "
        "expected finite weights; run: dvc repro -f -s train_draft@e003"
    )
    with pytest.raises(ValueError, match=expected):
        eagle3_checkpoint.ROOT_FILES.read_checked(tmp_path / "e003", "train_draft@e003")


def test_a_large_state_is_in_shards_that_are_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DVC hashes each file in one thread: the state of an 8B draft, one file, took it 11.7 s after each segment."""
    monkeypatch.setattr(checkpoint, "MAX_SHARD_BYTES", 3 * 4 * H)
    moments = {f"exp_avg.{n}": torch.full((H,), float(n)) for n in range(7)}
    checkpoint.write_state(tmp_path, moments, {"epoch": 3, "step": 9})
    shards = sorted(path.name for path in (tmp_path / "state").glob("*.safetensors"))
    assert shards == [f"optimizer-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    found, _ = checkpoint.read_state(tmp_path, "train_draft@e003")
    assert found.keys() == moments.keys()
    assert all(torch.equal(found[name], moments[name]) for name in moments)
    (tmp_path / "state" / shards[1]).unlink()
    with pytest.raises(ValueError, match=rf"{shards[1]} not found; run: dvc repro train_draft@e003"):
        checkpoint.read_state(tmp_path, "train_draft@e003")
