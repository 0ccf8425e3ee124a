"""Read published EAGLE-3 drafts of any known format into the config.json and tensor names of `checkpoint`.

    SGLang, SpecForge, official EAGLE, AngelSlim    midlayer.*          d2t, t2d       a flat config
    vLLM, Model-Optimizer                           layers.0.*, also with the prefix model.
    speculators                                     layers.0.*          the layer's config under transformer_layer_config

A draft that would run differently here than on an engine is refused. A value that is not used as written gives a note.
Sources: llama_eagle3.py of SGLang 0.5.17 and of vLLM, and the eagle3 model of speculators.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.draft import checkpoint
from stages.target.feature_layers import NUM_EAGLE3_FEATURES, locate_feature_layers
from stages.target.manifest import TargetManifest

# Returns the target's embedding and head [V, H]; called only where they are needed.
ReadEmbeddingAndHead = Callable[[], tuple[Tensor, Tensor]]

SPECULATORS_KEY = "transformer_layer_config"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TENSOR_RENAMES = (
    (r"^model\.", ""),
    (r"^layers\.0\.", "midlayer."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
# Written by some trainers and read by no engine: RoPE frequencies, and tensors of the target.
UNUSED_TENSORS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^verifier_(norm|lm_head)\.weight$")
# The only supported value of each key; an absent key has this value.
REQUIRED_VALUES: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "qkv_bias": False,
    "bias": False, "num_aux_hidden_states": NUM_EAGLE3_FEATURES, "partial_rotary_factor": 1.0, "logit_scale": 1.0,
    "kv_lora_rank": None, "q_lora_rank": None,
    "eagle_config.use_aux_hidden_state": True, "eagle_config.use_input_layernorm_in_first_layer": True,
    "eagle_config.use_last_layernorm": True, "eagle_config.use_mtp_layernorm": False,
    "eagle_config.parallel_draft_step": 1,
}  # fmt: skip
REQUIRED_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class PublishedDraft:
    """A published draft in the format of `checkpoint`."""

    config: dict[str, Any]  # config.json, by `checkpoint.build_config`
    tensors: dict[str, Tensor]
    options: dict[str, Any]  # enabled options of DraftConfig
    notes: list[str] = field(default_factory=list)


def fetch_draft(model: str, revision: str | None) -> tuple[Path, str | None]:
    """Return the local folder of a draft and the commit of a Hugging Face id. Raises ValueError where there is none."""
    if Path(model).is_dir():
        return Path(model), None
    from huggingface_hub import snapshot_download  # slow to import, needed for hub ids only
    from huggingface_hub.errors import HFValidationError

    try:  # without pickles, which are refused and may be large
        folder = snapshot_download(model, revision=revision, allow_patterns=["*.json", "*.safetensors"])
    except (HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{model} is no folder here, and Hugging Face gave no such draft ({reason}); correct the id or the revision "
            f"({revision or 'main'}), or download it and name its folder"
        ) from None
    return Path(folder), Path(folder).name


def read_published_draft(
    folder: Path,
    manifest: TargetManifest,
    read_embedding_and_head: ReadEmbeddingAndHead,
    name: str = "",
    rope_theta: float | None = None,
) -> PublishedDraft:
    """Read the draft in `folder` for the target of `manifest`; `name` is the user's name for it.

    `rope_theta` overrides the value of its config. Raises ValueError for sizes or feature layers that do not fit the
    target, for an unsupported architecture, and for missing or corrupt files.
    """
    raw = _read_flat_config(folder)
    _check_architecture(folder, raw)
    notes: list[str] = []
    shape, options, rope = _read_sizes(folder, raw), _read_options(raw, notes), unify_rope_parameters(raw)
    _check_target(folder, raw, shape, manifest)
    layers = _read_feature_layers(folder, raw, manifest)
    if "angelslim" in f"{name} {folder}".lower() and rope["rope_theta"] != 10_000 and rope_theta is None:
        notes.append(
            f"AngelSlim trained its drafts at rope_theta 10000, not at that of config.json (here {rope['rope_theta']:g}); "
            "with rope_theta: 10000 they were accepted 4 to 8% longer (docs/drafts.md): compare both"
        )
    if rope_theta is not None:
        rope |= {"rope_theta": rope_theta}
    if shape["max_position_embeddings"] < manifest.max_position_embeddings:
        notes.append(
            f"max_position_embeddings is {shape['max_position_embeddings']}, the target's {manifest.max_position_embeddings}: "
            "SGLang refuses such a draft unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )
    tensors = _read_renamed_tensors(folder)
    _drop_embedding_copy(tensors, read_embedding_and_head, notes)
    _fill_head(folder, raw, shape, tensors, read_embedding_and_head, notes)
    _fill_vocabulary_maps(folder, shape, tensors)
    options["qk_norm"] = "midlayer.self_attn.q_norm.weight" in tensors
    dtype = _unify_dtype(folder, tensors)
    config = checkpoint.build_config(shape, rope, layers, manifest.num_layers, manifest.eos_token_ids, options)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if problem := checkpoint.find_draft_problem(config, tensors):
        raise ValueError(
            f"{folder} is no EAGLE-3 draft that we can run: {problem}. Expected one layer that reads [embedding, state] and a "
            "fusion of three feature layers, without biases; EAGLE-1 and -2, deeper, MLA and quantised drafts are not"
        )
    return PublishedDraft(config, tensors, {k: v for k, v in options.items() if v}, notes)


def unify_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE in the spelling of transformers 5, from rope_parameters, or from rope_theta and rope_scaling.

    Raises ValueError where both are present with different thetas, and for partial rotary embeddings.
    """
    new, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    thetas = {float(t) for t in (new.get("rope_theta"), config.get("rope_theta")) if t is not None}
    if len(thetas) > 1:
        raise ValueError(
            f"config.json: rope_theta is {config['rope_theta']} and in rope_parameters {new['rope_theta']}"
        )
    old = {k: v for k, v in scaling.items() if k not in ("type", "rope_theta")}
    if scaling and "rope_type" not in old:
        old["rope_type"] = scaling.get("type", "default")
    rope = {"rope_type": "default", **(new or old), "rope_theta": thetas.pop() if thetas else 10_000.0}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']}, expected 1: not supported"
        )
    if rope["rope_type"] == "mrope":  # multimodal sections with default frequencies, as engines read it
        rope["rope_type"] = "default"
    return rope


# config.json


def _read_flat_config(folder: Path) -> dict[str, Any]:
    """Read config.json as one level: the nested layer config of speculators is merged under the outer keys, which win."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} not found; expected a draft's folder, with config.json and safetensors") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); get the draft anew") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(found).__name__}; get the draft anew")
    if SPECULATORS_KEY not in found:
        return found
    # vLLM's default of norm_before_residual for a speculators config is true.
    outer = {"norm_before_residual": True} | {k: v for k, v in found.items() if k != SPECULATORS_KEY}
    return found[SPECULATORS_KEY] | outer | {"target_hidden_size": found.get("target_hidden_size")}


def _check_architecture(folder: Path, raw: dict[str, Any]) -> None:
    """Raise ValueError where a key of REQUIRED_VALUES has another value."""
    eagle = raw.get("eagle_config") or {}
    for key, required in REQUIRED_VALUES.items():
        section, _, leaf = key.rpartition(".")
        found = (eagle if section else raw).get(leaf, required)
        if found is not None and found != required:
            raise ValueError(
                f"{folder}/config.json: {key} is {found!r}, expected {required!r}: we run EAGLE-3 drafts of one plain layer, "
                "and this is another architecture; choose another draft"
            )


def _read_sizes(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the layer (checkpoint.SIZE_KEYS)."""
    if missing := [key for key in REQUIRED_SIZES if raw.get(key) is None]:
        raise ValueError(f"{folder}/config.json lacks {', '.join(missing)}; expected the config of an EAGLE-3 draft")
    heads = raw["num_attention_heads"]
    return {
        **{key: raw[key] for key in REQUIRED_SIZES},
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "draft_vocab_size": raw.get("draft_vocab_size") or raw["vocab_size"],
        # defaults of transformers' LlamaConfig, which engines use too
        "max_position_embeddings": raw.get("max_position_embeddings") or 2048,
        "rms_norm_eps": raw.get("rms_norm_eps") or 1e-6,
    }


def _read_options(raw: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the options of DraftConfig that config.json sets; append a note for a window that has no effect."""
    eagle = raw.get("eagle_config") or {}
    options: dict[str, Any] = {name: bool(raw.get(name)) for name in checkpoint.NORM_OPTIONS}
    options["fc_norm"] |= bool(raw.get("use_aux_norm"))  # an older name in SGLang
    options["norm_before_fc"] = bool(eagle.get("norm_before_fc", options["norm_before_fc"]))
    window, layer_types = raw.get("sliding_window"), raw.get("layer_types") or []
    if window and layer_types[:1] == ["sliding_attention"]:
        options["sliding_window"] = window
    elif window:
        notes.append(f"sliding_window is {window}, but layer_types names no sliding layer: read as full, as vLLM does")
    return options


def _check_target(folder: Path, raw: dict[str, Any], shape: dict[str, Any], manifest: TargetManifest) -> None:
    """Raise ValueError where the draft's sizes differ from the target's."""
    for key, expected in (("hidden_size", manifest.hidden_size), ("vocab_size", manifest.vocab_size)):
        if shape[key] != expected:
            raise ValueError(
                f"{folder}/config.json: {key} is {shape[key]}, the target's ({manifest.model}) {expected}: this draft is for "
                "another target; choose one for it, or set target.model"
            )
    if (raw.get("target_hidden_size") or manifest.hidden_size) != manifest.hidden_size:
        raise ValueError(
            f"{folder}/config.json: target_hidden_size is {raw['target_hidden_size']}, expected {manifest.hidden_size}; drafts "
            "of another hidden size than their target's have an embedding of their own, which is not supported"
        )


def _read_feature_layers(folder: Path, raw: dict[str, Any], manifest: TargetManifest) -> list[int]:
    """Return the feature layers that the draft reads, as ids of the blocks that the residual streams enter.

    Raises ValueError where the lists disagree, are not of three ids in increasing order, or name streams that are not stored.
    """
    lists = checkpoint.list_feature_layers(raw, manifest.num_layers)
    (source, layers), *others = lists.items()
    if any(other != layers for _, other in others):
        raise ValueError(
            f"{folder}/config.json lists feature layers twice, {' and '.join(lists)}: these are the streams entering blocks "
            f"{' and '.join(map(str, lists.values()))}, expected one list: SGLang and vLLM would run two different drafts; keep "
            "the key by which it was trained"
        )
    if layers != sorted(set(layers)) or len(layers) != NUM_EAGLE3_FEATURES:
        raise ValueError(
            f"{folder}/config.json: {source}, expected {NUM_EAGLE3_FEATURES} ids in increasing order, each once: engines capture "
            "in the order of the blocks, whatever the order of the list; ask its author which order it was trained with"
        )
    locate_feature_layers(manifest.feature_layers, layers, f"{folder} ({source})")
    return layers


# Tensors


def _read_renamed_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors under the names of `checkpoint`, without UNUSED_TENSORS."""
    tensors: dict[str, Tensor] = {}
    for file in _list_safetensors(folder):
        read: dict[str, Tensor] = {}  # by their names in the file, for messages
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    renamed = _rename_tensor(name)
                    if UNUSED_TENSORS.search(renamed):
                        continue
                    if renamed in tensors:
                        raise ValueError(
                            f"{file} has {renamed} under two names, {name} one of them, expected one; export the draft again"
                        )
                    tensors[renamed] = read[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is missing, cut or broken ({error}); get the draft anew") from None
        if problem := checkpoint.find_nonfinite_values(read):
            raise ValueError(
                f"{file}: {problem}; export the draft again from a checkpoint whose loss was finite, or get the draft anew"
            )
    return tensors


def _rename_tensor(name: str) -> str:
    for pattern, replacement in TENSOR_RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _list_safetensors(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`, by its index where there is one. Raises ValueError where it has none."""
    if indexes := sorted(folder.glob("*.safetensors.index.json")):
        try:
            names = set(json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{indexes[0]} is cut or broken ({error!r}); get the draft anew") from None
        return [folder / name for name in sorted(names)]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    pickles = [f.name for f in folder.iterdir() if f.suffix in PICKLE_SUFFIXES]
    found = "none (a hub's pickles are not downloaded)"
    if pickles:
        found = f"{', '.join(pickles)}, a pickle, which runs code when it is read"
    raise ValueError(
        f"{folder}: expected safetensors, found {found}. Download the draft, convert it in its folder where you trust it: "
        "python -c \"import torch; from safetensors.torch import save_file; t = torch.load('pytorch_model.bin', "
        "weights_only=True); save_file({k: v.contiguous() for k, v in t.items()}, 'model.safetensors')\"; and name the folder"
    )


def _drop_embedding_copy(
    tensors: dict[str, Tensor], read_embedding_and_head: ReadEmbeddingAndHead, notes: list[str]
) -> None:
    """Drop the draft's copy of the target's embedding, which engines ignore; append a note where the two differ."""
    own = tensors.pop("embed_tokens.weight", None)
    if own is None:
        return
    target, _ = read_embedding_and_head()
    if own.shape != target.shape or not torch.equal(own.float(), target.to(own.dtype).float()):
        notes.append("embed_tokens differs from the target's embedding; left out, since engines take the target's")


def _fill_head(
    folder: Path,
    raw: dict[str, Any],
    shape: dict[str, Any],
    tensors: dict[str, Tensor],
    read_embedding_and_head: ReadEmbeddingAndHead,
    notes: list[str],
) -> None:
    """Copy the target's head where a draft over the target's whole vocabulary has none; append a note."""
    if "lm_head.weight" in tensors:
        return
    if shape["draft_vocab_size"] != shape["vocab_size"]:
        raise ValueError(
            f"{folder} has no lm_head.weight, and its draft_vocab_size {shape['draft_vocab_size']} is not the target's "
            f"{shape['vocab_size']}, whose head it could share; get the draft anew"
        )
    embedding, head = read_embedding_and_head()
    dtype = tensors["fc.weight"].dtype if "fc.weight" in tensors else torch.float32
    tensors["lm_head.weight"] = (embedding if raw.get("tie_word_embeddings") else head).to(dtype)
    notes.append("it has no head of its own; the target's is taken, as engines do")


def _fill_vocabulary_maps(folder: Path, shape: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Set d2t, int64 offsets of ascending ids, and t2d from whichever of the two are present; sort lm_head to match."""
    v, d = shape["vocab_size"], shape["draft_vocab_size"]
    ids = _read_draft_ids(folder, tensors, v, d)
    order = ids.argsort()
    if not torch.equal(order, torch.arange(d)) and "lm_head.weight" in tensors:
        ids, tensors["lm_head.weight"] = ids[order], tensors["lm_head.weight"][order]
    t2d = torch.zeros(v, dtype=torch.bool)
    t2d[ids] = True
    given = tensors.get("t2d")
    if given is not None and not (given.shape == (v,) and torch.equal(given != 0, t2d)):
        raise ValueError(f"{folder}: t2d does not mark the tokens that d2t lists; get the draft anew")
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(d), t2d


def _read_draft_ids(folder: Path, tensors: dict[str, Tensor], v: int, d: int) -> Tensor:
    """Return the target id of each draft id, [D] int64. Raises ValueError where d2t is not a map into the vocabulary."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and d == v:
        return torch.arange(v)
    if d2t is None and t2d is not None and int((t2d != 0).sum()) == d:
        return (t2d != 0).nonzero().flatten()
    if d2t is None:
        raise ValueError(f"{folder} has no d2t, expected one at a draft vocabulary of {d} of {v}; get the draft anew")
    if d2t.dtype not in (torch.int32, torch.int64) or d2t.shape != (d,):
        raise ValueError(f"{folder}: d2t is {d2t.dtype} {tuple(d2t.shape)}, expected int64 ({d},): get the draft anew")
    ids = d2t.to(torch.int64) + torch.arange(d)
    if int(ids.min()) < 0 or int(ids.max()) >= v or len(ids.unique()) < d:
        raise ValueError(
            f"{folder}: d2t holds no offsets: with draft ids added it lists {len(ids.unique())} tokens from {int(ids.min())} "
            f"to {int(ids.max())}, expected {d} of {v}; where it holds token ids, subtract arange({d})"
        )
    return ids


def _unify_dtype(folder: Path, tensors: dict[str, Tensor]) -> torch.dtype:
    """Cast all weights to the widest dtype among them and return it. Raises ValueError for quantised weights."""
    weights = [name for name in tensors if name not in ("d2t", "t2d")]
    dtypes = {tensors[name].dtype for name in weights}
    if not dtypes or not dtypes <= set(FLOAT_DTYPES):
        raise ValueError(
            f"{folder} holds {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes)) or 'no weights'}, expected "
            "float32, bfloat16 or float16; a quantised draft can't be trained or replayed: choose the plain one"
        )
    widest = reduce(torch.promote_types, dtypes)
    for name in weights:
        tensors[name] = tensors[name].to(widest)
    return widest
