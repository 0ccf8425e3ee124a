"""target.json: which model the target is, pinned, and the shapes that every later stage needs without loading it.

A builtin target's weights lie beside its manifest; any other target stays where Hugging Face keeps it, and the
manifest holds the commit. Feature layers are ids i meaning *the residual stream entering block i*, which is
transformers' `hidden_states[i]`; engines count differently, so convert at export, never here.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.runtime import atomic

TARGET_FOLDER = Path("artifacts/target")
MADE_BY = "prepare_target"
WEIGHTS = "*.safetensors"
SAMPLE_BYTES, SAMPLE_EVERY = 4096, 4 << 20  # one block of every 4 MiB: of 16 GB 16 MB


@dataclass(frozen=True)
class TargetManifest:
    model: str  # "builtin/NAME", a Hugging Face id, or a local folder
    revision: str | None  # the commit, for a Hugging Face id
    modality: str  # "text", or "image" for a target that also sees
    config_digest: str  # sha256 of config.json, and of what says how pictures are cut
    tokenizer_digest: str  # sha256 of the tokenizer's files
    feature_layers: list[int]
    hidden_size: int  # H
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V: rows of the embedding, padding included
    rms_norm_eps: float
    rope: dict[str, Any]  # transformers' rope_parameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: list[int]
    lm_head_key: str | None = None  # the head's tensor, where it is not the one its name and the tie tell
    chat_template: str | None = None  # Jinja, in place of the tokenizer's own
    image_token_id: int | None = None  # stands for a piece of a picture, where hidden states hold pictures
    weights_digest: str | None = (
        None  # sha256 of a local folder's weights; a hub id's commit pins them, DVC a builtin's
    )
    weights_sample: str | None = None  # of some of their bytes: what every stage that loads them compares


def write_manifest(path: Path, manifest: TargetManifest) -> None:
    atomic.write_json(path / "target.json", asdict(manifest))


def read_manifest(path: Path = TARGET_FOLDER) -> TargetManifest:
    """Raises ValueError naming the file and the stage to run, where it is missing or of another version."""
    fields = atomic.read_json(path / "target.json", MADE_BY)
    try:
        return TargetManifest(**fields)
    except TypeError as error:
        raise ValueError(f"{path}/target.json is of another version ({error}); run: dvc repro {MADE_BY}") from None


def resolve_weights_folder(manifest: TargetManifest, path: Path = TARGET_FOLDER) -> Path:
    """The folder that holds config.json, the tokenizer and the weights; a Hugging Face id comes from its local cache.

    Raises ValueError where a local folder holds other weights than those that prepare_target has seen.
    """
    if manifest.model.startswith("builtin/"):
        return path
    if Path(manifest.model).is_dir():
        _check_weights(manifest)
        return Path(manifest.model)
    from huggingface_hub import snapshot_download  # only a hub target needs it, and it costs start-up time

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    return Path(snapshot_download(manifest.model, revision=manifest.revision, allow_patterns=patterns))


def read_embedding_and_head(manifest: TargetManifest, path: Path = TARGET_FOLDER) -> tuple[Tensor, Tensor]:
    """The target's embedding [V, H] and output head [V, H] as float32, read without loading the model.

    A tied target has one table for both. Raises ValueError where the files hold no such tensors.
    """
    folder = resolve_weights_folder(manifest, path)
    index = folder / "model.safetensors.index.json"
    try:
        weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else {"": "model.safetensors"}
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is cut or broken ({error!r}); get the target's weights anew") from None
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}  # embed_tokens, lm_head -> the tensor's whole name
    for name in files:
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} not found; the target's weights must be safetensors")
        try:
            with safe_open(folder / name, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a dict
                    table = _match_table_name(key, manifest.lm_head_key)
                    if table is not None and len(key) <= len(names.get(table, key)):
                        # The shortest name: a block that predicts further tokens may hold copies under longer ones.
                        # A copy in torch's own memory, aligned to 64 bytes: on the mapped file, whose tensors begin
                        # anywhere, sums were rounded otherwise in one process of ten (docs/LOG.md).
                        numbers = torch.empty(tensors.get_slice(key).get_shape(), dtype=torch.float32)
                        found[table], names[table] = numbers.copy_(tensors.get_tensor(key)), key
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is cut or broken ({error}); get the target's weights anew") from None
    embedding = found.get("embed_tokens")
    tied = manifest.tie_word_embeddings and manifest.lm_head_key is None
    head = embedding if tied else found.get("lm_head")
    if embedding is None or head is None:
        wanted = manifest.lm_head_key or "lm_head.weight"
        raise ValueError(f"{folder} has no embed_tokens.weight and {wanted}; found {sorted(found)}")
    return embedding, head


def _match_table_name(key: str, lm_head_key: str | None) -> str | None:
    """Which of the two tables a tensor is, by its name; a vision tower's are none."""
    if lm_head_key is not None and key == lm_head_key:
        return "lm_head"
    if key.endswith("embed_tokens.weight") and "visual" not in key:
        return "embed_tokens"
    return "lm_head" if lm_head_key is None and key.endswith("lm_head.weight") and "visual" not in key else None


def digest_weights(folder: Path) -> str:
    """Return the sha256 of the folder's weights: all bytes of all files, in the order of their names.

    prepare_target alone needs this, once for each set of weights; sha256 reads 0.85 GiB/s of one core (16 GB: 18 s).
    """
    total = hashlib.sha256()
    for file in sorted(folder.glob(WEIGHTS)):
        with file.open("rb") as opened:
            total.update(file.name.encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()


def sample_weights(folder: Path) -> str:
    """Return a digest of the weights' file names, sizes, and of one block in every SAMPLE_EVERY bytes.

    Reads a thousandth of the weights, so that each stage can afford it before it loads them. It tells other weights apart
    (training moves nearly every element of a matrix); that not one byte differs, only `digest_weights` says.
    """
    total = hashlib.sha256()
    for file in sorted(folder.glob(WEIGHTS)):
        size = file.stat().st_size
        total.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for start in (*range(0, size, SAMPLE_EVERY), max(0, size - SAMPLE_BYTES)):
                opened.seek(start)
                total.update(opened.read(SAMPLE_BYTES))
    return total.hexdigest()


def _check_weights(manifest: TargetManifest) -> None:
    """Raise ValueError where the local folder's weights are not those of the manifest."""
    if manifest.weights_sample is None:
        return
    folder = Path(manifest.model)
    stats = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.glob(WEIGHTS)))
    found = _sampled(folder, stats)
    if found != manifest.weights_sample:
        raise ValueError(
            f"{folder} holds other weights ({found:.12}) than those that {TARGET_FOLDER}/target.json names "
            f"({manifest.weights_sample:.12}), of which the present results are; run: dvc repro {MADE_BY}, or put the former "
            "weights back"
        )


@cache
def _sampled(folder: Path, stats: tuple[tuple[str, int, int], ...]) -> str:
    """The sample of the folder as `stats` describes it: a stage asks for the folder several times."""
    return sample_weights(folder)


def digest_files(folder: Path, *patterns: str) -> str:
    """sha256 over the names and bytes of the files that match, in the order of their names."""
    total = hashlib.sha256()
    for file in sorted({f for pattern in patterns for f in folder.glob(pattern)}):
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()
