"""Write hidden states: shards, their index, and staging buffers between the device and the disk.

Shards are planned from row lengths alone (`shard_plan`), so any number of processes makes the same files. Header and
offsets are known before any row is, so rows are written in place, in any order.

Letters: N tokens, M image tokens, H hidden size.
"""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from stages.hidden_states.format import (
    FP8,
    INDEX_SCHEMA,
    MULTIMODAL_INDEX_SCHEMA,
    NUM_FEATURE_LAYERS,
    SAFETENSORS_DTYPES,
    VISUAL_TENSORS,
    HiddenStatesRow,
    IndexEntry,
    RowHeader,
    StoredHiddenStates,
    compute_checksum,
    count_token_bytes,
    count_visual_bytes,
    encode_numbers,
    find_finite_tokens,
    view_bytes,
)
from stages.hidden_states.shard_plan import name_shard, plan_shards
from stages.runtime import atomic

LAST_HIDDEN_PART = NUM_FEATURE_LAYERS  # number of the last hidden among a token's parts: low, mid, high, last


class ShardWriter:
    """One shard being written: blocks in any order, from any thread; `commit` renames the temporary file."""

    def __init__(self, path: Path, headers: list[RowHeader], hidden_size: int, dtype: torch.dtype) -> None:
        self.path, self.headers = path, headers
        self.offsets = np.cumsum([0, *(len(h.ids) for h in headers)]).tolist()  # first token of each row
        self.visual_offsets = np.cumsum([0, *(h.num_image_tokens for h in headers)]).tolist()
        self.is_multimodal = headers[0].image_token_mask is not None
        self.entries: list[IndexEntry | None] = [None for _ in headers]
        ids = torch.cat([h.ids for h in headers])
        mask_bits = _pack_bits([h.mask for h in headers])
        shapes = self._list_shapes(len(ids), len(mask_bits), hidden_size, dtype)
        header, self._places, end = {}, {}, 0
        for name, (kind, shape) in shapes.items():
            size = kind.itemsize * int(np.prod(shape))
            header[name] = {"dtype": SAFETENSORS_DTYPES[kind], "shape": shape, "data_offsets": [end, end + size]}
            self._places[name] = (end, size // max(1, shape[0]))  # offset of the tensor, bytes per line of it
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        self._data_offset = 8 + len(text)
        self._stack = ExitStack()
        self._temporary = self._stack.enter_context(atomic.write_file(path))
        self._file = self._stack.enter_context(self._temporary.open("wb"))
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data_offset + end)
        self._file.flush()
        self._write_tensor("ids", 0, ids)
        self._write_tensor("mask", 0, mask_bits)
        if self.is_multimodal:
            image_masks = [h.image_token_mask for h in headers if h.image_token_mask is not None]
            self._write_tensor("pictured", 0, _pack_bits(image_masks))

    def _list_shapes(
        self, tokens: int, mask_bytes: int, hidden_size: int, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Return dtype and shape of each tensor, in file order."""
        shapes: dict[str, tuple[torch.dtype, list[int]]] = {
            "ids": (torch.int32, [tokens]),
            "features": (dtype, [tokens, NUM_FEATURE_LAYERS * hidden_size]),
            "last": (dtype, [tokens, hidden_size]),
            "mask": (torch.uint8, [mask_bytes]),
        }
        scales = {"features_scale": [tokens, NUM_FEATURE_LAYERS], "last_scale": [tokens, 1]}
        if self.is_multimodal:
            shapes["positions"] = (torch.int32, [tokens, 3])
            shapes["visual"] = (dtype, [self.visual_offsets[-1], hidden_size])
            shapes["pictured"] = (torch.uint8, [mask_bytes])
            scales["visual_scale"] = [self.visual_offsets[-1], 1]
        if dtype == FP8:
            shapes = {**{name: (torch.float32, shape) for name, shape in scales.items()}, **shapes}
        # Widest dtype first, so that each tensor starts at a multiple of its item size; the format allows no holes.
        return dict(sorted(shapes.items(), key=lambda item: -item[1][0].itemsize))

    def write_block(
        self, first: int, count: int, block: StoredHiddenStates, finite: Tensor, run: Callable = map
    ) -> None:
        """Write rows first … first + count - 1: `block` holds them end to end on the CPU, `finite` [N] marks finite tokens.

        `run` is `map`, or a thread pool's: checksums and writes release the GIL.
        """
        start, image_start = self.offsets[first], self.visual_offsets[first]
        assert len(block.features) == len(finite) == self.offsets[first + count] - start
        assert block.visual is None or len(block.visual) == self.visual_offsets[first + count] - image_start

        def describe(row: int) -> None:
            tokens = slice(self.offsets[row] - start, self.offsets[row + 1] - start)
            image_tokens = slice(self.visual_offsets[row] - image_start, self.visual_offsets[row + 1] - image_start)
            self.entries[row] = self._describe_row(row, block.select(tokens, image_tokens), bool(finite[tokens].all()))

        writes: list[Callable[[], None]] = [
            partial(self._write_tensor, name, image_start if name in VISUAL_TENSORS else start, tensor)
            for name, tensor in block.tensors().items()
        ]
        list(run(lambda do: do(), writes + [partial(describe, row) for row in range(first, first + count)]))

    def _describe_row(self, row: int, block: StoredHiddenStates, finite: bool) -> IndexEntry:
        header = self.headers[row]
        return IndexEntry(
            id=header.id,
            shard=self.path.name,
            offset=self.offsets[row],
            length=len(header.ids),
            prompt_length=header.prompt_length,
            finish_reason=header.finish_reason,
            checksum=compute_checksum(header, block),
            finite=finite and _is_visual_finite(block),
            visual_offset=self.visual_offsets[row] if self.is_multimodal else None,
            visual_length=header.num_image_tokens if self.is_multimodal else None,
        )

    def commit(self) -> list[IndexEntry]:
        """Rename the finished shard into place and return its rows' index entries."""
        entries = [entry for entry in self.entries if entry is not None]
        assert len(entries) == len(self.headers), "a row was never written"
        self._stack.close()
        return entries

    def discard(self) -> None:
        """Remove an unfinished shard, so that a full disk does not stay full."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_tensor(self, name: str, first: int, tensor: Tensor) -> None:
        offset, line_bytes = self._places[name]
        position, left = self._data_offset + offset + first * line_bytes, view_bytes(tensor)
        while left:  # pwrite takes 2 GiB at most
            written = os.pwrite(self._file.fileno(), left, position)
            position, left = position + written, left[written:]


def write_rows(folder: Path, rows: Iterable[HiddenStatesRow], dtype: torch.dtype, shard_bytes: int) -> int:
    """Write rows in order into shards of about `shard_bytes`; return their number. The caller makes `folder` atomic."""
    rows, entries = list(rows), list[IndexEntry]()
    headers = [_make_header(row) for row in rows]
    hidden_size, is_multimodal = (rows[0].last.shape[1], rows[0].image_embeddings is not None) if rows else (0, False)
    spans = plan_shards(
        [len(h.ids) for h in headers],
        count_token_bytes(hidden_size, dtype, is_multimodal),
        shard_bytes,
        [h.num_image_tokens for h in headers],
        count_visual_bytes(hidden_size, dtype),
    )
    for number, span in enumerate(spans):
        shard = ShardWriter(folder / name_shard(number), headers[span.start : span.stop], hidden_size, dtype)
        for i, row in enumerate(rows[span.start : span.stop]):
            block = _encode_row(row, dtype)
            shard.write_block(i, 1, block, find_finite_tokens(block))
        entries += shard.commit()
    write_index(folder, entries)
    return len(entries)


def write_index(folder: Path, entries: list[IndexEntry]) -> None:
    """Write index.parquet with the rows of all shards, in order."""
    is_multimodal = bool(entries) and entries[0].visual_offset is not None
    schema = MULTIMODAL_INDEX_SCHEMA if is_multimodal else INDEX_SCHEMA
    with atomic.write_file(folder / "index.parquet") as temporary:
        pl.DataFrame([entry.to_record() for entry in entries], schema=schema).write_parquet(temporary)


class StagingBuffer:
    """Memory for one batch on the device, where parts are stored, and on the host, from where threads write them.

    With two of them, one batch is copied and written while the next is computed.
    """

    def __init__(
        self,
        tokens: int,
        image_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        is_multimodal: bool,
        device: torch.device,
    ) -> None:
        """Allocate for at most `tokens` tokens and, of a multimodal target, `image_tokens` image tokens."""
        self.num_tokens, self.num_image_tokens, self.device = 0, 0, device
        on_gpu = device.type == "cuda"
        sizes = tokens, image_tokens, hidden_size, dtype, is_multimodal
        self._device_block, self._device_finite = _allocate_buffer(*sizes, device=device)
        self._host_block, self._host_finite = (
            _allocate_buffer(*sizes, pin_memory=True) if on_gpu else (self._device_block, self._device_finite)
        )
        self._copied = torch.cuda.Event() if on_gpu else None

    def put_part(self, part: int, numbers: Tensor) -> None:
        """Store one part of all tokens [N, H]: low, mid, high (0 to 2) or LAST_HIDDEN_PART."""
        block, is_last = self._device_block, part == LAST_HIDDEN_PART
        count, width = numbers.shape
        stored, scale = encode_numbers(numbers, block.last.dtype)
        columns = slice(0, width) if is_last else slice(part * width, (part + 1) * width)
        (block.last if is_last else block.features)[:count, columns].copy_(stored)
        scales = block.last_scale if is_last else block.features_scale
        if scale is not None and scales is not None:
            scales[:count, 0 if is_last else part].copy_(scale[:, 0])
        self.num_tokens = count

    def put_multimodal(self, positions: Tensor, image_embeddings: Tensor) -> None:
        """Store a multimodal target's positions [N, 3] and embeddings [M, H] of image tokens."""
        block, self.num_image_tokens = self._device_block, len(image_embeddings)
        stored, scale = encode_numbers(image_embeddings, block.last.dtype)
        for buffer, tensor in ((block.positions, positions), (block.visual, stored), (block.visual_scale, scale)):
            if buffer is not None and tensor is not None:
                buffer[: len(tensor)].copy_(tensor)

    def put_stored(self, block: StoredHiddenStates) -> None:
        """Store a batch that is already encoded."""
        self.num_tokens, self.num_image_tokens = len(block.features), 0 if block.visual is None else len(block.visual)
        buffers = self._slice_used(self._device_block).tensors()
        for name, tensor in block.tensors().items():
            buffers[name].copy_(tensor)

    def start_copy(self, stream: "torch.cuda.Stream | None") -> None:
        """Start the copy to the host on `stream`; after this only the writing threads use the buffer."""
        n, block = self.num_tokens, self._slice_used(self._device_block)
        self._device_finite[:n].copy_(find_finite_tokens(block))
        if stream is None or self._copied is None:
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host = self._slice_used(self._host_block).tensors()
            for name, tensor in block.tensors().items():
                host[name].copy_(tensor, non_blocking=True)
            self._host_finite[:n].copy_(self._device_finite[:n], non_blocking=True)
            self._copied.record(stream)

    def wait_for_copy(self) -> tuple[StoredHiddenStates, Tensor]:
        """Return the batch on the host and the mask [N] of finite tokens, once the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._slice_used(self._host_block), self._host_finite[: self.num_tokens]

    def _slice_used(self, block: StoredHiddenStates) -> StoredHiddenStates:
        return block.select(slice(self.num_tokens), slice(self.num_image_tokens))


def _allocate_buffer(
    tokens: int, image_tokens: int, hidden_size: int, dtype: torch.dtype, is_multimodal: bool, **where: Any
) -> tuple[StoredHiddenStates, Tensor]:
    shapes = {
        "features": (tokens, NUM_FEATURE_LAYERS * hidden_size, dtype),
        "last": (tokens, hidden_size, dtype),
    }
    scales = {
        "features_scale": (tokens, NUM_FEATURE_LAYERS, torch.float32),
        "last_scale": (tokens, 1, torch.float32),
    }
    if is_multimodal:
        shapes |= {"positions": (tokens, 3, torch.int32), "visual": (image_tokens, hidden_size, dtype)}
        scales["visual_scale"] = (image_tokens, 1, torch.float32)
    if dtype == FP8:
        shapes |= scales
    block = StoredHiddenStates(
        **{name: torch.empty(n, width, dtype=kind, **where) for name, (n, width, kind) in shapes.items()}
    )
    return block, torch.empty(tokens, dtype=torch.bool, **where)


def _encode_row(row: HiddenStatesRow, dtype: torch.dtype) -> StoredHiddenStates:
    features, features_scale = encode_numbers(row.features, dtype, NUM_FEATURE_LAYERS)
    last, last_scale = encode_numbers(row.last, dtype)
    visual = (None, None) if row.image_embeddings is None else encode_numbers(row.image_embeddings, dtype)
    return StoredHiddenStates(features, last, features_scale, last_scale, row.positions, *visual)


def _pack_bits(masks: list[Tensor]) -> Tensor:
    """Return masks [T] of rows end to end, as bits."""
    return torch.from_numpy(np.packbits(torch.cat(masks).numpy()))


def _is_visual_finite(block: StoredHiddenStates) -> bool:
    checked = block.visual if block.visual_scale is None else block.visual_scale
    return checked is None or bool(torch.isfinite(checked).all())


def _make_header(row: HiddenStatesRow) -> RowHeader:
    return RowHeader(row.id, row.ids, row.mask, row.prompt_length, row.finish_reason, row.image_token_mask)
