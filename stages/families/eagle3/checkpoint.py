"""An EAGLE-3 draft on disk: the files that SGLang's `LlamaForCausalLMEagle3` (0.5.17 to 0.5.23) and vLLM load.

SGLang silently ignores unknown tensor names and leaves missing ones random, so names, shapes and vocabulary maps are checked
on every write and read. config.json says which feature layers the draft reads: [2, n//2, n-3] are the default of both engines
and are not written; other layers are, in each engine's convention.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.draft import checkpoint
from stages.draft.config_types import check_types
from stages.draft.eagle3 import SIZE_KEYS, DraftConfig, Eagle3Draft
from stages.draft.published_files import unify_rope_parameters
from stages.families.draft_files import DraftFiles
from stages.params.families import EAGLE3
from stages.params.section import ROOT_CHECKPOINT
from stages.runtime import guarded_files
from stages.target.feature_layers import (
    default_eagle3_feature_layers,
    engine_default_feature_layers,
    to_after_layer_ids,
    to_entering_ids,
)
from stages.target.manifest import TargetManifest

VOCABULARY_MAPS = ("d2t", "t2d")  # offsets of a draft's ids to the target's, and which of the target's it has
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"  # of SGLang within eagle_config, of vLLM outside
NORM_OPTIONS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
# vLLM loads a draft layer with q/k norms under this architecture. SGLang would silently drop the norms of a Llama draft;
# it refuses this architecture, which it does not know.
QK_NORM_CONFIG = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
LAYER_SIZES = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
IGNORED_KEYS = {  # without effect on a draft
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def build_eagle3_config(
    c: DraftConfig,
    feature_layers: list[int],
    num_layers: int,
    eos_token_ids: list[int],
    dtype: str = "float32",
    size_keys: Sequence[str] = SIZE_KEYS,
) -> dict[str, Any]:
    """Return config.json of a draft of a target of `num_layers`; the sizes are written in the order of `size_keys`.

    RoPE is written in both spellings: transformers 5 reads rope_parameters, SGLang and vLLM may read rope_theta and
    rope_scaling. With `mrope_section` in it, engines give the draft the target's positions on three axes, otherwise plain
    positions. Of the options only enabled ones are written. docs/drafts.md lists the engines that support each.
    """
    rope = c.rope
    plain = rope.get("rope_type", "default") == "default" and "mrope_section" not in rope
    scaling = None if plain else {k: v for k, v in rope.items() if k != "rope_theta"}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": rope,
        **{key: getattr(c, key) for key in size_keys},
    }
    if feature_layers != engine_default_feature_layers(num_layers):
        # SGLang adds one to the ids in eagle_config; vLLM uses its top-level list unchanged.
        config["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS_KEY: to_after_layer_ids(feature_layers)}
        config[LAYER_IDS_KEY] = feature_layers
    config |= {name: True for name in NORM_OPTIONS if getattr(c, name)}
    if c.sliding_window:  # vLLM applies the window only to layers of this type
        config |= {"sliding_window": c.sliding_window, "layer_types": ["sliding_attention"]}
    return config | QK_NORM_CONFIG if c.qk_norm else config


def list_feature_layers(config: dict[str, Any], num_layers: int) -> dict[str, list[int]]:
    """Return the feature layers that a draft's config.json lists for a target of `num_layers`, by a description of each list.

    Ids are those of the blocks that the residual streams enter. Negative ids of vLLM count from the target's end. Raises
    ValueError for a config without a list where the target has fewer than 7 blocks: the engines' default does not fit it.
    """
    layers: dict[str, list[int]] = {}
    if listed := (config.get("eagle_config") or {}).get(LAYER_IDS_KEY):
        layers[f"eagle_config.{LAYER_IDS_KEY} {listed}, as SGLang counts"] = to_entering_ids(listed)
    if listed := config.get(LAYER_IDS_KEY):
        layers[f"{LAYER_IDS_KEY} {listed}, as vLLM counts"] = [i % num_layers if i < 0 else i for i in listed]
    return layers or {"no list, so EAGLE-3's own": _choose_engine_default(num_layers)}


def _choose_engine_default(num_layers: int) -> list[int]:
    """Return the engines' default. Raises ValueError for a target of fewer than 7 blocks, where it is no three streams."""
    default, eagle3_default = engine_default_feature_layers(num_layers), default_eagle3_feature_layers(num_layers)
    if default != eagle3_default:
        raise ValueError(
            f"no {LAYER_IDS_KEY}, and EAGLE-3's own layers are 2, n//2 and n-3, which of this target's {num_layers} blocks are "
            f"{', '.join(map(str, default))}; expected three in increasing order. Write those that the draft was trained on into "
            f"that key, for example {eagle3_default}, or choose another draft"
        )
    return default


def read_feature_layers(config: dict[str, Any], num_layers: int) -> list[int]:
    """Return the feature layers that a draft reads, by the config.json of `build_eagle3_config`, whose lists agree."""
    return next(iter(list_feature_layers(config, num_layers).values()))


class Eagle3Files(DraftFiles):
    """The files of a checkpoint's draft, of EAGLE-3 or a family with its layer.

    The vocabulary maps of a draft over the whole vocabulary are left out: vLLM (0.32, llama_eagle3.py) then knows no parameter of
    that name and does not start; SGLang takes ids as they are.
    """

    config_type: type[DraftConfig] = DraftConfig
    draft_type: Callable[[Any], Eagle3Draft] = Eagle3Draft

    def find_problem(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
        return super().find_problem(config, tensors) or _find_map_problem(tensors["d2t"], tensors["t2d"])

    def read_checked(self, folder: Path, made_by: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        title = f"{self.facts.title} draft"
        return checkpoint.read_draft(folder, made_by, title, self.find_problem, _add_whole_vocabulary)

    def write(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        left_out = VOCABULARY_MAPS if config["draft_vocab_size"] == config["vocab_size"] else ()
        checkpoint.write_draft(folder, config, tensors, self.find_problem, left_out)

    def build_module(self, config: dict[str, Any], head: Tensor, logits_scale: float) -> nn.Module:
        return self.draft_type(self.config_type.from_json(config))

    def list_feature_layers(self, config: dict[str, Any], target: TargetManifest) -> list[int]:
        return read_feature_layers(config, target.num_layers)


ROOT_FILES = Eagle3Files(EAGLE3)


def read_root_draft() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors of e000, from which all drafts take sizes. Raises as `DraftFiles.read_checked`."""
    return ROOT_FILES.read_checked(checkpoint.locate_checkpoint(ROOT_CHECKPOINT), f"init_draft@{ROOT_CHECKPOINT}")


def _add_whole_vocabulary(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Add the maps that `Eagle3Files.write` leaves out."""
    size = len(tensors.get("lm_head.weight", ()))
    if size == config.get("vocab_size") and "d2t" not in tensors:
        tensors |= {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}


def _find_map_problem(d2t: Tensor, t2d: Tensor) -> str:
    """Describe wrong vocabulary maps, or return an empty string."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return f"d2t is {d2t.dtype} and t2d {t2d.dtype}, expected int64 offsets and bool"
    if not torch.equal(t2d.nonzero().flatten(), d2t + torch.arange(len(d2t), device=d2t.device)):
        return "d2t + arange does not list the tokens that t2d marks"
    return ""


def override_config(path: Path, inferred: DraftConfig, fixed: dict[str, Any]) -> DraftConfig:
    """Return the inferred sizes and RoPE, overridden by the file of init_draft.draft_config_path; AngelSlim has the same option.

    `fixed` is the config.json without it, with which the other keys must agree. Raises ValueError for a file that is missing or
    broken, and for a key that is unknown, of a wrong type, or different from its fixed value.
    """
    try:
        found: dict[str, Any] = guarded_files.read_json(path, "correct it, or null")
        check_types(found)
        for key in [key for key in found if key not in {*LAYER_SIZES, *ROPE_KEYS, *IGNORED_KEYS}]:
            if key not in fixed:
                known = ", ".join(sorted({*LAYER_SIZES, *ROPE_KEYS, *fixed}))
                raise ValueError(f"{key} is {found[key]!r}, expected one of {known}: correct it, or leave the key out")
            if found[key] != fixed[key]:
                raise ValueError(
                    f"{key} is {found[key]!r}, expected {fixed[key]!r}, the value of the target or params.yaml"
                )
        sizes = replace(inferred, **{key: found[key] for key in LAYER_SIZES if found.get(key) is not None})
        check_types(asdict(sizes))
        rope = _override_rope(inferred.rope, {key: found[key] for key in ROPE_KEYS if key in found})
        return replace(sizes, rope=rope)
    except ValueError as error:
        raise ValueError(f"params.yaml: init_draft.draft_config_path is {path}: {error}") from None


def _override_rope(rope: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE keys of `overrides` in the spelling of transformers, completed by `rope`: its theta, or its scaling."""
    if "rope_scaling" not in overrides and "rope_parameters" not in overrides:
        return rope | {key: float(theta) for key, theta in overrides.items()}
    has_theta = "rope_theta" in (overrides.get("rope_parameters") or {})
    return unify_rope_parameters(({} if has_theta else {"rope_theta": rope["rope_theta"]}) | overrides)
