"""Keys and values of every layer in preallocated tensors, so that captured CUDA graphs find them at the same addresses.

Rows are written and moved at indices given as tensors; rows that no mask admits may hold any finite value.

Letters: B slots in use, M tokens of each in a pass, L layers, G key-value heads, E head width, R rows to move.
"""

from collections import Counter
from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from stages.target import config_facts

if TYPE_CHECKING:  # transformers' model classes take seconds to import
    from transformers import PreTrainedModel

KVShape = tuple[int, int, torch.device]  # G, E, and the layer's device


class _KVCacheLayer(CacheLayerMixin):
    """One layer of a `KVCache`, with transformers' interface."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: "KVCache", keys: Tensor, values: Tensor):
        super().__init__()
        # A proxy: a reference cycle would keep gigabytes until Python's next cycle collection.
        self.owner: KVCache = proxy(owner)
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: keys and values exist from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Write [B, G, M, E] each at the bound rows -> keys and values visible to the pass, [B, G, visible_length, E] each."""
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, kept: Tensor, new: Tensor) -> Tensor:
        """kept [1, G, num_slots * capacity, E], new [B, G, M, E]"""
        owner, stop = self.owner, self.owner.visible_length
        if owner.is_packed:
            kept[0].index_copy_(1, owner.write_positions.to(kept.device), new[0])
            return new
        if owner.writes_tail:
            kept[:, :, stop - new.shape[2] : stop] = new
            return kept.narrow(2, 0, stop)
        kept[0].index_copy_(1, owner.write_positions.to(kept.device), new.transpose(0, 1).flatten(1, 2))
        by_slot = kept[0].unflatten(1, (owner.num_slots, owner.capacity)).transpose(0, 1)
        return by_slot[: len(new), :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible_length, 0

    def get_seq_length(self) -> int:
        return self.owner.visible_length - self.owner.num_new

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # its name in transformers 5.17


class KVCache:
    """`num_slots` prompts of at most `capacity` tokens each, in every layer: slot b starts at row b * capacity.

    Layers of one shape share a tensor, so that they are moved together. With `writes_tail` a pass over the only slot writes
    the last rows that it sees: a slice, which takes half the time of index_copy_ on a CPU.
    """

    def __init__(
        self,
        shapes: list[tuple[KVShape, KVShape]],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int = 1,
        writes_tail: bool = False,
        tensors: dict[KVShape, Tensor] | None = None,
    ):
        """Allocate, or use `tensors` by shape."""
        self.shapes, self.capacity, self.dtype, self.device = shapes, capacity, dtype, device
        self.num_slots, self.writes_tail, self.visible_length, self.num_new = num_slots, writes_tail, 0, 0
        self.is_packed = False  # the pass reads whole prompts end to end, which see no cached rows
        self.write_positions = torch.zeros(0, dtype=torch.int64, device=device)  # [B * M] rows that this pass writes
        rows, count = num_slots * capacity, Counter(shape for layer_shapes in shapes for shape in layer_shapes)
        self.tensors = tensors or {  # [n, G, num_slots * capacity, E]; zeros, because a masked NaN would still spread
            (g, e, on): torch.zeros(n, g, rows, e, dtype=dtype, device=on) for (g, e, on), n in count.items()
        }
        layer_tensors = {shape: iter(tensor.split(1)) for shape, tensor in self.tensors.items()}
        self.layers = [
            _KVCacheLayer(self, next(layer_tensors[key]), next(layer_tensors[value])) for key, value in shapes
        ]

    def view_slot(self, index: int, writes_tail: bool) -> "KVCache":
        """Return one slot as a cache that shares memory with this one."""
        first = index * self.capacity
        tensors = {shape: tensor.narrow(2, first, self.capacity) for shape, tensor in self.tensors.items()}
        return KVCache(self.shapes, self.capacity, self.dtype, self.device, 1, writes_tail, tensors)

    def bind(self, rows: Tensor, visible_length: int) -> Cache:
        """Return the cache for one pass, which writes rows [B, M] and sees the first `visible_length` rows of each slot."""
        self.write_positions, self.num_new, self.visible_length = rows.flatten(), rows.shape[-1], visible_length
        self.is_packed = False
        return Cache(layers=self.layers)

    def bind_prompts(self, rows: Tensor) -> Cache:
        """Return the cache for a pass over whole prompts end to end, which writes rows [N] and sees its own tokens alone."""
        cache = self.bind(rows, len(rows))
        self.is_packed = True
        return cache

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy rows source [R] to rows target [R] in every layer; the two may overlap."""
        for tensor in self.tensors.values():
            source_rows, target_rows = source.to(tensor.device), target.to(tensor.device)
            tensor.index_copy_(2, target_rows, tensor.index_select(2, source_rows))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def count_kv_bytes(shapes: list[tuple[KVShape, KVShape]], tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the target's keys and values of `tokens`."""
    return tokens * sum(g * e for layer_shapes in shapes for g, e, _ in layer_shapes) * dtype.itemsize


@torch.inference_mode()
def probe_kv_shapes(model: "PreTrainedModel") -> list[tuple[KVShape, KVShape]]:
    """Return the shapes and devices of each layer's keys and values, found by running one token.

    Raises ValueError for a target with a layer that keeps another state (linear attention): rejected drafts could not be
    removed from it.
    """
    decoder = model.get_decoder()
    if other := config_facts.describe_other_state(decoder.config):
        raise ValueError(
            f"{type(model).__name__} keeps state other than keys and values of its own in {other}, the torch engine needs keys "
            "and values alone in all layers; take another target"
        )
    from transformers import DynamicCache

    found = DynamicCache(config=decoder.config)
    decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=found, use_cache=True)
    layers = [layer for layer in found.layers if getattr(layer, "keys", None) is not None]
    if len(layers) != len(decoder.layers):
        raise ValueError(
            f"{type(model).__name__} keeps keys and values in {len(layers)} of its {len(decoder.layers)} layers, the torch "
            "engine needs them in all; take another target"
        )
    kept = [(layer.keys, layer.values) for layer in layers]
    return [tuple((x.shape[1], x.shape[3], x.device) for x in key_and_value) for key_and_value in kept]  # type: ignore[misc]
