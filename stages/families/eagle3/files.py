"""EAGLE-3's files: those of checkpoint.py, and published drafts of any known format, read into the same form.

    SGLang, SpecForge, official EAGLE, AngelSlim    midlayer.*          d2t, t2d       a flat config
    vLLM, Model-Optimizer                           layers.0.*, also with the prefix model.
    speculators                                     layers.0.*          the layer's config under transformer_layer_config

A draft that would run differently here than on an engine is refused. A value that is not used as written gives a note.
Sources: llama_eagle3.py of SGLang 0.5.17 and of vLLM, and the eagle3 model of speculators.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.draft import published_files
from stages.draft.eagle3 import DraftConfig
from stages.draft.published_files import PublishedDraft, ReadEmbeddingAndHead
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.params import schema
from stages.params.draft_sections import ImportedCheckpoint
from stages.target import manifest
from stages.target.feature_layers import NUM_EAGLE3_FEATURES, locate_feature_layers
from stages.target.manifest import TargetManifest

TENSOR_RENAMES = (
    (r"^model\.", ""),
    (r"^layers\.0\.", "midlayer."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
# The only supported value of each key; an absent key has this value.
REQUIRED_VALUES: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "qkv_bias": False,
    "bias": False, "num_aux_hidden_states": NUM_EAGLE3_FEATURES, "partial_rotary_factor": 1.0, "logit_scale": 1.0,
    "kv_lora_rank": None, "q_lora_rank": None,
    "eagle_config.use_aux_hidden_state": True, "eagle_config.use_input_layernorm_in_first_layer": True,
    "eagle_config.use_last_layernorm": True, "eagle_config.use_mtp_layernorm": False,
    "eagle_config.parallel_draft_step": 1,
}  # fmt: skip
HEAD_KEY = "lm_head_rows"  # "target": lm_head.weight is left out of the file, and is the target's rows of d2t
REQUIRED_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


class Files(eagle3_checkpoint.Eagle3Files):
    """EAGLE-3 drafts; e000, from which every family starts, is one (init_draft)."""

    published_defaults: Mapping[str, Any] = {"norm_before_residual": True}
    required_values: Mapping[str, Any] = REQUIRED_VALUES

    def read_published(
        self, folder: Path, item: ImportedCheckpoint, params: schema.Params, target: TargetManifest
    ) -> PublishedDraft:
        read_tables = partial(manifest.read_embedding_and_head, target)
        return self.read_published_folder(folder, target, read_tables, item.model, item.rope_theta)

    def read_more(
        self, raw: dict[str, Any], tensors: dict[str, Tensor], read_tables: ReadEmbeddingAndHead, notes: list[str]
    ) -> dict[str, Any]:
        """Return keys of a published config.json beyond EAGLE-3's; may change the tensors, and add notes."""
        return {}

    def read_published_folder(
        self,
        folder: Path,
        target: TargetManifest,
        read_tables: ReadEmbeddingAndHead,
        name: str = "",
        rope_theta: float | None = None,
    ) -> PublishedDraft:
        """Read the draft in `folder` for `target`; `name` is the user's name for it.

        `rope_theta` overrides the value of its config. Raises ValueError for sizes or feature layers that do not fit the
        target, for an unsupported architecture, and for missing or corrupt files.
        """
        raw = published_files.read_flat_config(folder, self.published_defaults)
        if published_files.is_block_config(raw):
            raise ValueError(
                f"{folder}/config.json: architectures is {raw.get('architectures')}, a block draft, expected an EAGLE-3 draft, "
                "from which training can start; name it in import_draft.checkpoints"
            )
        eagle = raw.get("eagle_config") or {}
        stated = {**raw, **{f"eagle_config.{key}": value for key, value in eagle.items()}}
        published_files.check_values(
            folder, ((key, stated.get(key), value) for key, value in self.required_values.items())
        )
        published_files.check_sizes(folder, raw, REQUIRED_SIZES, target)
        notes: list[str] = []
        sizes, options = _read_sizes(raw), _read_options(raw, notes)
        with published_files.name_config(folder):
            rope = published_files.unify_rope_parameters(raw)
        layers = _read_feature_layers(folder, raw, target)
        if "angelslim" in f"{name} {folder}".lower() and rope["rope_theta"] != 10_000 and rope_theta is None:
            notes.append(
                f"AngelSlim trained its drafts at rope_theta 10000, not at that of config.json (here {rope['rope_theta']:g}); "
                "with rope_theta: 10000 they were accepted 4 to 8% longer (docs/drafts.md): compare both"
            )
        if rope_theta is not None:
            rope |= {"rope_theta": rope_theta}
        draft = DraftConfig(**sizes, **options, rope=rope)
        published_files.note_few_positions(draft.max_position_embeddings, target, notes)
        tensors = published_files.read_tensors(folder, TENSOR_RENAMES)
        with published_files.name_config(folder):
            more = self.read_more(raw, tensors, read_tables, notes)
        if not more.get("own_embedding"):
            published_files.drop_copies(tensors, ["embed_tokens.weight"], read_tables, notes)
        _fill_head(folder, raw, draft, tensors, read_tables, notes)
        _fill_vocabulary_maps(folder, draft, tensors)
        options["qk_norm"] = "midlayer.self_attn.q_norm.weight" in tensors
        dtype = published_files.unify_dtype(folder, tensors)
        draft, ids = replace(draft, qk_norm=options["qk_norm"]), (layers, target.num_layers, target.eos_token_ids)
        config = eagle3_checkpoint.build_eagle3_config(draft, *ids, dtype, [*sizes]) | more
        if problem := self.find_problem(config, tensors):
            raise ValueError(
                f"{folder}, by config.json, is no {self.facts.title} draft that we run: {problem}. Expected one layer that "
                "reads [embedding, state], a fusion of three feature layers, no biases; EAGLE-1 and -2, deeper, MLA and "
                "quantised are not"
            )
        return PublishedDraft(config, tensors, {k: v for k, v in options.items() if v}, notes)


# config.json


def _read_sizes(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the layer (SIZE_KEYS), in the order of imported drafts: another would change the files of old ones."""
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
    options: dict[str, Any] = {name: bool(raw.get(name)) for name in eagle3_checkpoint.NORM_OPTIONS}
    options["fc_norm"] |= bool(raw.get("use_aux_norm"))  # an older name in SGLang
    options["norm_before_fc"] = bool(eagle.get("norm_before_fc", options["norm_before_fc"]))
    window, layer_types = raw.get("sliding_window"), raw.get("layer_types") or []
    if window and layer_types[:1] == ["sliding_attention"]:
        options["sliding_window"] = window
    elif window:
        notes.append(f"sliding_window is {window}, but layer_types names no sliding layer: read as full, as vLLM does")
    return options


def _read_feature_layers(folder: Path, raw: dict[str, Any], target: TargetManifest) -> list[int]:
    """Return the feature layers that the draft reads, as ids of the blocks that the residual streams enter.

    Raises ValueError where the lists disagree, are not of three ids in increasing order, or name streams that are not stored, and
    for a config without a list where the target has fewer than 7 blocks.
    """
    try:
        lists = eagle3_checkpoint.list_feature_layers(raw, target.num_layers)
    except ValueError as error:
        raise ValueError(f"{folder}/config.json has {error}") from None
    source, layers = published_files.select_feature_layers(f"{folder}/config.json", lists)
    if len(layers) != NUM_EAGLE3_FEATURES:
        raise ValueError(
            f"{folder}/config.json: {source}, expected {NUM_EAGLE3_FEATURES} ids: EAGLE-3's draft reads so many; choose another "
            "draft"
        )
    locate_feature_layers(target.feature_layers, layers, f"{folder} ({source})")
    return layers


# Tensors


def _fill_head(
    folder: Path,
    raw: dict[str, Any],
    draft: DraftConfig,
    tensors: dict[str, Tensor],
    read_embedding_and_head: ReadEmbeddingAndHead,
    notes: list[str],
) -> None:
    """Copy the target's head where a draft has none of its own; append a note.

    One over the target's whole vocabulary shares it in engines too; another says by HEAD_KEY that its rows are left out.
    """
    if "lm_head.weight" in tensors:
        return
    if draft.draft_vocab_size != draft.vocab_size and raw.get(HEAD_KEY) != "target":
        raise ValueError(
            f"{folder} has no lm_head.weight, and its draft_vocab_size {draft.draft_vocab_size} is not the target's "
            f"{draft.vocab_size}, whose head it could share; get the draft again"
        )
    embedding, head = read_embedding_and_head()
    dtype = tensors["fc.weight"].dtype if "fc.weight" in tensors else torch.float32
    rows = (embedding if raw.get("tie_word_embeddings") else head).to(dtype)
    if draft.draft_vocab_size != draft.vocab_size:
        ids = _read_draft_ids(folder, tensors, draft.vocab_size, draft.draft_vocab_size)
        rows = rows[ids.to(torch.int64)]
        notes.append("its head is left out of its file; the target's rows are taken, on which it was trained")
    else:
        notes.append("it has no head of its own; the target's is taken, as engines do")
    tensors["lm_head.weight"] = rows


def _fill_vocabulary_maps(folder: Path, draft: DraftConfig, tensors: dict[str, Tensor]) -> None:
    """Set d2t, int64 offsets of ascending ids, and t2d from whichever of the two are present; sort lm_head to match."""
    v, d = draft.vocab_size, draft.draft_vocab_size
    ids = _read_draft_ids(folder, tensors, v, d)
    order = ids.argsort()
    if not torch.equal(order, torch.arange(d)) and "lm_head.weight" in tensors:
        ids, tensors["lm_head.weight"] = ids[order], tensors["lm_head.weight"][order]
    t2d = torch.zeros(v, dtype=torch.bool)
    t2d[ids] = True
    stored_t2d = tensors.get("t2d")
    if stored_t2d is not None and not (stored_t2d.shape == (v,) and torch.equal(stored_t2d != 0, t2d)):
        raise ValueError(f"{folder}: t2d does not mark the tokens that d2t lists; get the draft again")
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(d), t2d


def _read_draft_ids(folder: Path, tensors: dict[str, Tensor], v: int, d: int) -> Tensor:
    """Return the target id of each draft id, [D] int64. Raises ValueError where d2t is not a map into the vocabulary."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and d == v:
        return torch.arange(v)
    if d2t is None and t2d is not None and int((t2d != 0).sum()) == d:
        return (t2d != 0).nonzero().flatten()
    if d2t is None:
        raise ValueError(f"{folder} has no d2t, expected one at a draft vocabulary of {d} of {v}; get the draft again")
    if d2t.dtype not in (torch.int32, torch.int64) or d2t.shape != (d,):
        raise ValueError(f"{folder}: d2t is {d2t.dtype} {tuple(d2t.shape)}, expected int64 ({d},): get the draft again")
    ids = d2t.to(torch.int64) + torch.arange(d)
    if int(ids.min()) < 0 or int(ids.max()) >= v or len(ids.unique()) < d:
        raise ValueError(
            f"{folder}: d2t holds no offsets: with draft ids added it lists {len(ids.unique())} tokens from {int(ids.min())} "
            f"to {int(ids.max())}, expected {d} of {v}; where it holds token ids, subtract arange({d})"
        )
    return ids
