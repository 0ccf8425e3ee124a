"""Read hidden states made elsewhere: folders of this format, or SpecForge's records as safetensors.   docs/hiddens.md

Rows are found by their token ids, and by their name too where they have images, which ids do not tell apart. Shapes, dtypes
and finiteness are checked on reading.

- Own format: a folder with `index.parquet` and shards, or folders of them (train, eval, eval_t).
- SpecForge: one safetensors file per row, with `input_ids` [S], `hidden_state` [1, S, H] (after the final norm) and
  `aux_hidden_state` [1, S, KH] of K feature layers. SpecForge writes pickles, which run code when they are read; those are
  refused. So are these records for a multimodal target, since they hold neither positions nor image embeddings.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import safe_open
from torch import Tensor

from stages.hidden_states import format, reader
from stages.hidden_states.format import RowHeader, StoredHiddenStates
from stages.runtime import guarded_files

ReadStored = Callable[[RowHeader], StoredHiddenStates]
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
PARAMETER = "extract_hiddens.import"
CONVERSION_HINT = (
    "convert each, where you trust them: d = torch.load(f, weights_only=True); safetensors.torch.save_file({k: d[k]."
    "contiguous() for k in ('input_ids', 'hidden_state', 'aux_hidden_state')}, f.with_suffix('.safetensors'))"
)


def fingerprint_folder(folder: Path) -> list[Any]:
    """Return names, sizes and times of the files, which identify a folder without reading all of it."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return [[str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def find_hidden_states(
    folder: Path, wanted: dict[str, RowHeader], layers: Sequence[int], hidden_size: int
) -> ReadStored:
    """Return a function that reads a wanted row with features of `layers`. Raises ValueError where one is missing.

    That function raises ValueError where a row is altered, of another shape or not finite.
    """
    if not folder.is_dir():
        raise ValueError(f"params.yaml: {PARAMETER} is {folder}, expected a folder, found none; correct it")
    indexes = sorted(folder.rglob("index.parquet"))
    found = dict(_index_own_folders(indexes) if indexes else _index_specforge_records(folder))
    names = {_hash_header(header): name for name, header in wanted.items()}
    if missing := sorted(name for key, name in names.items() if key not in found):
        raise ValueError(
            f"{PARAMETER}: {folder} has no hidden states of {len(missing)} of {len(names)} rows of data/sampled, the "
            f"first of them {missing[0]}; expected the same token ids. Extract those too, or from the same sampled rows"
        )

    def read(header: RowHeader) -> StoredHiddenStates:
        candidate = found[_hash_header(header)]()
        _check_row(candidate, header, layers, hidden_size)
        return candidate.block

    return read


@dataclass(frozen=True)
class ImportedRow:
    """A row as found."""

    location: str  # for messages
    image_token_mask: Tensor | None
    block: StoredHiddenStates


ReadCandidate = Callable[[], ImportedRow]


def _index_own_folders(indexes: list[Path]) -> Iterator[tuple[str, ReadCandidate]]:
    for index in indexes:
        with _guard_import(index):
            rows = reader.read_index(index.parent)
        for (name,), group in rows.group_by("shard", maintain_order=True):
            (ids,) = _read_tensors(index.parent / str(name), "ids")
            for number, entry in enumerate(group.iter_rows(named=True)):
                row_name = entry["id"] if entry.get("visual_length") else ""
                key = _hash_ids(ids[entry["offset"] : entry["offset"] + entry["length"]], row_name)
                yield key, partial(_read_own_row, index.parent, group[number : number + 1])


def _read_own_row(folder: Path, row: pl.DataFrame) -> ImportedRow:
    with _guard_import(folder / "index.parquet"):
        header, block = next(reader.read_stored(folder, row))  # compares the checksum
    return ImportedRow(f"{folder}: row {header.id}", header.image_token_mask, block)


@contextmanager
def _guard_import(path: Path) -> Iterator[None]:
    """Guard the parsing of a file, without the advice of `BrokenArtifactError`: no stage makes the user's folder again."""
    try:
        with guarded_files.guard_parsing(path, "hidden states", ""):
            yield
    except guarded_files.BrokenArtifactError as error:
        raise ValueError(
            f"{PARAMETER}: {error.found}; copy it again from where it was made, or make it again there"
        ) from None


def _index_specforge_records(folder: Path) -> Iterator[tuple[str, ReadCandidate]]:
    paths = sorted(folder.rglob("*.safetensors"))
    if not paths:
        found = f"{PARAMETER}: {folder} holds no index.parquet and no safetensors file"
        pickles = sum(1 for f in folder.rglob("*") if f.suffix in PICKLE_SUFFIXES)
        raise ValueError(
            f"{found}, but {pickles} pickles, which run code when they are read; {CONVERSION_HINT}"
            if pickles
            else f"{found}; expected hidden states (docs/hiddens.md)"
        )
    for path in paths:
        yield _hash_ids(_read_tensors(path, "input_ids")[0].flatten()), partial(_read_specforge_record, path)


def _read_specforge_record(path: Path) -> ImportedRow:
    with _guard_import(path):
        tensors = [t.flatten(0, -2) for t in _read_tensors(path, "aux_hidden_state", "hidden_state")]
    return ImportedRow(str(path), None, StoredHiddenStates(*tensors))


def _read_tensors(path: Path, *names: str) -> list[Tensor]:
    with _guard_import(path), safe_open(path, framework="pt") as file:
        return [file.get_tensor(name) for name in names]


def _check_row(row: ImportedRow, header: RowHeader, layers: Sequence[int], hidden_size: int) -> None:
    """Check shapes, dtypes, finiteness, and that positions and image embeddings are those of the header's tokens, or absent."""
    block, where, tokens = row.block, f"{PARAMETER}: {row.location}", len(header.ids)
    expected = (tokens, len(layers) * hidden_size), (tokens, hidden_size)
    shapes = tuple(block.features.shape), tuple(block.last.shape)
    if shapes != expected:
        raise ValueError(
            f"{where} has features and last hidden of shapes {shapes}, expected {expected} for this target and the "
            f"{len(layers)} layers of target.feature_layers, {[*layers]}; they are of another model, or of other layers"
        )
    if block.last.dtype not in format.DTYPES.values() or block.features.dtype != block.last.dtype:
        raise ValueError(f"{where} is of {block.features.dtype}, {block.last.dtype}; expected {[*format.DTYPES]}")
    masks = row.image_token_mask, header.image_token_mask
    if any(mask is not None for mask in masks) and not (
        masks[0] is not None and masks[1] is not None and torch.equal(masks[0], masks[1])
    ):
        counts = ["none" if mask is None else f"{int(mask.sum())} image tokens" for mask in masks]
        raise ValueError(
            f"{where} has positions and embeddings of {counts[0]}, expected {counts[1]}; they are of another model, or of "
            "a form that keeps none: extract them here"
        )
    if not all(bool(torch.isfinite(t).all()) for t in format.decode_block(block, torch.float32) if t is not None):
        raise ValueError(f"{where} holds NaN or infinity, expected finite hidden states; make them again")


def _hash_header(header: RowHeader) -> str:
    return _hash_ids(header.ids, header.id if header.num_image_tokens else "")


def _hash_ids(ids: Tensor, name: str = "") -> str:
    return hashlib.sha256(ids.to(torch.int32).contiguous().numpy().tobytes() + name.encode()).hexdigest()
