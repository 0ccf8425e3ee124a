"""Write hidden states: shards, their index, and staging buffers between the device and the disk.

Shards are planned from row lengths alone (`shard_plan`), so any number of processes makes the same files. Header and
offsets are known before any row is, so rows are written in place, in any order.

Letters: N tokens, M image tokens, K feature layers, H hidden size.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from stages.hidden_states import format
from stages.hidden_states.format import HiddenStatesRow, IndexEntry, RowHeader, StoredHiddenStates
from stages.hidden_states.shard_plan import StoredRowSize, name_shard, plan_shards
from stages.runtime import atomic

# Order of a shard's tensors of one item size.
FILE_ORDER = [
    "features_scale", "last_scale", "visual_scale", "ids", "features", "last", "mask", "positions", "visual", "pictured"
]  # fmt: skip


class ShardWriter:
    """One shard being written: blocks in any order, from any thread; `commit` renames the temporary file."""

    def __init__(self, path: Path, headers: Sequence[RowHeader], size: StoredRowSize) -> None:
        self.path, self.headers = path, headers
        self.offsets = np.cumsum([0, *(len(h.ids) for h in headers)]).tolist()  # first token of each row
        self.visual_offsets = np.cumsum([0, *(h.num_image_tokens for h in headers)]).tolist()
        self.is_multimodal = headers[0].image_token_mask is not None
        self.entries: list[IndexEntry | None] = [None for _ in headers]
        ids = torch.cat([h.ids for h in headers])
        mask_bits = _pack_bits([h.mask for h in headers])
        image_tokens = self.visual_offsets[-1] if self.is_multimodal else None
        parts = size.num_feature_layers, size.hidden_size, size.dtype
        shapes = format.list_shard_shapes(len(ids), image_tokens, *parts)
        header, self._layout, end = {}, {}, 0
        # Widest dtype first, so that each tensor starts at a multiple of its item size; the format allows no holes.
        for name in sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, FILE_ORDER.index(name))):
            kind, shape = shapes[name]
            count = kind.itemsize * int(np.prod(shape))
            header[name] = {
                "dtype": format.SAFETENSORS_DTYPES[kind],
                "shape": shape,
                "data_offsets": [end, end + count],
            }
            self._layout[name] = (end, count // max(1, shape[0]))  # offset of the tensor, bytes per line of it
            end += count
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
            part, header = block.select_tokens(tokens, image_tokens), self.headers[row]
            visual = part.visual if part.visual_scale is None else part.visual_scale
            self.entries[row] = IndexEntry(
                id=header.id,
                shard=self.path.name,
                offset=self.offsets[row],
                length=len(header.ids),
                prompt_length=header.prompt_length,
                finish_reason=header.finish_reason,
                checksum=format.compute_checksum(header, part),
                finite=bool(finite[tokens].all()) and (visual is None or bool(torch.isfinite(visual).all())),
                visual_offset=self.visual_offsets[row] if self.is_multimodal else None,
                visual_length=header.num_image_tokens if self.is_multimodal else None,
            )

        writes: list[Callable[[], None]] = [
            partial(self._write_tensor, name, image_start if name in format.VISUAL_TENSORS else start, tensor)
            for name, tensor in block.list_tensors().items()
        ]
        list(run(lambda do: do(), writes + [partial(describe, row) for row in range(first, first + count)]))

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
        offset, line_bytes = self._layout[name]
        position, left = self._data_offset + offset + first * line_bytes, format.view_bytes(tensor)
        while left:  # pwrite takes 2 GiB at most
            written = os.pwrite(self._file.fileno(), left, position)
            position, left = position + written, left[written:]


def write_rows(folder: Path, rows: Iterable[HiddenStatesRow], dtype: torch.dtype, shard_bytes: int) -> int:
    """Write rows in order into shards of about `shard_bytes`; return their number. The caller makes `folder` atomic."""
    rows, entries = list(rows), list[IndexEntry]()
    hidden_size = rows[0].last.shape[1] if rows else 0
    num_feature_layers = format.count_feature_layers(rows[0].features, rows[0].last) if rows else 0
    size = StoredRowSize(num_feature_layers, hidden_size, dtype)
    is_multimodal = bool(rows) and rows[0].image_embeddings is not None
    sizes = (
        format.count_token_bytes(num_feature_layers, hidden_size, dtype, is_multimodal),
        format.count_visual_bytes(hidden_size, dtype),
    )
    spans = plan_shards([len(r.ids) for r in rows], [r.num_image_tokens for r in rows], *sizes, shard_bytes)
    for number, span in enumerate(spans):
        own = rows[span.start : span.stop]
        shard = ShardWriter(folder / name_shard(number), own, size)
        for i, row in enumerate(own):
            block = format.encode_block(row.features, row.last, row.positions, row.image_embeddings, dtype)
            shard.write_block(i, 1, block, format.find_finite_tokens(block))
        entries += shard.commit()
    write_index(folder, entries)
    return len(entries)


def write_index(folder: Path, entries: list[IndexEntry]) -> None:
    """Write index.parquet with the rows of all shards, in order."""
    is_multimodal = bool(entries) and entries[0].visual_offset is not None
    schema = format.MULTIMODAL_INDEX_SCHEMA if is_multimodal else format.INDEX_SCHEMA
    with atomic.write_file(folder / "index.parquet") as temporary:
        pl.DataFrame([entry.to_record() for entry in entries], schema=schema).write_parquet(temporary)


class StagingBuffer:
    """Memory for one batch on the device, where parts are stored, and on the host, from where threads write them.

    With two of them, one batch is copied and written while the next is computed.
    """

    def __init__(self, tokens: int, image_tokens: int, size: StoredRowSize, device: torch.device) -> None:
        """Allocate for at most `tokens` tokens and, of a multimodal target, `image_tokens` image tokens."""
        self.num_tokens, self.num_image_tokens, self.device = 0, 0, device
        self.num_feature_layers = size.num_feature_layers
        parts = size.num_feature_layers, size.hidden_size, size.dtype
        shapes = format.list_tensor_shapes(tokens, image_tokens, *parts, size.is_multimodal)

        def allocate(**where: Any) -> tuple[StoredHiddenStates, Tensor]:
            block = {name: torch.empty(shape, dtype=dtype, **where) for name, (dtype, shape) in shapes.items()}
            return StoredHiddenStates(**block), torch.empty(tokens, dtype=torch.bool, **where)

        self._device_block, self._device_finite = allocate(device=device)
        self._host_block, self._host_finite, self._copied = self._device_block, self._device_finite, None
        if device.type == "cuda":
            self._host_block, self._host_finite = allocate(pin_memory=True)
            self._copied = torch.cuda.Event()

    def put_part(self, part: int, numbers: Tensor) -> None:
        """Store one part of all tokens [N, H]: a feature layer's stream (0 to K - 1), or the last hidden (K)."""
        block, is_last = self._device_block, part == self.num_feature_layers
        count, width = numbers.shape
        stored, scale = format.encode_numbers(numbers, block.last.dtype)
        columns = slice(0, width) if is_last else slice(part * width, (part + 1) * width)
        (block.last if is_last else block.features)[:count, columns].copy_(stored)
        scales = block.last_scale if is_last else block.features_scale
        if scale is not None and scales is not None:
            scales[:count, 0 if is_last else part].copy_(scale[:, 0])
        self.num_tokens = count

    def put_multimodal(self, positions: Tensor, image_embeddings: Tensor) -> None:
        """Store a multimodal target's positions [N, 3] and embeddings [M, H] of image tokens."""
        block, self.num_image_tokens = self._device_block, len(image_embeddings)
        stored, scale = format.encode_numbers(image_embeddings, block.last.dtype)
        for buffer, tensor in ((block.positions, positions), (block.visual, stored), (block.visual_scale, scale)):
            if buffer is not None and tensor is not None:
                buffer[: len(tensor)].copy_(tensor)

    def put_stored(self, block: StoredHiddenStates) -> None:
        self.num_tokens, self.num_image_tokens = len(block.features), 0 if block.visual is None else len(block.visual)
        buffers = self._slice_used(self._device_block).list_tensors()
        for name, tensor in block.list_tensors().items():
            buffers[name].copy_(tensor)

    def start_copy(self, stream: "torch.cuda.Stream | None") -> None:
        """Start the copy to the host on `stream`; after this only the writing threads use the buffer."""
        n, block = self.num_tokens, self._slice_used(self._device_block)
        self._device_finite[:n].copy_(format.find_finite_tokens(block))
        if stream is None or self._copied is None:
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host = self._slice_used(self._host_block).list_tensors()
            for name, tensor in block.list_tensors().items():
                host[name].copy_(tensor, non_blocking=True)
            self._host_finite[:n].copy_(self._device_finite[:n], non_blocking=True)
            self._copied.record(stream)

    def wait_for_copy(self) -> tuple[StoredHiddenStates, Tensor]:
        """Return the batch on the host and the mask [N] of finite tokens, once the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._slice_used(self._host_block), self._host_finite[: self.num_tokens]

    def _slice_used(self, block: StoredHiddenStates) -> StoredHiddenStates:
        return block.select_tokens(slice(self.num_tokens), slice(self.num_image_tokens))


def _pack_bits(masks: list[Tensor]) -> Tensor:
    """Return masks [T] of rows end to end, as bits."""
    return torch.from_numpy(np.packbits(torch.cat(masks).numpy()))
