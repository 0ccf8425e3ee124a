"""Hidden states made elsewhere: our own folders, or SpecForge's records as safetensors.   docs/hiddens.md

Both are found by what they are of: a row's token ids, and its name too where it has pictures, which ids don't tell apart.
Everything a row of ours must have is checked as it is read.

- Ours: a folder with `index.parquet` and shards, or folders of them (train, eval, eval_t).
- SpecForge's: one safetensors file a row, with `input_ids` [S], `hidden_state` [1, S, H] (after the final norm) and
  `aux_hidden_state` [1, S, 3H]. As it writes them they are pickles, which run code when they are read: refused. So are
  they for a target that sees: they hold neither positions nor what stands in pictures' place.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.hidden_states import format
from stages.hidden_states.format import RowHeader, StoredHiddenStates
from stages.runtime import atomic

ReadStored = Callable[[RowHeader], StoredHiddenStates]
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
PARAMETER = "extract_hiddens.import"
CONVERSION_HINT = (
    "convert each, where you trust them: d = torch.load(f, weights_only=True); safetensors.torch.save_file({k: d[k]."
    "contiguous() for k in ('input_ids', 'hidden_state', 'aux_hidden_state')}, f.with_suffix('.safetensors'))"
)


def fingerprint_folder(folder: Path) -> list[Any]:
    """What tells this folder from another or later one without reading all of it."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return [[str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns] for f in files]


def find_hidden_states(folder: Path, wanted: dict[str, RowHeader], hidden_size: int) -> ReadStored:
    """Where every wanted row lies. Raises ValueError where one is missing.

    What is given reads a row and raises ValueError where it is altered, of another shape or not finite.
    """
    if not folder.is_dir():
        raise ValueError(f"params.yaml: {PARAMETER} is {folder}, expected a folder, found none; correct it")
    indexes = sorted(folder.rglob("index.parquet"))
    found = dict(_index_own_folders(indexes) if indexes else _index_specforge_records(folder))
    of_ids = {_hash_header(head): name for name, head in wanted.items()}
    if missing := sorted(name for key, name in of_ids.items() if key not in found):
        raise ValueError(
            f"{PARAMETER}: {folder} has no hidden states of {len(missing)} of {len(of_ids)} rows of data/sampled, the first of them "
            f"{missing[0]}; expected the same token ids. Extract those too, or from the same sampled rows"
        )

    def given(head: RowHeader) -> StoredHiddenStates:
        where, pictured, block = found[_hash_header(head)]()
        _check_stored(where, block, len(head.ids), hidden_size)
        _check_multimodal(where, head, pictured, block)
        return block

    return given


ReadCandidate = Callable[
    [], tuple[str, Tensor | None, StoredHiddenStates]
]  # -> where a row lies, which of its tokens are pictures', the rest


def _index_own_folders(indexes: list[Path]) -> Iterator[tuple[str, ReadCandidate]]:
    for index in indexes:
        with _theirs():
            rows = format.read_index(index.parent)
        for (name,), held in rows.group_by("shard", maintain_order=True):
            (ids,) = _read_tensors(index.parent / str(name), "ids")
            for number, entry in enumerate(held.iter_rows(named=True)):

                def read(
                    folder: Path = index.parent, row: Any = held[number : number + 1]
                ) -> tuple[str, Tensor | None, StoredHiddenStates]:
                    with _theirs():
                        head, block = next(format.read_stored(folder, row))  # checks its checksum
                    return f"{folder}: row {head.id}", head.pictured, block

                named = entry["id"] if entry.get("visual_length") else ""
                yield _hash_ids(ids[entry["offset"] : entry["offset"] + entry["length"]], named), read


@contextmanager
def _theirs() -> Iterator[None]:
    """What is broken in a folder that the user gave no stage of ours makes again, and none of ours may be told to remove it."""
    try:
        yield
    except atomic.Broken as error:
        raise ValueError(
            f"{PARAMETER}: {error.found}; copy it again from where it was made, or make it anew there"
        ) from None


def _index_specforge_records(folder: Path) -> Iterator[tuple[str, ReadCandidate]]:
    paths = sorted(folder.rglob("*.safetensors"))
    if not paths:
        pickles = sum(1 for f in folder.rglob("*") if f.suffix in PICKLE_SUFFIXES)
        raise ValueError(
            f"{PARAMETER}: {folder} holds no index.parquet and no safetensors file, but {pickles} pickles, which run code when they "
            f"are read; {CONVERSION_HINT}"
            if pickles
            else f"{PARAMETER}: {folder} holds no index.parquet and no safetensors file; expected hidden states (docs/hiddens.md)"
        )
    for path in paths:

        def read(path: Path = path) -> tuple[str, Tensor | None, StoredHiddenStates]:
            tensors = _read_tensors(path, "aux_hidden_state", "hidden_state")
            return str(path), None, StoredHiddenStates(*(t.flatten(0, -2) for t in tensors))

        yield _hash_ids(_read_tensors(path, "input_ids")[0].flatten()), read


def _read_tensors(path: Path, *names: str) -> list[Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(name) for name in names]
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{PARAMETER}: {path} is broken, or holds no {' and '.join(names)} ({error}); copy it again from where it was made, "
            "or make it anew there"
        ) from None


def _check_stored(where: str, block: StoredHiddenStates, tokens: int, hidden_size: int) -> None:
    wanted = (tokens, format.NUM_FEATURE_LAYERS * hidden_size), (tokens, hidden_size)
    shapes = tuple(block.features.shape), tuple(block.last.shape)
    if shapes != wanted:
        raise ValueError(
            f"{PARAMETER}: {where} has features and last hidden of shapes {shapes}, expected {wanted} for this target; they are of "
            "another model, or of other layers"
        )
    if block.last.dtype not in format.DTYPES.values() or block.features.dtype != block.last.dtype:
        raise ValueError(
            f"{PARAMETER}: {where} is of {block.features.dtype}, {block.last.dtype}; expected {[*format.DTYPES]}"
        )
    numbers = [
        format.decode_numbers(block.features, block.features_scale),
        format.decode_numbers(block.last, block.last_scale),
    ]
    if not all(bool(torch.isfinite(n).all()) for n in numbers):
        raise ValueError(f"{PARAMETER}: {where} holds NaN or infinity, expected finite hidden states; make them anew")


def _check_multimodal(where: str, head: RowHeader, pictured: Tensor | None, block: StoredHiddenStates) -> None:
    """What a target that sees has beside tokens is there, and is of the same tokens; of another target nothing is."""
    if head.pictured is None and pictured is None:
        return
    if head.pictured is None or pictured is None or not torch.equal(head.pictured, pictured):
        told = ["none" if p is None else f"{int(p.sum())} tokens of pictures" for p in (pictured, head.pictured)]
        raise ValueError(
            f"{PARAMETER}: {where} has positions and embeddings of {told[0]}, expected {told[1]}; they are of another model, or of "
            "a form that keeps none: extract them here"
        )
    if block.visual is not None and not bool(
        torch.isfinite(format.decode_numbers(block.visual, block.visual_scale)).all()
    ):
        raise ValueError(f"{PARAMETER}: {where} holds NaN or infinity, expected finite hidden states; make them anew")


def _hash_header(head: RowHeader) -> str:
    return _hash_ids(head.ids, head.id if head.pieces else "")


def _hash_ids(ids: Tensor, name: str = "") -> str:
    return hashlib.sha256(ids.to(torch.int32).contiguous().numpy().tobytes() + name.encode()).hexdigest()
