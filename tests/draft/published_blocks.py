"""Published block drafts, written by hand in the form of each project from a random block draft.

A form is config.json and tensors. Feature layers are in the project's own numbering: after layer k, transformers'
`hidden_states[k + 1]`, for z-lab, DeepSpec and SpecForge; `hidden_states[i]` for speculators.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from stages.families.block.model import BlockDraft
from stages.params.families import DFLASH2

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Form = Callable[[BlockDraft, int], tuple[Config, Tensors]]  # of a draft for a target of so many layers


def layer_config(draft: BlockDraft) -> Config:
    """The keys that every project copies from a Qwen3 config."""
    c = draft.config
    return {
        "model_type": "qwen3", "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers, "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope["rope_theta"], "rope_scaling": None,
        "max_position_embeddings": c.max_position_embeddings, "vocab_size": c.vocab_size, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
        "layer_types": ["full_attention"] * c.num_hidden_layers, "use_cache": True,
    }  # fmt: skip


def after_layers(draft: BlockDraft) -> list[int]:
    return [i - 1 for i in draft.config.feature_layers]


def weights(draft: BlockDraft) -> Tensors:
    return {name: tensor.clone() for name, tensor in draft.state_dict().items()}


def z_lab(draft: BlockDraft, num_layers: int) -> tuple[Config, Tensors]:
    nested = {"mask_token_id": draft.config.mask_token_id, "target_layer_ids": after_layers(draft)}
    format_keys: Config = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    if draft.config.method == "dflash2":
        format_keys["architectures"], nested = ["DFlash2DraftModel"], nested | dflash2_sizes(draft)
    format_keys |= {"block_size": draft.config.block_size, "dflash_config": nested, "num_target_layers": num_layers}
    return layer_config(draft) | format_keys, weights(draft)


def dflash2_sizes(draft: BlockDraft) -> Config:
    return {name: getattr(draft.config, name) for name in DFLASH2.own_sizes}


def embedded_codebooks(draft: BlockDraft, num_layers: int) -> tuple[Config, Tensors]:
    """DFlash2 with its codebooks as embeddings, as some ports save them."""
    config, tensors = z_lab(draft, num_layers)
    return config, {name + ".weight" * name.endswith("_codebook"): tensor for name, tensor in tensors.items()}


def specforge_dflash(draft: BlockDraft, num_layers: int) -> tuple[Config, Tensors]:
    """All of it nested; an export of FSDP with the prefix `model.`."""
    config, tensors = z_lab(draft, num_layers)
    del config["auto_map"]
    config["dflash_config"] |= {"block_size": config.pop("block_size"), "projector_type": "dflash"}
    config["dflash_config"]["num_target_layers"] = config.pop("num_target_layers")
    return config, {f"model.{name}": tensor for name, tensor in tensors.items()}


def deepspec(draft: BlockDraft, num_layers: int) -> tuple[Config, Tensors]:
    c = draft.config
    format_keys = {
        "architectures": ["Qwen3DSparkModel"], "num_target_layers": num_layers, "block_size": c.block_size,
        "mask_token_id": c.mask_token_id, "target_layer_ids": after_layers(draft), "num_anchors": 512,
        "enable_confidence_head": True, "confidence_head_with_markov": c.confidence_head_with_markov,
        "markov_rank": c.markov_rank, "markov_head_type": "vanilla",
    }  # fmt: skip
    return layer_config(draft) | format_keys, weights(draft)


def specforge_dspark(draft: BlockDraft, num_layers: int) -> tuple[Config, Tensors]:
    """Its heads' keys are under dflash_config alone."""
    config, tensors = deepspec(draft, num_layers)
    nested = {"attention_mode": "gqa", "projector_type": "dspark", "confidence_head_alpha": 1.0}
    for key in ("mask_token_id", "target_layer_ids", "enable_confidence_head", "confidence_head_with_markov"):
        nested[key] = config.pop(key)
    nested |= {key: config.pop(key) for key in ("markov_rank", "markov_head_type")}
    return config | {"architectures": ["DSparkDraftModel"], "dflash_config": nested}, tensors


def specforge_dspark_older(draft: BlockDraft, num_layers: int) -> tuple[Config, Tensors]:
    """With dspark_config beside dflash_config, a model_type of its own, and heads in a container."""
    config, tensors = specforge_dspark(draft, num_layers)
    nested = config["dflash_config"]
    heads = {key: nested.pop(key) for key in [*nested] if "markov" in key or "confidence" in key}
    renamed = {f"logit_head.{n}" if "_head." in n else n: tensor for n, tensor in tensors.items()}
    return config | {"dspark_config": heads, "model_type": "dspark"}, renamed


def speculators(draft: BlockDraft, num_layers: int) -> tuple[Config, Tensors]:
    c = draft.config
    dspark = c.method == "dspark"
    format_keys: Config = {
        "architectures": [{"dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}.get(c.method, "DFlashDraftModel")],
        "speculators_model_type": c.method, "speculators_version": "0.9.0", "model_type": "speculator_model",
        "transformer_layer_config": layer_config(draft), "aux_hidden_state_layer_ids": list(c.feature_layers),
        "draft_vocab_size": c.vocab_size, "block_size": c.block_size, "mask_token_id": c.mask_token_id,
        "sample_from_anchor": dspark, "sliding_window_non_causal": False, "target_hidden_size": None,
        "speculators_config": {
            "algorithm": c.method, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.num_drafts}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "a/target"},
        },
    }  # fmt: skip
    if c.method == "dflash2":
        format_keys |= dflash2_sizes(draft)
    if dspark:
        format_keys |= {"markov_rank": c.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": True}
        format_keys["confidence_head_with_markov"] = c.confidence_head_with_markov
    return format_keys, weights(draft)


FORMS: dict[str, list[Form]] = {  # by method
    "dflash": [z_lab, specforge_dflash, speculators],
    "dflash2": [z_lab, embedded_codebooks, speculators],
    "dspark": [deepspec, specforge_dspark, specforge_dspark_older, speculators],
}


def publish(folder: Path, config: Config, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
