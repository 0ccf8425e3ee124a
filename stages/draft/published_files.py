"""The files of a published draft of any family: download, config.json, safetensors, RoPE and dtypes.

What the names and keys mean is each family's own, in `files` of stages/families/NAME.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stages.draft import checkpoint
from stages.draft.config_types import check_types
from stages.params.families import BLOCKS, FAMILIES, ROOT_FAMILY, DraftFamily
from stages.runtime import guarded_files
from stages.target.manifest import TargetManifest

# Returns the target's embedding and head [V, H]; called only where they are needed.
ReadEmbeddingAndHead = Callable[[], tuple[Tensor, Tensor]]

SPECULATORS_KEY = "transformer_layer_config"
MASK_EMBEDDING_FILE = "mask_embedding.pt"  # of some DFlash drafts; a pickle
REMEDY = "get the draft again"
DOWNLOADED = ["*.json", "*.safetensors", MASK_EMBEDDING_FILE]
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Written by some trainers and read by no engine: RoPE frequencies, and tensors of the target.
UNUSED_TENSORS = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^verifier_(norm|lm_head)\.weight$")
TABLES = {
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
}  # of the target, which drafts may bring copies of
BLOCK_SECTIONS = ("dflash_config", "dspark_config")
UNKNOWN_BLOCK_DRAFTS = re.compile("dflash|dspark|domino|lilicorr|xpress", re.IGNORECASE)  # parts of their architectures


@dataclass(frozen=True)
class PublishedDraft:
    """A published draft in its family's own format."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]
    options: dict[str, Any]  # what sets it apart from a plain draft of its family
    notes: list[str] = field(default_factory=list)


def fetch_draft(model: str, revision: str | None) -> tuple[Path, str | None]:
    """Return the local folder of a draft and the commit of a Hugging Face id. Raises ValueError where there is none."""
    if Path(model).is_dir():
        return Path(model), None
    from huggingface_hub import snapshot_download  # slow to import, needed for hub ids only
    from huggingface_hub.errors import HFValidationError

    try:  # without pickles, which are refused and may be large; the small one is never read, but must be noticed
        folder = snapshot_download(model, revision=revision, allow_patterns=DOWNLOADED)
    except (HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{model} is no folder here, and Hugging Face gave no such draft ({reason}); correct the id or the revision "
            f"({revision or 'main'}), or download it and name its folder"
        ) from None
    return Path(folder), Path(folder).name


def unify_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE in the spelling of transformers 5, from rope_parameters, or from rope_theta and rope_scaling.

    Raises ValueError where both are present with different thetas, and for partial rotary embeddings.
    """
    current, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    thetas = {float(t) for t in (current.get("rope_theta"), config.get("rope_theta")) if t is not None}
    if len(thetas) > 1:
        raise ValueError(f"rope_theta is {config['rope_theta']} and in rope_parameters {current['rope_theta']}")
    legacy = {k: v for k, v in scaling.items() if k not in ("type", "rope_theta")}
    if scaling and "rope_type" not in legacy:
        legacy["rope_type"] = scaling.get("type", "default")
    rope = {"rope_type": "default", **(current or legacy), "rope_theta": thetas.pop() if thetas else 10_000.0}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor is {rope['partial_rotary_factor']}, expected 1: not supported")
    if rope["rope_type"] == "mrope":  # multimodal sections with default frequencies, as engines read it
        rope["rope_type"] = "default"
    return rope


def read_flat_config(folder: Path, speculators_defaults: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Read config.json as one level: the nested layer config of speculators is merged under the outer keys, which win.

    `speculators_defaults` are keys that such a config has unless it says otherwise. Raises ValueError for a missing or broken
    file.
    """
    path = folder / "config.json"
    found: dict[str, Any] = guarded_files.read_json(
        path, REMEDY, "expected a draft's folder, with config.json and safetensors", root=folder
    )
    with name_config(folder):
        check_types(found)
    if SPECULATORS_KEY not in found:
        return found
    outer = {**speculators_defaults, **{k: v for k, v in found.items() if k != SPECULATORS_KEY}}
    return (found[SPECULATORS_KEY] or {}) | outer | {"target_hidden_size": found.get("target_hidden_size")}


@contextmanager
def name_config(folder: Path) -> Iterator[None]:
    """Add the place of config.json to a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: {error}") from None


def is_block_config(raw: Mapping[str, Any]) -> bool:
    """Return whether config.json is of a block draft, of a kind that we run or not."""
    named = {*(raw.get("architectures") or []), raw.get("speculators_model_type") or ""}
    known = {name for family in BLOCKS.values() for name in (family.architecture, *family.published_as)}
    is_block = bool(named & known) or any(UNKNOWN_BLOCK_DRAFTS.search(name) for name in named)
    return is_block or any(key in raw for key in BLOCK_SECTIONS)


def find_published_family(raw: Mapping[str, Any]) -> DraftFamily:
    """Return the family whose files a published config.json is of: of a block draft any of theirs, which are read alike."""
    if is_block_config(raw):
        return next(iter(BLOCKS.values()))
    named = {*(raw.get("architectures") or []), raw.get("speculators_model_type"), *raw}  # some are told by a key alone
    return next((family for family in FAMILIES.values() if named & {*family.published_as}), ROOT_FAMILY)


def check_values(folder: Path, values: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise ValueError for the first (key, value, the only one that is supported) where the two differ; null means absent."""
    for key, found, required in values:
        if found is not None and found != required:
            raise ValueError(
                f"{folder}/config.json: {key} is {found!r}, expected {required!r}: it is another model; choose another draft"
            )


def check_sizes(folder: Path, raw: Mapping[str, Any], required: Sequence[str], manifest: TargetManifest) -> None:
    """Raise ValueError where config.json lacks one of the `required` sizes, or one differs from the target's."""
    if missing := [key for key in required if raw.get(key) is None]:
        raise ValueError(f"{folder}/config.json lacks {', '.join(missing)}; expected the config of a draft")
    for key, expected in (("hidden_size", manifest.hidden_size), ("vocab_size", manifest.vocab_size)):
        if raw[key] != expected:
            raise ValueError(
                f"{folder}/config.json: {key} is {raw[key]}, the target's ({manifest.model}) {expected}: this draft is for "
                "another target; choose one for it, or set target.model"
            )
    if (raw.get("target_hidden_size") or manifest.hidden_size) != manifest.hidden_size:
        raise ValueError(
            f"{folder}/config.json: target_hidden_size is {raw['target_hidden_size']}, expected {manifest.hidden_size}; drafts "
            "of another hidden size than their target's have an embedding of their own, which is not supported"
        )


def note_few_positions(positions: int, manifest: TargetManifest, notes: list[str]) -> None:
    """Append a note where the draft has fewer positions than the target."""
    if positions < manifest.max_position_embeddings:
        notes.append(
            f"max_position_embeddings is {positions}, the target's {manifest.max_position_embeddings}: "
            "SGLang refuses such a draft unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
        )


def read_tensors(folder: Path, renames: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Return all tensors, without UNUSED_TENSORS, renamed by `renames`: patterns and what replaces them, in order.

    Raises ValueError for pickles, broken files, values that are not finite, and two tensors of one name.
    """
    tensors: dict[str, Tensor] = {}
    for file in _list_safetensors(folder):
        file_tensors: dict[str, Tensor] = {}  # by their names in the file, for messages
        guard = guarded_files.guard_parsing(file, "safetensors", REMEDY, root=folder)
        with guard, safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                renamed = reduce(lambda text, pair: re.sub(pair[0], pair[1], text), renames, name)
                if UNUSED_TENSORS.search(renamed):
                    continue
                if renamed in tensors:
                    raise guarded_files.BrokenArtifactError(
                        f"{file} has {renamed} under two names, {name} one of them, expected one",
                        "export the draft again",
                    )
                tensors[renamed] = file_tensors[name] = opened.get_tensor(name)
            problem = checkpoint.find_nonfinite_values(file_tensors)
        if problem:
            raise ValueError(
                f"{file}: {problem}; export the draft again from a checkpoint whose loss was finite, or get the draft again"
            )
    return tensors


def _list_safetensors(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`, by its index where there is one. Raises ValueError where it has none."""
    if indexes := sorted(folder.glob("*.safetensors.index.json")):
        return guarded_files.list_indexed_files(indexes[0], REMEDY)
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


def drop_copies(
    tensors: dict[str, Tensor], names: Collection[str], read_tables: ReadEmbeddingAndHead, notes: list[str]
) -> None:
    """Drop the draft's copies of the target's tables by these `names` of TABLES; append a note where one differs."""
    for name, target in zip(TABLES, read_tables(), strict=True) if {*names} & tensors.keys() else ():
        copy = tensors.pop(name, target) if name in names else target
        if copy.shape != target.shape or not torch.equal(copy.float(), target.to(copy.dtype).float()):
            table, found = TABLES[name], name.removesuffix(".weight")
            notes.append(f"{found} differs from the target's {table}; left out, as in SGLang; vLLM would take it")


def unify_dtype(folder: Path, tensors: dict[str, Tensor]) -> str:
    """Cast all weights to the widest dtype among them and return its name. Raises ValueError for quantised weights."""
    weights = [name for name in tensors if name not in ("d2t", "t2d")]
    dtypes = {tensors[name].dtype for name in weights}
    if not dtypes or not dtypes <= set(FLOAT_DTYPES):
        raise ValueError(
            f"{folder}, by config.json and model.safetensors, holds "
            f"{', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes)) or 'no weights'}, expected float32, "
            "bfloat16 or float16; choose the plain one of a quantised draft"
        )
    widest = reduce(torch.promote_types, dtypes)
    for name in weights:
        tensors[name] = tensors[name].to(widest)
    return str(widest).removeprefix("torch.")


def select_feature_layers(source_name: str, lists: Mapping[str, list[int]]) -> tuple[str, list[int]]:
    """Return what the feature layers are called in a config.json, and their ids, those of the blocks that the streams enter.

    `lists` are the ids by a description of each list that the file has. Raises ValueError where they disagree or are unordered.
    """
    (source, layers), *other_lists = lists.items()
    if any(ids != layers for _, ids in other_lists):
        raise ValueError(
            f"{source_name} lists feature layers twice, {' and '.join(lists)}: these are the streams entering blocks "
            f"{' and '.join(map(str, lists.values()))}, expected one list; keep the key by which it was trained"
        )
    if layers != sorted(set(layers)):
        raise ValueError(
            f"{source_name}: {source}, expected ids in increasing order, each once: engines capture in the order of the blocks, "
            "whatever the order of the list; ask its author which order it was trained with"
        )
    return source, layers
