"""Where extracted hidden states come from: a forward of the target, or hidden states made elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from stages.hidden_states import importers
from stages.hidden_states.format import DTYPES, RowHeader, StoredHiddenStates, convert_stored
from stages.hidden_states.shard_plan import make_header, split_batches
from stages.hidden_states.writer import LAST_HIDDEN_PART, StagingBuffer
from stages.params import schema
from stages.runtime import distributed
from stages.target import hooks, loading, manifest, multimodal, packed_forward
from stages.target.manifest import TargetManifest
from stages.target.vision import CachedImageProcessor


@dataclass(frozen=True)
class HiddenStatesSource:
    """Fills staging buffers."""

    fill_buffer: Callable[[list[RowHeader], StagingBuffer], None]  # with the hidden states of these rows
    split_batches: Callable[[list[int]], list[range]]  # rows of these lengths, into batches
    device: torch.device


def open_source(p: schema.Params, target: TargetManifest, tables: dict[str, pl.DataFrame]) -> HiddenStatesSource:
    """Load the target, or find the hidden states that extract_hiddens.import names."""
    e, image_token_id = p.extract_hiddens, target.image_token_id
    rows = (row for table in tables.values() for row in table.iter_rows(named=True))
    if e.import_ is not None:
        wanted = {row["id"]: make_header(row, image_token_id) for row in rows}
        read = importers.find_hidden_states(Path(e.import_), wanted, target.hidden_size)
        return HiddenStatesSource(
            partial(_fill_from_import, read, DTYPES[e.dtype]),
            partial(split_batches, e.batch_tokens, False),
            torch.device("cpu"),
        )
    folder, device = str(manifest.resolve_weights_folder(target)), distributed.select_rank_device(p.target.device)
    model = loading.load_target(folder, None, p.target.dtype, device, p.target.trust_remote_code)
    packed = packed_forward.supports_packing(model)
    if not packed:
        print(f"{target.model}: attention does not support packed documents; padding rows of like lengths", flush=True)
    if e.compile and packed:
        packed_forward.compile_blocks(model, e.batch_tokens)
    fill = partial(fill_from_target, model, target.feature_layers, packed)
    if image_token_id is not None:
        processor = CachedImageProcessor(folder, p.target.trust_remote_code)
        images = {row["id"]: row["images"] for row in rows if row["images"]}
        fill = partial(_fill_from_multimodal_target, model, fill, processor, images)
    return HiddenStatesSource(fill, partial(split_batches, e.batch_tokens, not packed), model.device)


def fill_from_target(
    model: Any,
    layers: list[int],
    packed: bool,
    headers: list[RowHeader],
    buffer: StagingBuffer,
    inputs: multimodal.MultimodalInputs | None = None,
) -> None:
    """Compute the hidden states of these rows in one forward."""
    lengths = [len(h.ids) for h in headers]
    ids = multimodal.copy_to_device(torch.cat([h.ids for h in headers]).long(), model.device)  # [N]
    with hooks.tap_residual_streams(
        model, layers, lambda part, stream: buffer.put_part(part, packed_forward.unpad_stream(stream, lengths))
    ):
        buffer.put_part(LAST_HIDDEN_PART, packed_forward.forward_documents(model, ids, lengths, packed, inputs))


def _fill_from_multimodal_target(
    model: Any,
    forward: Callable[..., None],
    processor: CachedImageProcessor,
    images: dict[str, list[str]],
    headers: list[RowHeader],
    buffer: StagingBuffer,
) -> None:
    """Compute hidden states, rotary positions and embeddings of image tokens, with the rows' images."""
    lengths = [len(h.ids) for h in headers]
    patches = [processor.load_patches(images[h.id]) if h.id in images else None for h in headers]
    names = [f"row {h.id}" for h in headers]
    inputs = multimodal.build_multimodal_inputs(model, names, [h.ids for h in headers], patches)
    image_tokens = multimodal.copy_to_device(inputs.image_token_mask.nonzero()[:, 0], model.device)  # [M]

    def keep(embeds: Tensor, positions: Tensor) -> None:
        buffer.put_multimodal(
            packed_forward.unpad_stream(positions, lengths), packed_forward.unpad_stream(embeds, lengths)[image_tokens]
        )

    with hooks.tap_decoder_inputs(model, keep):
        forward(headers, buffer, inputs=inputs)


def _fill_from_import(
    read: importers.ReadStored, dtype: torch.dtype, headers: list[RowHeader], buffer: StagingBuffer
) -> None:
    """Read hidden states made elsewhere; those of the wanted dtype stay equal to the bit."""
    blocks = [convert_stored(read(header), dtype).tensors() for header in headers]
    buffer.put_stored(StoredHiddenStates(**{name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}))
