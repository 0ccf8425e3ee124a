"""Read and write target.json: the pinned target, and the shapes that later stages need without loading it.

The weights of a builtin target and of a GGUF file are next to the manifest; any other target stays in Hugging Face's cache or
its own folder, and the manifest has the commit or a digest. A feature layer i is *the residual stream entering block i*,
transformers' `hidden_states[i]`; engines count differently, and export converts.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.params import target_files
from stages.params.section import BUILTIN
from stages.runtime import atomic, digests

if TYPE_CHECKING:
    from torch import Tensor

TARGET_FOLDER = Path("artifacts/target")
MADE_BY = "prepare_target"
WEIGHTS = "*.safetensors"
SAMPLE_BYTES, SAMPLE_EVERY = 4096, 4 << 20  # one block in every 4 MiB: 16 MB of 16 GB


@dataclass(frozen=True)
class TemplateFacts:
    """The part of messages that a chat template shows (`template_facts.probe_template`)."""

    hides: tuple[str, ...] = ()  # kinds of what a row may hold that it renders as nothing, as "tools"
    parts: tuple[str, ...] = ()  # roles whose content it takes as a list of parts only
    thinking_keys: tuple[str, ...] = ()  # the keys that it reads for sample_target.thinking


@dataclass(frozen=True)
class TargetManifest:
    model: str  # "builtin/NAME", a Hugging Face id, a local folder or a GGUF file
    revision: str | None  # the commit, for a Hugging Face id
    modality: str  # "text", or "image" for a multimodal target
    config_digest: str  # sha256 of config.json and of the image processor's configs
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
    chat_template: str | None = None  # Jinja, instead of the tokenizer's own
    date: str | None = None  # that the chat template shows as today's, in ISO form
    template: TemplateFacts = TemplateFacts()  # what the chat template shows
    image_token_id: int | None = None  # where hidden states support images
    logits_scale: float = 1.0  # the target's logits are this times final hidden states times its head (`head_check`)
    weights_digest: str | None = None  # sha256 of a local folder's weights; else the commit or DVC pins them
    weights_sample: str | None = None  # digest of a sample of their bytes, compared by every stage that loads them
    weights: str | None = None  # what they are, where they are not the model's own: "dequantised from Q4_1"

    def describe_model(self) -> str:
        """Return the model with what its weights are, for tables."""
        return f"{self.model}, {self.weights}" if self.weights else self.model


def write_manifest(path: Path, manifest: TargetManifest) -> None:
    atomic.write_json(path / "target.json", asdict(manifest))


def read_manifest(path: Path = TARGET_FOLDER) -> TargetManifest:
    """Return the manifest. Raises ValueError naming the file and the stage to run, where it is missing or outdated."""
    fields = atomic.read_json(path / "target.json", MADE_BY)
    try:
        facts = {name: tuple(value) for name, value in fields.pop("template").items()}
        return TargetManifest(**fields, template=TemplateFacts(**facts))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}/target.json is of another version ({error}); run: dvc repro {MADE_BY}") from None


def resolve_weights_folder(manifest: TargetManifest, path: Path = TARGET_FOLDER) -> Path:
    """Return the folder with config.json, tokenizer and weights; of a Hugging Face id the one in its local cache.

    Raises ValueError where a local folder's weights have changed since prepare_target.
    """
    if manifest.model.startswith(BUILTIN) or manifest.model.endswith(
        target_files.GGUF_SUFFIX
    ):  # made by prepare_target
        return path
    if Path(manifest.model).is_dir():
        folder = Path(manifest.model)
        if manifest.weights_sample is not None and (found := sample_weights(folder)) != manifest.weights_sample:
            raise ValueError(
                f"{folder} holds other weights ({found:.12}) than those that {TARGET_FOLDER}/target.json names "
                f"({manifest.weights_sample:.12}); run: dvc repro {MADE_BY}, or restore the former weights"
            )
        return folder
    from huggingface_hub import snapshot_download  # slow to import, and only hub targets need it

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    return Path(snapshot_download(manifest.model, revision=manifest.revision, allow_patterns=patterns))


def read_embedding_and_head(manifest: TargetManifest, path: Path = TARGET_FOLDER) -> "tuple[Tensor, Tensor]":
    """Return the target's embedding [V, H] and output head [V, H] as float32, without loading the model.

    A tied target has one table for both. Raises ValueError where files are missing or have no such tensors.
    """
    import torch  # seconds, and stages that compute nothing read the manifest too

    from stages.target import foreign_files

    folder = resolve_weights_folder(manifest, path)
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}  # embed_tokens, lm_head -> the tensor's full name
    for key, file in foreign_files.iterate_tensors(folder):
        table = key.removesuffix(".weight").rpartition(".")[2]
        is_table = table in ("embed_tokens", "lm_head") and "visual" not in key  # a vision tower has tables too
        if is_table and len(key) <= len(names.get(table, key)):
            # The shortest name: multi-token prediction blocks may hold copies under longer ones.
            # Copied to memory aligned to 64 bytes: unaligned tensors of the mapped file round differently in one process of
            # ten (docs/LOG.md).
            numbers = torch.empty(file.get_slice(key).get_shape(), dtype=torch.float32)
            found[table], names[table] = numbers.copy_(file.get_tensor(key)), key
    embedding = found.get("embed_tokens")
    head = embedding if manifest.tie_word_embeddings else found.get("lm_head")
    if embedding is None or head is None:
        raise ValueError(
            f"{folder} has no embed_tokens.weight and lm_head.weight, found {sorted(found)}: embedding and head are read by "
            "these names; such a model can't be a target yet"
        )
    return embedding, head


def sample_weights(folder: Path) -> str:
    """Return a digest of the weights' file names, sizes, and one block in every SAMPLE_EVERY bytes.

    Reading a thousandth is cheap enough for every stage. It detects other weights (training changes nearly every element of
    a matrix), not a single altered byte: that is `digest_files`.
    """
    return _sample_files(tuple((f, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.glob(WEIGHTS))))


@cache
def _sample_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the digest of files of these sizes and times, cached: stages resolve the folder several times."""
    total = hashlib.sha256()
    for file, size, _ in files:
        total.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for start in (*range(0, size, SAMPLE_EVERY), max(0, size - SAMPLE_BYTES)):
                opened.seek(start)
                total.update(opened.read(SAMPLE_BYTES))
    return total.hexdigest()


def digest_files(folder: Path, *patterns: str) -> str:
    """Return the sha256 over names and bytes of the matching files, in the order of their names.

    0.85 GiB/s on one core; several files at once.
    """
    files = sorted({f for pattern in patterns for f in folder.glob(pattern)})
    total = hashlib.sha256()
    with ThreadPoolExecutor(digests.THREADS) as threads:
        for file, digest in zip(files, threads.map(digests.digest_file, files), strict=True):
            total.update(file.name.encode() + b"\0" + bytes.fromhex(digest))
    return total.hexdigest()
