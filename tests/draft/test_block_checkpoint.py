"""Block drafts on disk: names, shapes and keys that engines load, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.families.block.config import BlockDraftConfig, build_block_config, parse_block_config
from stages.families.block.files import Files
from stages.families.block.model import BlockDraft
from stages.params.families import BLOCKS, EAGLE3, FAMILIES, find_family
from tests.draft.slow_block_draft import METHOD_OPTIONS, random_block_draft

FILES = Files(BLOCKS["dflash"])

every_method = pytest.mark.parametrize("method", METHOD_OPTIONS)
PUBLISHED = """
{"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
 "num_hidden_layers": 5,
 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-06,
 "rope_theta": 1000000, "rope_scaling": null, "max_position_embeddings": 40960, "vocab_size": 151936,
 "tie_word_embeddings": false,
 "attention_bias": false,
 "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention", "full_attention"],
 "use_sliding_window": false, "sliding_window": null, "num_target_layers": 36, "dtype": "bfloat16", "block_size": 7,
 "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
 "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "markov_rank": 256, "markov_head_type": "vanilla",
 "enable_confidence_head": true, "confidence_head_with_markov": true, "sample_from_anchor": true}
"""


def list_engine_shapes(c: BlockDraftConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that SGLang and vLLM load, without embedding and head, which are the target's."""
    h, m, e, v, r = c.hidden_size, c.intermediate_size, c.head_dim, c.vocab_size, c.markov_rank
    q, kv, taps = e * c.num_attention_heads, e * c.num_key_value_heads, c.conv_kernel_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h), "self_attn.k_proj.weight": (kv, h), "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q), "self_attn.q_norm.weight": (e,), "self_attn.k_norm.weight": (e,),
        "mlp.gate_proj.weight": (m, h), "mlp.up_proj.weight": (m, h), "mlp.down_proj.weight": (h, m),
    }  # fmt: skip
    for name in ("attention_conv", "mlp_conv") if taps else ():
        kernels = 2 * taps * h // c.conv_group_size
        layer |= {f"{name}.base_kernel": (2, taps, h), f"{name}.kernel_projection.weight": (kernels, h)}
    shapes = {"fc.weight": (h, len(c.feature_layers) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(c.num_hidden_layers) for name, shape in layer.items()}
    if rank := c.selector_rank:
        shapes |= {f"candidate_selector.{side}_codebook": (v, rank) for side in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, h)
    shapes |= {f"markov_head.markov_w{i}.weight": (v, r) for i in (1, 2) if r}
    if c.confidence_head:
        num_inputs = h + (r if c.confidence_head_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, num_inputs), "confidence_head.proj.bias": (1,)}
    return shapes


def make(method: str) -> tuple[BlockDraft, dict[str, Any], dict[str, torch.Tensor]]:
    draft = random_block_draft(1, dtype=torch.float32, **METHOD_OPTIONS[method])[0]
    return draft, build_block_config(draft.config, 8), dict(draft.state_dict())


@every_method
def test_a_draft_is_read_as_written(method: str, tmp_path: Path) -> None:
    draft, config, tensors = make(method)
    FILES.write(tmp_path, config, tensors)
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "draft" / "model.safetensors").items()}
    assert shapes == list_engine_shapes(draft.config)
    found_config, found = FILES.read_checked(tmp_path, "train_draft")
    loaded = BlockDraft(parse_block_config(found_config))
    loaded.load_state_dict(found)
    assert loaded.config == draft.config
    assert all(torch.equal(x, tensors[name]) for name, x in loaded.state_dict().items())


@every_method
def test_each_missing_unknown_or_misshapen_tensor_is_named(method: str, tmp_path: Path) -> None:
    _, config, tensors = make(method)
    for name, tensor in tensors.items():
        assert repr(name) in FILES.find_problem(config, {k: v for k, v in tensors.items() if k != name})
        assert f"{name} is" in FILES.find_problem(config, tensors | {name: tensor[..., :0]})
    assert "unknown ['logit_head.w']" in FILES.find_problem(config, tensors | {"logit_head.w": torch.ones(1)})
    nonfinite = tensors["fc.weight"].clone()
    nonfinite[0, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"fc\.weight holds 1 NaN"):
        FILES.write(tmp_path, config, tensors | {"fc.weight": nonfinite})


@pytest.mark.parametrize(
    ("method", "change", "problem"),
    [
        ("dspark", {"sample_from_anchor": False}, "sample_from_anchor is False, expected True"),
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, "lacks 'conv_kernel_size'"),
        ("dflash2", {"output_multiplier": 2.0}, "output_multiplier is 2.0, expected 1.0"),
        ("dspark", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn'"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window None and use_sliding_window False"),
        ("dflash", {"dflash_config": {"mask_token_id": 22, "target_layer_ids": [0, 1, 2, 3, 7]}}, "layer 8, expected at most 7"),
        ("dflash", {"dflash_config": {"mask_token_id": 23, "target_layer_ids": [0, 1, 2, 3, 4]}}, "mask_token_id is 23"),
        ("dflash", {"dflash_config": {"target_layer_ids": [0, 1, 2, 3, 4]}}, "lacks 'mask_token_id'"),
    ],
)  # fmt: skip
def test_a_config_of_another_model_is_refused(
    method: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    _, config, tensors = make(method)
    assert not FILES.find_problem(config, tensors)
    assert problem in FILES.find_problem(config | change, tensors)
    FILES.write(tmp_path, config, tensors)
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match="is no DFlash draft"):
        FILES.read_checked(tmp_path, "train_draft")


def test_a_family_is_found_by_any_architecture_of_a_config_or_by_its_method() -> None:
    for family in FAMILIES.values():
        assert find_family({"architectures": [family.architecture], "method": family.name}) is family
    assert find_family({"architectures": ["Other", "Qwen3DSparkModel"]}) is FAMILIES["dspark"]
    assert find_family({"architectures": ["LlamaForCausalLMEagle3"]}) is find_family({}) is EAGLE3
