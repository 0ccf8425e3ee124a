"""A block draft's files: those of config.py, and published drafts of any known format, read into the same form.

    z-lab          DFlashDraftModel                       keys under dflash_config, auto_map
    DeepSpec       Qwen3DSparkModel                       keys at the top; its own "DFlash" is DSpark's form with markov_rank 0
    SpecForge      DFlashDraftModel, DSparkDraftModel     keys under dflash_config or dspark_config; older logit_head.*
    z-lab, vLLM    DFlash2DraftModel                      keys under dflash_config
    speculators    speculators_model_type                 the layer under transformer_layer_config, feature layers counted as here

A draft that would run differently here than where it was trained is refused by name: another method under the same name, layers
of another kind, heads without weights. A value that is not used as written gives a note. Sources: the configs and models of
z-lab/dflash, deepseek-ai/DeepSpec, SpecForge and speculators 0.9.0, and the loaders of SGLang 0.5.23 and vLLM 0.33.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.draft import published_files
from stages.draft.published_files import BLOCK_SECTIONS, PublishedDraft, ReadEmbeddingAndHead
from stages.families.block import mask_token
from stages.families.block.config import (
    OWN_SIZES,
    SLIDING,
    BlockDraftConfig,
    Sight,
    build_block_config,
    parse_block_config,
    read_sights,
)
from stages.families.block.model import BlockDraft
from stages.families.draft_files import DraftFiles
from stages.params import schema
from stages.params.draft_sections import ImportedCheckpoint
from stages.params.families import BLOCKS, DraftKind
from stages.target import manifest
from stages.target.feature_layers import locate_feature_layers, to_entering_ids
from stages.target.manifest import TargetManifest

METHOD_NAMES = {  # by architecture; of speculators by speculators_model_type too
    str(name): family.name for family in BLOCKS.values() for name in (family.architecture, *family.published_as)
}
MODEL_TYPES = ("qwen3", "dspark", "speculator_model")  # DSpark's own in SpecForge; speculators' layers are Qwen3's
FIRST_SLOT_KEYS = ("sample_from_anchor", "shift_label", "query_zero_predicts_next")  # three names of one choice
TENSOR_RENAMES = ((r"^model\.", ""), (r"^logit_head\.", ""), (r"_codebook\.weight$", "_codebook"))
MARKOV_TENSORS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE_TENSOR = "confidence_head.proj.weight"
# The only supported value of each key, at the top or in a section; an absent key has this value.
REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "markov_head_type": "vanilla", "attention_mode": "gqa", "kv_lora_rank": None, "q_lora_rank": None,
    "attention_sink_bias": False, "attention_value_scale": 1.0, "use_gemma_norm": False, "input_embedding_scale": 1.0,
    "output_multiplier": 1.0, "final_logit_softcapping": None, "gru_hidden_dim": None,
}  # fmt: skip
REQUIRED_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
# Defaults of transformers' Qwen3Config, which all projects use.
DEFAULT_SIZES = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6}


class Files(DraftFiles):
    """Block drafts of any method; embedding and head are the target's and not written."""

    def build_module(self, config: dict[str, Any], head: Tensor, logits_scale: float) -> nn.Module:
        return BlockDraft(parse_block_config(config))

    def list_feature_layers(self, config: dict[str, Any], target: TargetManifest) -> list[int]:
        return list(parse_block_config(config).feature_layers)

    def describe(self, config: dict[str, Any]) -> DraftKind:
        parsed = parse_block_config(config)
        return DraftKind(self.facts, parsed.num_drafts, parsed.selector_top_k or None)

    def read_published(
        self, folder: Path, item: ImportedCheckpoint, params: schema.Params, target: TargetManifest
    ) -> PublishedDraft:
        """Compare the draft's mask token with the target's tokenizer, too."""
        read_tables = partial(manifest.read_embedding_and_head, target)
        return self.read_published_folder(
            folder, target, mask_token.load_tokenizer(params, target), read_tables, item.rope_theta
        )

    def read_published_folder(
        self,
        folder: Path,
        target: TargetManifest,
        tokenizer: Any,
        read_tables: ReadEmbeddingAndHead,
        rope_theta: float | None = None,
    ) -> PublishedDraft:
        """Read the draft in `folder` for `target`, whose tokenizer is `tokenizer`.

        `rope_theta` overrides the value of its config. Raises ValueError for sizes, feature layers or a mask token that do not
        fit the target, for another model than model.py runs, and for missing or corrupt files.
        """
        if (folder / published_files.MASK_EMBEDDING_FILE).exists():
            raise ValueError(
                f"{folder} has {published_files.MASK_EMBEDDING_FILE}, a pickle with an embedding of its own for the mask token; "
                "expected a draft whose mask token is a row of the target's: choose another draft"
            )
        raw = published_files.read_flat_config(folder)
        keys = _BlockKeys(folder, raw)
        notes: list[str] = []
        method = _read_method(keys, notes)
        _check_values(keys)
        published_files.check_sizes(folder, raw, REQUIRED_SIZES, target)
        if raw.get("draft_vocab_size") not in (None, raw["vocab_size"]):
            raise ValueError(
                f"{folder}/config.json: draft_vocab_size is {raw['draft_vocab_size']}, expected the target's "
                f"{raw['vocab_size']}: a block draft shares the target's head; choose one of the whole vocabulary"
            )
        with published_files.name_config(folder):
            rope = published_files.unify_rope_parameters(raw) | (
                {} if rope_theta is None else {"rope_theta": rope_theta}
            )
        mask, block_size = (keys.require_count(key) for key in ("mask_token_id", "block_size"))
        layers, sights = _read_feature_layers(keys, target), _read_sights(keys, notes)
        with published_files.name_config(folder):
            notes += filter(None, [mask_token.check_published_mask_token(mask, tokenizer, target)])
        tensors = published_files.read_tensors(folder, TENSOR_RENAMES)
        published_files.drop_copies(tensors, published_files.TABLES, read_tables, notes)
        if "t2d" in tensors and bool((tensors["t2d"] != 0).all()):  # maps of the whole vocabulary
            del tensors["t2d"]
        if "d2t" in tensors and not bool(tensors["d2t"].any()):
            del tensors["d2t"]
        own_sizes = {key: keys.require_count(key) for key in BLOCKS[method].own_sizes}
        if "markov_rank" in own_sizes:
            own_sizes["markov_rank"] = _unify_markov_head(keys, own_sizes["markov_rank"], tensors, notes)
        trains_confidence = bool(BLOCKS[method].loss.confidence)
        has_confidence = bool(keys.get("enable_confidence_head", trains_confidence and CONFIDENCE_TENSOR in tensors))
        defaulted = {key: raw.get(key) or value for key, value in DEFAULT_SIZES.items()}
        sizes = {key: raw[key] for key in REQUIRED_SIZES} | defaulted
        published_files.note_few_positions(sizes["max_position_embeddings"], target, notes)
        parsed = BlockDraftConfig(
            **sizes,
            rope=rope,
            method=method,
            block_size=block_size,
            mask_token_id=mask,
            feature_layers=tuple(layers),
            confidence_head=has_confidence,
            confidence_head_with_markov=bool(keys.get("confidence_head_with_markov", True)),
            sights=sights,
            **own_sizes,
        )
        dtype = published_files.unify_dtype(folder, tensors)
        with published_files.name_config(folder):
            config = build_block_config(parsed, target.num_layers, dtype)
        if problem := self.find_problem(config, tensors):
            raise ValueError(
                f"{folder}, by config.json, is no {method} draft that we can run: {problem}; get the draft again, or choose "
                "another"
            )
        return PublishedDraft(config, tensors, {"method": method, "block_size": block_size}, notes)


# config.json


@dataclass(frozen=True)
class _BlockKeys:
    """Keys that projects write at the top of config.json, or in a section of it; null means absent."""

    folder: Path
    raw: Mapping[str, Any]

    def find(self, key: str) -> dict[str, Any]:
        """Return the values of `key` by where they stand."""
        sections = {f"{name}.{key}": self.raw.get(name) or {} for name in BLOCK_SECTIONS}
        return {path: keys[key] for path, keys in {key: self.raw, **sections}.items() if keys.get(key) is not None}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`. Raises ValueError where it stands twice with different values."""
        found = self.find(key)
        first = next(iter(found.values()), default)
        if any(value != first for value in found.values()):
            listed = " and ".join(f"{path} {value!r}" for path, value in found.items())
            raise ValueError(
                f"{self.folder}/config.json has {listed}, expected one value; keep the one that it was trained with"
            )
        return first

    def require_count(self, key: str) -> int:
        """Return an integer of at least 0. Raises ValueError for another value, or none."""
        found = self.get(key)
        if type(found) is not int or found < 0:
            raise ValueError(
                f"{self.folder}/config.json: {key} is {found!r}, expected a number of at least 0, at the top or in "
                f"{' or '.join(BLOCK_SECTIONS)}; write the one that it was trained with"
            )
        return found


def _read_method(keys: _BlockKeys, notes: list[str]) -> str:
    """Return the method. Raises ValueError for an architecture that we don't run, and for keys of another method than its."""
    raw, path = keys.raw, f"{keys.folder}/config.json"
    kind, architectures = raw.get("speculators_model_type"), raw.get("architectures")
    projector = keys.get("projector_type")
    stated = {"speculators_model_type": kind, "architectures": architectures, "projector_type": projector}
    names = ", ".join(f"{key} {value!r}" for key, value in stated.items() if value)
    methods = {METHOD_NAMES.get(str(name)) for name in (kind, *(architectures or ()), projector) if name}
    if len(methods) != 1 or None in methods:
        raise ValueError(
            f"{path}: {names or 'no architectures'}, expected one of {', '.join(METHOD_NAMES)}, and one method; choose another "
            "draft, or correct the name where only that is wrong"
        )
    method = str(methods.pop())
    family, is_anchored = BLOCKS[method], BLOCKS[method].first_slot == 0
    anchored = {key_path: value for key in FIRST_SLOT_KEYS for key_path, value in keys.find(key).items()}
    if mismatched := {key_path: value for key_path, value in anchored.items() if value != is_anchored}:
        key_path, value = next(iter(mismatched.items()))
        raise ValueError(
            f"{path}: {key_path} is {value!r}, expected {is_anchored} for {names}: a checkpoint of another method, "
            "which would run one slot off; correct the name or the key, whichever is wrong, or choose another draft"
        )
    if kind and is_anchored and not anchored:
        notes.append(
            f"sample_from_anchor is absent: read as true, as speculators trains {method}; vLLM reads such a file as false"
        )
    for key in OWN_SIZES:
        if key not in family.own_sizes and (found := keys.get(key)):
            others = [str(other.architecture) for other in BLOCKS.values() if key in other.own_sizes]
            raise ValueError(
                f"{path}: {key} is {found}, expected none for {names}; where it is another method's draft, write architectures "
                f"[{' or '.join(others)}]"
            )
    return method


def _check_values(keys: _BlockKeys) -> None:
    """Raise ValueError where a key of REQUIRED_VALUES has another value, and for layers that are not Qwen3's."""
    raw, required = keys.raw, REQUIRED_VALUES.items()
    values = ((path, found, value) for key, value in required for path, found in keys.find(key).items())
    published_files.check_values(keys.folder, values)
    model_type = raw.get("model_type", MODEL_TYPES[0])
    if model_type not in MODEL_TYPES and not raw.get("speculators_model_type"):
        raise ValueError(
            f"{keys.folder}/config.json: model_type is {model_type!r}, expected {MODEL_TYPES[0]!r}: only layers of Qwen3 are "
            "run; choose another draft"
        )


def _read_sights(keys: _BlockKeys, notes: list[str]) -> tuple[Sight, ...]:
    """Return what slots see in each layer. Raises ValueError for layers of another kind, and keys that disagree."""
    raw, num_layers = keys.raw, keys.raw["num_hidden_layers"]
    told = {name: keys.get(name) for name in ("is_causal", "causal")}  # vLLM's of dflash_config is for all layers too
    if keys.get("sliding_window_non_causal"):
        told["sliding_window_non_causal"] = False
    stated = {name: value for name, value in told.items() if value is not None}
    if len({*stated.values()}) > 1:
        raise ValueError(
            f"{keys.folder}/config.json has {stated} as to whether layers are causal, expected one answer; keep the one that it "
            "was trained with"
        )
    slides = {"layer_types": [SLIDING] * num_layers} if keys.get("use_swa") else {}
    window = keys.get("swa_window_size") or raw.get("sliding_window")
    layers = {"layer_types": raw.get("layer_types"), "sliding_window": window, **slides}
    if raw.get("use_sliding_window") is not None and not slides:
        layers["use_sliding_window"] = raw["use_sliding_window"]
    with published_files.name_config(keys.folder):
        sights = read_sights(layers | {"is_causal": next(iter(stated.values()), None)}, num_layers)
    if raw.get("speculators_model_type") and any(sight.window for sight in sights):
        notes.append("its sliding window did not move within a block in training; engines move it, and so does aerie")
    return sights


def _read_feature_layers(keys: _BlockKeys, target: TargetManifest) -> list[int]:
    """Return the feature layers that the draft reads, as ids of the blocks that the residual streams enter.

    Raises ValueError where the lists disagree, are out of order or beyond the target, or name streams that are not stored.
    """
    path, num_layers = f"{keys.folder}/config.json", target.num_layers
    left_layers = {
        f"{key_path} {ids}, layers left": to_entering_ids(ids)
        for key_path, ids in keys.find("target_layer_ids").items()
    }
    entered_layers = {
        f"{key_path} {ids}, layers entered": list(ids)
        for key in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
        for key_path, ids in keys.find(key).items()
    }
    lists = left_layers | entered_layers
    if not lists:
        raise ValueError(
            f"{path} lists no feature layers, expected target_layer_ids; write those that it was trained with"
        )
    source, layers = published_files.select_feature_layers(path, lists)
    stated = keys.get("num_target_layers", num_layers)
    if stated != num_layers or not layers or layers[0] < 1 or layers[-1] > num_layers - 1:
        raise ValueError(
            f"{path}: {source}, of a target of {stated} layers, expected streams entering blocks 1 to {num_layers - 1} of the "
            f"target's ({target.model}) {num_layers}; choose a draft for this target, or set target.model"
        )
    locate_feature_layers(target.feature_layers, layers, f"{keys.folder} ({source})")
    return layers


# Tensors


def _unify_markov_head(keys: _BlockKeys, rank: int, tensors: dict[str, Tensor], notes: list[str]) -> int:
    """Return the rank of the Markov head; a draft of DSpark's form without one gets one of rank 1 whose bias is zero.

    Raises ValueError where there are no weights for the rank, or weights without it.
    """
    markov_tensors = [name for name in MARKOV_TENSORS if name in tensors]
    if bool(rank) != bool(markov_tensors):
        found = f"{', '.join(markov_tensors)} in the files" if markov_tensors else "no weights of it in the files"
        raise ValueError(
            f"{keys.folder}: markov_rank is {rank}, with {found}; expected {' and '.join(MARKOV_TENSORS)} where it is above 0, "
            "and only there: an engine would draft with random ones, or without them; get the draft again"
        )
    if not rank:
        example, rows = tensors.get("fc.weight", torch.zeros(())), keys.raw["vocab_size"]
        tensors |= {name: torch.zeros(rows, 1, dtype=example.dtype) for name in MARKOV_TENSORS}
        notes.append(
            "markov_rank is 0: written as a Markov head of rank 1 whose bias is zero, the same drafts; engines want a head"
        )
    return rank or 1
