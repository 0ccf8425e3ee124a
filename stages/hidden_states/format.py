"""Hidden states on disk: a few large safetensors shards and an index, unpadded.   docs/hiddens.md

A shard holds rows end to end: `features` [N, 3H] (low, mid, high), `last` [N, H] (after the final norm), `ids` [N]
int32 and `mask` (one bit a token: is it the assistant's?). `index.parquet` says where each row lies, with its checksum
and whether all its numbers are finite. 4H numbers and 4 bytes and a bit a token: at H = 4096 in bfloat16, 32.8 kB.

In fp8 (e4m3) the numbers of a token come in four parts, low, mid, high and last, each divided by a float32 scale of its
own: `features_scale` [N, 3] and `last_scale` [N, 1]. A residual stream grows from block to block, so one scale for all
would waste the low part's precision. 16 bytes more a token: at H = 4096, 16.4 kB.

Of a target that sees a shard also holds `positions` [N, 3] int32 (its rotary positions), `pictured` (one bit a token: does
it stand for a piece of a picture?) and the pieces' embeddings `visual` [M, H], end to end in the order of those tokens,
in fp8 with `visual_scale` [M, 1]; and the index says where a row's pieces lie. A text target's shards have none of it.

Shards are planned before anything is computed, from lengths alone, so that any number of processes makes the same
files; and are written where they will lie, row by row, since header and offsets are known.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.runtime import atomic
from stages.runtime.atomic import Broken

INDEX_SCHEMA = pl.Schema(
    {
        "id": pl.String,
        "shard": pl.String,
        "offset": pl.Int64,  # first token of the row in its shard
        "length": pl.Int64,  # T
        "prompt_length": pl.Int64,  # tokens before the answer
        "finish_reason": pl.String,
        "checksum": pl.UInt32,  # crc32 of id, prompt_length, finish_reason, features, last hidden, ids, mask, scales
        "finite": pl.Boolean,
    }
)
MULTIMODAL_INDEX_SCHEMA = pl.Schema(
    {**INDEX_SCHEMA, "visual_offset": pl.Int64, "visual_length": pl.Int64}
)  # the index, of a target that sees
MADE_BY = "extract_hiddens"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
FP8 = DTYPES["fp8"]
FP8_MAX = torch.finfo(FP8).max  # 448
VISUAL_TENSORS = ("visual", "visual_scale")  # have a row a piece of a picture; everything else a row a token
NUM_FEATURE_LAYERS = 3  # of the features: low, mid, high
SAFETENSORS_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", FP8: "F8_E4M3", torch.int32: "I32",
    torch.uint8: "U8",
}  # fmt: skip


@dataclass(frozen=True)
class HiddenStatesRow:
    """One row, unpadded, on the CPU."""

    id: str
    ids: Tensor  # [T] int32
    mask: Tensor  # [T] bool: the assistant's tokens
    features: Tensor  # [T, 3H]
    last: Tensor  # [T, H]
    prompt_length: int
    finish_reason: str
    positions: Tensor | None = None  # [T, 3] int32: this and what follows of a target that sees
    pictured: Tensor | None = None  # [T] bool: tokens that stand for a piece of a picture
    visual: Tensor | None = None  # [M, H] those pieces' embeddings


@dataclass(frozen=True)
class RowHeader:
    """What is known of a row before its hidden states are."""

    id: str
    ids: Tensor  # [T] int32
    mask: Tensor  # [T] bool
    prompt_length: int
    finish_reason: str
    pictured: Tensor | None = None  # [T] bool, of a target that sees

    @property
    def pieces(self) -> int:
        """M: tokens that stand for a piece of a picture."""
        return 0 if self.pictured is None else int(self.pictured.sum())


@dataclass(frozen=True)
class StoredHiddenStates:
    """Tokens' hidden states as they are stored. The scales are there in fp8 only."""

    features: Tensor  # [N, 3H]
    last: Tensor  # [N, H]
    features_scale: Tensor | None = None  # [N, 3] float32
    last_scale: Tensor | None = None  # [N, 1] float32
    positions: Tensor | None = None  # [N, 3] int32: this and what follows of a target that sees
    visual: Tensor | None = None  # [M, H]
    visual_scale: Tensor | None = None  # [M, 1] float32

    def part(self, tokens: slice, pieces: slice) -> "StoredHiddenStates":
        """Some of the tokens, and of the pieces of pictures."""
        return StoredHiddenStates(
            **{n: t[pieces if n in VISUAL_TENSORS else tokens] for n, t in self.tensors().items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def count_token_bytes(hidden_size: int, dtype: torch.dtype, sees: bool = False) -> float:
    """Bytes a token takes on disk: 4H numbers, in fp8 four float32 scales, an int32 id, one bit.

    Of a target that sees three int32 positions and a bit more.
    """
    scales = 4 * (NUM_FEATURE_LAYERS + 1) if dtype == FP8 else 0
    return 4 * hidden_size * dtype.itemsize + scales + 4 + 1 / 8 + (12 + 1 / 8 if sees else 0)


def count_visual_bytes(hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes that a piece of a picture takes beside its token's: H numbers, in fp8 a float32 scale."""
    return hidden_size * dtype.itemsize + (4 if dtype == FP8 else 0)


# Numbers


def encode_numbers(numbers: Tensor, dtype: torch.dtype, parts: int = 1) -> tuple[Tensor, Tensor | None]:
    """Numbers [N, W] as stored; in fp8 with the float32 scales [N, parts] that `decode_numbers` multiplies them with.

    The largest number of a part becomes e4m3's largest, 448. Then every number x of the part comes back within
    max(|x| / 16, scale / 1024): three bits after the point, and below 2**-6 steps of 2**-9. A part that holds NaN or
    infinity has such a scale too.
    """
    if dtype != FP8:
        return numbers.to(dtype), None
    split = numbers.float().unflatten(-1, (parts, -1))  # [N, parts, W / parts]
    scale = (split.abs().amax(-1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)  # [N, parts]
    return (split / scale[..., None]).to(FP8).flatten(-2), scale


def decode_numbers(tensor: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [N, W] as `dtype`: what a shard's `features` or `last` stand for, with the scales [N, parts] of fp8."""
    if scale is None:
        return tensor.to(dtype)
    return (tensor.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)


def find_finite_tokens(block: StoredHiddenStates) -> Tensor:
    """Of each token [N], whether what is stored of it is finite: a number too large for float16 is not."""
    checks = [block.features_scale, block.last_scale] if block.last_scale is not None else [block.features, block.last]
    return torch.stack([torch.isfinite(t).all(-1) for t in checks if t is not None]).all(0)


# Writing


def plan_shards(
    lengths: Sequence[int], token_bytes: float, shard_bytes: int, pieces: Sequence[int] = (), piece_bytes: int = 0
) -> list[range]:
    """Which consecutive rows each shard holds: it is closed by the row that fills it. `pieces` of pictures, a row each."""
    shards, first, size = [], 0, 0.0
    for number, length in enumerate(lengths):
        size += length * token_bytes + (pieces[number] * piece_bytes if pieces else 0)
        if size >= shard_bytes:
            shards.append(range(first, number + 1))
            first, size = number + 1, 0.0
    return [*shards, range(first, len(lengths))] if first < len(lengths) else shards


def name_shard(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


class ShardWriter:
    """One shard while it is written: rows are put in any order, by any thread, and `commit` gives the file its name."""

    def __init__(self, path: Path, heads: list[RowHeader], hidden_size: int, dtype: torch.dtype) -> None:
        self.path, self.heads = path, heads
        self.offsets = np.cumsum([0, *(len(h.ids) for h in heads)]).tolist()  # first token of each row
        self.pieces = np.cumsum([0, *(h.pieces for h in heads)]).tolist()  # first piece of each row
        self.sees = heads[0].pictured is not None
        self.entries: list[dict[str, Any]] = [{} for _ in heads]
        ids = torch.cat([h.ids for h in heads])
        bits = _pack_bits([h.mask for h in heads])
        shapes: dict[str, tuple[torch.dtype, list[int]]] = {
            "ids": (torch.int32, [len(ids)]),
            "features": (dtype, [len(ids), NUM_FEATURE_LAYERS * hidden_size]),
            "last": (dtype, [len(ids), hidden_size]),
            "mask": (torch.uint8, [len(bits)]),
        }
        scales = {"features_scale": [len(ids), NUM_FEATURE_LAYERS], "last_scale": [len(ids), 1]}
        if self.sees:
            shapes["positions"] = (torch.int32, [len(ids), 3])
            shapes["visual"] = (dtype, [self.pieces[-1], hidden_size])
            shapes["pictured"] = (torch.uint8, [len(bits)])
            scales["visual_scale"] = [self.pieces[-1], 1]
        if dtype == FP8:
            shapes = {**{name: (torch.float32, shape) for name, shape in scales.items()}, **shapes}
        # The widest numbers first, so that each begins at a multiple of its size; the format allows no holes.
        shapes = dict(sorted(shapes.items(), key=lambda item: -item[1][0].itemsize))
        header, self._places, end = {}, {}, 0
        for name, (kind, shape) in shapes.items():
            size = kind.itemsize * int(np.prod(shape))
            header[name] = {"dtype": SAFETENSORS_DTYPES[kind], "shape": shape, "data_offsets": [end, end + size]}
            self._places[name] = (end, size // max(1, shape[0]))  # where it begins, bytes of its row
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        self._data = 8 + len(text)
        self._stack = ExitStack()
        self._temporary = self._stack.enter_context(atomic.write_file(path))
        self._file = self._stack.enter_context(self._temporary.open("wb"))
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)
        self._file.flush()
        self._write("ids", 0, ids)
        self._write("mask", 0, bits)
        if self.sees:
            self._write("pictured", 0, _pack_bits([h.pictured for h in heads if h.pictured is not None]))

    def put(self, first: int, count: int, block: StoredHiddenStates, finite: Tensor, run: Callable = map) -> None:
        """Rows first … first + count - 1, end to end in `block` on the CPU, and of each token whether it is finite [N].

        `run` is map, or that of a pool of threads: checksums and writing let Python's lock go.
        """
        start, end = self.offsets[first], self.offsets[first + count]
        before = self.pieces[first]
        assert len(block.features) == len(finite) == end - start
        assert block.visual is None or len(block.visual) == self.pieces[first + count] - before

        def enter(row: int) -> None:
            tokens = slice(self.offsets[row] - start, self.offsets[row + 1] - start)
            part = block.part(tokens, slice(self.pieces[row] - before, self.pieces[row + 1] - before))
            self.entries[row] = {
                "id": self.heads[row].id, "shard": self.path.name, "offset": self.offsets[row],
                "length": len(self.heads[row].ids), "prompt_length": self.heads[row].prompt_length,
                "finish_reason": self.heads[row].finish_reason,
                "checksum": _compute_checksum(self.heads[row], part),
                "finite": bool(finite[tokens].all()) and _is_visual_finite(part),
            }  # fmt: skip
            if self.sees:
                seen = {"visual_offset": self.pieces[row], "visual_length": self.heads[row].pieces}
                self.entries[row] |= seen

        writes: list[Callable[[], None]] = [
            partial(self._write, n, before if n in VISUAL_TENSORS else start, t) for n, t in block.tensors().items()
        ]
        list(run(lambda do: do(), writes + [partial(enter, row) for row in range(first, first + count)]))

    def commit(self) -> list[dict[str, Any]]:
        """Give the whole shard its name; returns its rows' entries of the index."""
        assert all(self.entries), "a row was never put"
        self._stack.close()
        return self.entries

    def discard(self) -> None:
        """Remove what was written of a shard that will not be finished: a full disk is else left full."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, name: str, token: int, tensor: Tensor) -> None:
        begin, row = self._places[name]
        place, left = self._data + begin + token * row, _view_bytes(tensor)
        while left:  # a call takes 2 GiB at most
            written = os.pwrite(self._file.fileno(), left, place)
            place, left = place + written, left[written:]


def _pack_bits(masks: list[Tensor]) -> Tensor:
    """Masks [T] of rows end to end, as bits."""
    return torch.from_numpy(np.packbits(torch.cat(masks).numpy()))


def _is_visual_finite(block: StoredHiddenStates) -> bool:
    checked = block.visual if block.visual_scale is None else block.visual_scale
    return checked is None or bool(torch.isfinite(checked).all())


def write_rows(folder: Path, rows: Iterable[HiddenStatesRow], dtype: torch.dtype, shard_bytes: int) -> int:
    """Write rows in their order into shards of about `shard_bytes`; returns how many. The caller makes `folder` atomic."""
    rows, entries = list(rows), []
    hidden_size, sees = (rows[0].last.shape[1], rows[0].visual is not None) if rows else (0, False)
    heads, each = (
        [_make_header(r) for r in rows],
        (count_token_bytes(hidden_size, dtype, sees), count_visual_bytes(hidden_size, dtype)),
    )
    spans = plan_shards([len(h.ids) for h in heads], each[0], shard_bytes, [h.pieces for h in heads], each[1])
    for number, span in enumerate(spans):
        shard = ShardWriter(folder / name_shard(number), heads[span.start : span.stop], hidden_size, dtype)
        for i, row in enumerate(rows[span.start : span.stop]):
            features, features_scale = encode_numbers(row.features, dtype, NUM_FEATURE_LAYERS)
            last, last_scale = encode_numbers(row.last, dtype)
            visual, visual_scale = (None, None) if row.visual is None else encode_numbers(row.visual, dtype)
            block = StoredHiddenStates(features, last, features_scale, last_scale, row.positions, visual, visual_scale)
            shard.put(i, 1, block, find_finite_tokens(block))
        entries += shard.commit()
    write_index(folder, entries)
    return len(entries)


def write_index(folder: Path, entries: list[dict[str, Any]]) -> None:
    """The rows of all shards, in order."""
    with atomic.write_file(folder / "index.parquet") as temporary:
        schema = MULTIMODAL_INDEX_SCHEMA if entries and "visual_offset" in entries[0] else INDEX_SCHEMA
        pl.DataFrame(entries, schema=schema).write_parquet(temporary)


# Reading


def read_rows(folder: Path, dtype: torch.dtype = torch.float32) -> Iterator[HiddenStatesRow]:
    """Every row, in order, checked. Features come as `dtype`, however they are stored.

    Raises ValueError naming the shard and the row, where a shard is missing, cut, altered, or holds NaN or infinity.
    """
    for head, block in read_stored(folder, read_index(folder)):
        yield decode_row(head, block, dtype)


def decode_row(head: RowHeader, block: StoredHiddenStates, dtype: torch.dtype) -> HiddenStatesRow:
    """The row, its numbers as `dtype`."""
    return HiddenStatesRow(
        **vars(head),
        features=decode_numbers(block.features, block.features_scale, dtype),
        last=decode_numbers(block.last, block.last_scale, dtype),
        positions=block.positions,
        visual=None if block.visual is None else decode_numbers(block.visual, block.visual_scale, dtype),
    )


def read_headers(folder: Path) -> Iterator[RowHeader]:
    """Every row, in order, but for its hidden states: those are not read, so neither is the checksum compared.

    Raises ValueError naming the shard, where one is missing or cut.
    """
    for (name,), rows in read_index(folder).group_by("shard", maintain_order=True):
        path = folder / str(name)
        slices = open_shard(path)
        for entry in rows.iter_rows(named=True):
            try:
                head = _read_header(entry, slices)
            except (SafetensorError, OSError) as error:
                raise Broken(f"{path} is missing or cut ({error})", atomic.rerun(MADE_BY)) from None
            if not len(head.ids) == len(head.mask) == entry["length"]:
                raise Broken(f"{path}: row {entry['id']} lies past its end", atomic.rerun(MADE_BY))
            yield head


def read_stored(folder: Path, rows: pl.DataFrame) -> Iterator[tuple[RowHeader, StoredHiddenStates]]:
    """The given rows of the index as they are stored, checked as `read_rows` checks them."""
    for (name,), held in rows.group_by("shard", maintain_order=True):
        yield from _read_shard(folder / str(name), held)


def read_index(folder: Path) -> pl.DataFrame:
    path = folder / "index.parquet"
    try:
        index = pl.read_parquet(path)
    except FileNotFoundError:
        raise Broken(f"{path} not found", f"run: dvc repro {MADE_BY}") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise Broken(f"{path} is not readable Parquet ({error})", atomic.rerun(MADE_BY)) from None
    if index.schema not in (INDEX_SCHEMA, MULTIMODAL_INDEX_SCHEMA):
        raise Broken(f"{path} has columns {dict(index.schema)}, expected {dict(INDEX_SCHEMA)}", atomic.rerun(MADE_BY))
    return index


def _read_shard(path: Path, rows: pl.DataFrame) -> Iterator[tuple[RowHeader, StoredHiddenStates]]:
    slices = open_shard(path)
    for entry in rows.iter_rows(named=True):
        yield read_row(path, entry, slices)


def open_shard(path: Path) -> dict[str, Any]:
    """What `read_row` cuts rows from: the shard's tensors, mapped and not read. Raises ValueError where it is missing or cut."""
    try:
        shard = safe_open(path, framework="pt")
        names = ["features", "last", "ids", "mask"]
        if seen := "positions" in shard.keys():  # noqa: SIM118 - not a dict
            names += ["positions", "pictured", "visual"]
        if shard.get_slice("features").get_dtype() == SAFETENSORS_DTYPES[FP8]:
            names += ["features_scale", "last_scale", *(["visual_scale"] if seen else [])]
        slices = {name: shard.get_slice(name) for name in names}
    except (FileNotFoundError, SafetensorError, OSError) as error:
        raise Broken(f"{path} is missing or cut ({error})", atomic.rerun(MADE_BY)) from None
    return slices


def read_hidden_size(path: Path) -> int:
    """H of a shard; 0 in one that holds tokens and masks only, whose hidden states the reader makes."""
    return open_shard(path)["last"].get_shape()[1]


def read_row(
    path: Path, entry: dict[str, Any], slices: dict[str, Any], known: bool = False
) -> tuple[RowHeader, StoredHiddenStates]:
    """The row of an index entry, as stored; `known` to be whole, its checksum is not taken again.

    Raises ValueError naming the row, where it is not what its entry says, or holds NaN or infinity.
    """
    start, end = entry["offset"], entry["offset"] + entry["length"]
    try:
        whole = 0 <= start <= end <= slices["ids"].get_shape()[0] and _is_visual_range_valid(entry, slices)
        head, block = _read_stored_row(entry, slices) if whole else (None, None)
    except (SafetensorError, OSError) as error:
        raise Broken(f"{path} is missing or cut ({error})", atomic.rerun(MADE_BY)) from None
    if head is None or block is None or not (known or _compute_checksum(head, block) == entry["checksum"]):
        raise Broken(f"{path}: row {entry['id']} does not match its checksum", atomic.rerun(MADE_BY))
    if not entry["finite"]:
        raise Broken(
            f"{path}: row {entry['id']} holds NaN or infinity, expected finite hidden states",
            "set extract_hiddens.dtype or target.dtype to float32 and run: dvc repro extract_hiddens",
        )
    return head, block


def _is_visual_range_valid(entry: dict[str, Any], slices: dict[str, Any]) -> bool:
    """Whether index and shard both are of a target that sees, or neither; and whether the row's pieces lie in the shard."""
    if "visual_offset" not in entry or "visual" not in slices:
        return "visual_offset" not in entry and "visual" not in slices
    first, count = entry["visual_offset"], entry["visual_length"]
    return 0 <= first <= first + count <= slices["visual"].get_shape()[0]


def _read_stored_row(entry: dict[str, Any], slices: dict[str, Any]) -> tuple[RowHeader, StoredHiddenStates]:
    """One row of a shard, read where it lies."""
    start, end = entry["offset"], entry["offset"] + entry["length"]
    first = entry.get("visual_offset", 0)
    pieces = slice(first, first + entry.get("visual_length", 0))
    there = {name: part for name, part in slices.items() if name not in ("ids", "mask", "pictured")}
    block = StoredHiddenStates(
        **{n: part[pieces if n in VISUAL_TENSORS else slice(start, end)] for n, part in there.items()}
    )
    return _read_header(entry, slices), block


def _read_header(entry: dict[str, Any], slices: dict[str, Any]) -> RowHeader:
    start, end = entry["offset"], entry["offset"] + entry["length"]
    bits = {name: _unpack_bits(slices[name], start, end) for name in ("mask", "pictured") if name in slices}
    return RowHeader(
        entry["id"], slices["ids"][start:end], bits["mask"], entry["prompt_length"], entry["finish_reason"],
        bits.get("pictured"),
    )  # fmt: skip


def _unpack_bits(packed: Any, start: int, end: int) -> Tensor:
    """Bits from .. to, as [T] bool."""
    bits = np.unpackbits(packed[start // 8 : -(-end // 8)].numpy())  # eight tokens a byte, across rows
    return torch.from_numpy(bits[start % 8 :][: end - start].astype(bool))


def _make_header(row: HiddenStatesRow) -> RowHeader:
    return RowHeader(row.id, row.ids, row.mask, row.prompt_length, row.finish_reason, row.pictured)


def _compute_checksum(head: RowHeader, block: StoredHiddenStates) -> int:
    total = zlib.crc32(repr((head.id, head.prompt_length, head.finish_reason)).encode())
    scales = [block.features_scale, block.last_scale] if block.last_scale is not None else []
    seen = [head.pictured, block.positions, block.visual, block.visual_scale]
    for tensor in (block.features, block.last, head.ids, head.mask, *scales, *(t for t in seen if t is not None)):
        total = zlib.crc32(_view_bytes(tensor), total)
    return total


def _view_bytes(tensor: Tensor | None) -> memoryview:
    assert tensor is not None
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def digest_folder(folder: Path) -> str:
    """A short name of the whole content, from the index's checksums: what a resumed run compares."""
    index = read_index(folder)
    return f"{zlib.crc32(index.write_csv().encode()):08x}"
