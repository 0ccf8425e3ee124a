"""Read stored hidden states: all rows in order, or any row at random as training does, as views of the mapped shards.

Shards are mapped, never read whole. A row's checksum is compared the first time the row is read.
"""

import hashlib
import json
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from safetensors import safe_open
from torch import Tensor

from stages.hidden_states import format
from stages.hidden_states.format import MADE_BY, HiddenStatesRow, IndexEntry, RowHeader, StoredHiddenStates
from stages.hidden_states.shard_plan import name_shard
from stages.runtime import atomic
from stages.runtime.atomic import BrokenArtifactError
from stages.target import manifest
from stages.target.manifest import TargetManifest

TRAIN_FOLDER, EVAL_FOLDER = Path("data/hiddens/train"), Path("data/hiddens/eval")
STORED_DTYPES = {format.SAFETENSORS_DTYPES[dtype]: dtype for dtype in format.DTYPES.values()}
ShardSlices = dict[str, Any]  # tensor name -> safetensors' slice, mapped and unread


class HiddenStatesReader:
    """The rows of one split, by their number in the index; thread-safe.

    `feature_indices`: which of the stored feature layers rows have, by index (`locate_feature_layers`); None: all.
    `online`: rows have tokens and masks only, and the caller computes the hidden states (extract_hiddens.online).
    """

    def __init__(self, folder: Path, feature_indices: Sequence[int] | None = None):
        self.folder, self.feature_indices = folder, feature_indices
        index = read_index(folder)
        self.lengths: list[int] = index["length"].to_list()
        self._entries = [IndexEntry(**row) for row in index.iter_rows(named=True)]
        self._verified: set[int] = set()
        self._shards: dict[str, ShardSlices] = {}
        self._lock = threading.Lock()
        self.online = bool(self._entries) and open_shard(folder / self._entries[0].shard)["last"].get_shape()[1] == 0

    def __len__(self) -> int:
        return len(self._entries)

    def read_row(self, number: int, dtype: torch.dtype) -> HiddenStatesRow:
        """Return a row in its stored dtype, or in `dtype` where it is stored in fp8. Raises ValueError as `read_row` does."""
        entry = self._entries[number]
        path = self.folder / entry.shard
        with self._lock:
            shard = self._shards[path.name] = self._shards.get(path.name) or open_shard(path)
        header, block = read_row(path, entry, shard, verify=number not in self._verified)
        self._verified.add(number)
        block = block if self.feature_indices is None else block.select_features(self.feature_indices)
        dtype = block.last.dtype if block.last_scale is None else dtype
        return HiddenStatesRow(**vars(header), **format.decode_block(block, dtype)._asdict())


def read_rows(
    folder: Path, dtype: torch.dtype = torch.float32, feature_indices: Sequence[int] | None = None
) -> Iterator[HiddenStatesRow]:
    """Yield every row in order, verified, its numbers as `dtype` however they are stored.

    `feature_indices` are those of HiddenStatesReader.

    Raises ValueError naming the shard and the row, where a shard is missing, cut, altered, or holds NaN or infinity.
    """
    for header, whole in read_stored(folder, read_index(folder)):
        block = whole if feature_indices is None else whole.select_features(feature_indices)
        yield HiddenStatesRow(**vars(header), **format.decode_block(block, dtype)._asdict())


def read_headers(folder: Path) -> Iterator[RowHeader]:
    """Yield the header of every row in order. Hidden states are not read, so checksums are not compared.

    Raises ValueError naming the shard, where one is missing or cut.
    """
    for path, entries in _group_by_shard(folder, read_index(folder)):
        slices = open_shard(path)
        for entry in entries:
            with atomic.guard_artifact(path, "safetensors", MADE_BY):
                header = _read_header(entry, slices)
            yield header


def has_rows(folder: Path) -> bool:
    return (folder / "index.parquet").exists() and len(read_index(folder)) > 0


def list_tokens(folder: Path) -> set[int]:
    """Return the tokens that rows hold, in prompts and answers."""
    found: set[int] = set()
    for header in read_headers(folder):
        found.update(header.ids.unique().tolist())
    return found


def read_stored(folder: Path, rows: pl.DataFrame) -> Iterator[tuple[RowHeader, StoredHiddenStates]]:
    """Yield the given rows of the index as stored, verified as `read_rows` does."""
    for path, entries in _group_by_shard(folder, rows):
        slices = open_shard(path)
        for entry in entries:
            yield read_row(path, entry, slices)


def read_index(folder: Path) -> pl.DataFrame:
    """Return index.parquet. Raises ValueError where it is missing, broken or has other columns."""
    path = folder / "index.parquet"
    with atomic.guard_artifact(path, "Parquet", MADE_BY):
        index = pl.read_parquet(path, glob=False)
    if index.schema not in (format.INDEX_SCHEMA, format.MULTIMODAL_INDEX_SCHEMA):
        raise BrokenArtifactError(
            f"{path} has columns {dict(index.schema)}, expected {dict(format.INDEX_SCHEMA)}",
            atomic.format_rerun_hint(MADE_BY),
        )
    if any(index.null_count().row(0)):
        raise BrokenArtifactError(f"{path} lacks values of some rows", atomic.format_rerun_hint(MADE_BY))
    _check_shards(folder, index)
    return index


def _check_shards(folder: Path, index: pl.DataFrame) -> None:
    """Raise ValueError unless the rows of the index fill the folder's shards, in order, each once, and all have one form."""
    names = [str(name) for name in index["shard"].unique(maintain_order=True)]
    wanted = [name_shard(number) for number in range(len(names))]
    if names != wanted or sorted(file.name for file in folder.glob("*.safetensors")) != wanted:
        raise BrokenArtifactError(
            f"{folder}: index.parquet and the shards beside it are not of one extraction, expected rows of all, in order",
            atomic.format_rerun_hint(MADE_BY),
        )
    form: tuple[int, int, torch.dtype] | None = None  # K, H and the stored dtype of the first shard
    for name, rows in zip(names, index.partition_by("shard", maintain_order=True), strict=True):
        with atomic.guard_artifact(folder / name, "hidden states", MADE_BY):
            found = {tensor: (part.get_dtype(), part.get_shape()) for tensor, part in open_shard(folder / name).items()}
            kind, (_, width) = found["last"]
            form = form or (found["features"][1][1] // max(1, width), width, STORED_DTYPES[kind])
            tokens = _count_tokens(rows, "offset", "length")
            image_tokens = _count_tokens(rows, *format.VISUAL_RANGE) if format.VISUAL_RANGE[0] in rows.columns else None
            shapes = format.list_shard_shapes(tokens, image_tokens, *form)
            expected = {tensor: (format.SAFETENSORS_DTYPES[of], shape) for tensor, (of, shape) in shapes.items()}
            if wrong := [tensor for tensor in found | expected if found.get(tensor) != expected.get(tensor)]:
                raise ValueError(f"{wrong[0]} is {found.get(wrong[0])}, expected {expected.get(wrong[0])}")


def _count_tokens(rows: pl.DataFrame, offset: str, length: str) -> int:
    """Return the tokens of a shard's rows. Raises ValueError unless each row begins where the one before ends."""
    if (rows[length] < 0).any() or (rows[offset] != rows[length].cum_sum() - rows[length]).any():
        raise ValueError("its rows in index.parquet leave tokens out or have them twice")
    return int(rows[length].sum())


def digest_folder(folder: Path) -> str:
    """Return a short digest of the whole content, from the checksums in the index; resumed runs compare it."""
    index = read_index(folder)
    return f"{zlib.crc32(index.write_csv().encode()):08x}"


def open_shard(path: Path) -> ShardSlices:
    """Map the shard's tensors without reading them. Raises ValueError where the shard is missing or cut."""
    with atomic.guard_artifact(path, "safetensors", MADE_BY):
        shard = safe_open(path, framework="pt")
        names = ["features", "last", "ids", "mask"]
        if is_multimodal := "positions" in shard.keys():  # noqa: SIM118 - not a dict
            names += ["positions", "pictured", "visual"]
        if shard.get_slice("features").get_dtype() == format.SAFETENSORS_DTYPES[format.FP8]:
            names += ["features_scale", "last_scale", *(["visual_scale"] if is_multimodal else [])]
        return {name: shard.get_slice(name) for name in names}


def read_row(
    path: Path, entry: IndexEntry, slices: ShardSlices, verify: bool = True
) -> tuple[RowHeader, StoredHiddenStates]:
    """Return the row of an index entry as stored, its checksum compared if `verify`.

    Raises ValueError naming the row, where it is not what its entry says, or holds NaN or infinity.
    """
    with atomic.guard_artifact(path, "safetensors", MADE_BY):
        found = _read_header(entry, slices), _read_block(entry, slices)
        is_whole = not verify or format.is_checksum(entry.checksum, *found)
    if not is_whole:
        raise BrokenArtifactError(
            f"{path}: row {entry.id} does not match its checksum", atomic.format_rerun_hint(MADE_BY)
        )
    if not entry.finite:
        raise BrokenArtifactError(
            f"{path}: row {entry.id} holds NaN or infinity, expected finite hidden states",
            "set extract_hiddens.dtype or target.dtype to float32 and run: dvc repro extract_hiddens",
        )
    return found


def _group_by_shard(folder: Path, rows: pl.DataFrame) -> Iterator[tuple[Path, list[IndexEntry]]]:
    for (name,), group in rows.group_by("shard", maintain_order=True):
        yield folder / str(name), [IndexEntry(**row) for row in group.iter_rows(named=True)]


def _read_block(entry: IndexEntry, slices: ShardSlices) -> StoredHiddenStates:
    stored = {name: part for name, part in slices.items() if name not in ("ids", "mask", "pictured")}
    return StoredHiddenStates(
        **{n: part[entry.image_tokens if n in format.VISUAL_TENSORS else entry.tokens] for n, part in stored.items()}
    )


def _read_header(entry: IndexEntry, slices: ShardSlices) -> RowHeader:
    bits = {name: _unpack_bits(slices[name], entry.tokens) for name in ("mask", "pictured") if name in slices}
    ids = slices["ids"][entry.tokens]
    return RowHeader(entry.id, ids, bits["mask"], entry.prompt_length, entry.finish_reason, bits.get("pictured"))


def _unpack_bits(packed: Any, tokens: slice) -> Tensor:
    """Return a range of packed bits as [T] bool."""
    bits = np.unpackbits(packed[tokens.start // 8 : -(-tokens.stop // 8)].numpy())  # eight tokens a byte, across rows
    return torch.from_numpy(bits[tokens.start % 8 :][: tokens.stop - tokens.start].astype(bool))


ORIGIN_FILE, EXTRACTING_STAGE = "origin.json", "extract_hiddens"
SAMPLED_END_BYTES = 1 << 20  # digested at the start and at the end of each weight file


def write_origin(folder: Path, split: str, target: TargetManifest) -> None:
    atomic.write_json(folder / ORIGIN_FILE, {"split": split, "model": target.model, "target": digest_target(target)})


def check_origin(folder: Path, split: str, target: TargetManifest) -> None:
    """Raise ValueError where a folder's hidden states are another split's or another target's."""
    found = atomic.read_json(folder / ORIGIN_FILE, EXTRACTING_STAGE)
    again = f"run: dvc repro -f -s {EXTRACTING_STAGE}"
    if found.get("split") != split:
        raise ValueError(f"{folder} holds the split {found.get('split')}, expected {split}; {again}")
    if found.get("target") != digest_target(target):
        raise ValueError(
            f"{folder} holds hidden states of another target, {found.get('model')} ({found.get('target')!s:.12}), expected "
            f"those of {target.model} as it is in {manifest.TARGET_FOLDER} now ({digest_target(target):.12}); {again}"
        )


def digest_target(target: TargetManifest) -> str:
    """Return a digest of the target's manifest and of its weight files' names, sizes and ends.

    A digest of all weights would take as long as loading a large target. Hidden states don't depend on the scale of logits.
    """
    known = {name: value for name, value in asdict(target).items() if name != "logits_scale"}
    total = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for path in sorted(manifest.resolve_weights_folder(target).glob("*.safetensors")):
        size = path.stat().st_size
        total.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            total.update(file.read(SAMPLED_END_BYTES))
            file.seek(max(0, size - SAMPLED_END_BYTES))
            total.update(file.read(SAMPLED_END_BYTES))
    return total.hexdigest()
