"""Where extracted hidden states come from: a forward of the target, or hidden states made elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl
import torch

from stages.hidden_states import importers
from stages.hidden_states.format import DTYPES, RowHeader, StoredHiddenStates, convert_stored
from stages.hidden_states.shard_plan import make_headers, split_batches
from stages.hidden_states.writer import StagingBuffer
from stages.params import schema
from stages.runtime import distributed
from stages.target import multimodal
from stages.target.feature_target import FeatureTarget
from stages.target.manifest import TargetManifest


@dataclass(frozen=True)
class HiddenStatesSource:
    """Fills staging buffers."""

    fill_buffer: Callable[[Sequence[RowHeader], StagingBuffer], None]  # with the hidden states of these rows
    split_batches: Callable[[list[int]], list[range]]  # rows of these lengths, into batches
    device: torch.device


def open_source(p: schema.Params, target: TargetManifest, tables: dict[str, pl.DataFrame]) -> HiddenStatesSource:
    """Load the target, or find the hidden states that extract_hiddens.import names."""
    e = p.extract_hiddens
    if e.import_ is not None:
        wanted = {header.id: header for rows in tables.values() for header in make_headers(rows, target.image_token_id)}
        read = importers.find_hidden_states(Path(e.import_), wanted, target.feature_layers, target.hidden_size)
        split, fill = partial(split_batches, e.batch_tokens, False), partial(_fill_from_import, read, DTYPES[e.dtype])
        return HiddenStatesSource(fill, split, torch.device("cpu"))
    device = distributed.select_rank_device(p.target.device)
    features = FeatureTarget.load(target, p.target, device, e.batch_tokens if e.compile else None)
    packed = features.supports_packing
    if not packed:
        print(f"{target.model}: attention does not support packed documents; padding rows of like lengths", flush=True)
    image_paths: dict[str, list[str]] = {}
    if features.image_processor:
        for rows in tables.values():
            image_paths |= {name: paths for name, paths in rows.select("id", "images").iter_rows() if paths}
    fill = partial(fill_from_target, features, image_paths)
    return HiddenStatesSource(fill, partial(split_batches, e.batch_tokens, not packed), features.model.device)


def fill_from_target(
    target: FeatureTarget, image_paths: Mapping[str, list[str]], headers: Sequence[RowHeader], buffer: StagingBuffer
) -> None:
    """Compute the hidden states of these rows in one forward, with their images."""
    documents, device = [h.ids for h in headers], target.model.device
    inputs = target.build_inputs([h.id for h in headers], documents, image_paths)
    ids = multimodal.copy_to_device(torch.cat(documents).long(), device)  # [N]
    embeddings = target.forward(ids, [len(h.ids) for h in headers], inputs, buffer.put_part)
    if inputs is not None and embeddings is not None:
        buffer.put_multimodal(multimodal.copy_to_device(inputs.positions.T.contiguous(), device), embeddings)


def _fill_from_import(
    read: importers.ReadStored, dtype: torch.dtype, headers: Sequence[RowHeader], buffer: StagingBuffer
) -> None:
    """Read hidden states made elsewhere; those of the wanted dtype stay equal to the bit."""
    blocks = [convert_stored(read(header), dtype).list_tensors() for header in headers]
    buffer.put_stored(StoredHiddenStates(**{name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}))
