"""Keys and values of every layer in preallocated tensors, so that captured CUDA graphs find them at the same addresses.

Rows are written and moved at indices given as tensors; rows that no mask admits may hold any finite value.

Letters: M tokens of a pass, L layers, G key-value heads, E head width, R rows to move, B slots in use.
"""

from collections import Counter
from weakref import proxy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

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
        """Write [1, G, M, E] each at the bound rows -> keys and values visible to the pass, [1, G, visible_length, E] each."""
        owner, count = self.owner, key_states.shape[2]
        if owner.writes_tail:
            start, stop = owner.visible_length - count, owner.visible_length
            self.keys[:, :, start:stop], self.values[:, :, start:stop] = key_states, value_states
        else:
            rows = owner.write_positions.to(self.keys.device)
            self.keys.index_copy_(2, rows, key_states)
            self.values.index_copy_(2, rows, value_states)
        return self.keys.narrow(2, 0, owner.visible_length), self.values.narrow(2, 0, owner.visible_length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible_length, 0

    def get_seq_length(self) -> int:
        return self.owner.visible_length - len(self.owner.write_positions)

    def get_max_length(self) -> int:
        return self.owner.capacity

    get_max_cache_shape = get_max_length  # its name in transformers 5.17


class KVCache:
    """`capacity` tokens in every layer. Layers of one shape share a tensor, so that they are moved together.

    With `writes_tail` a pass writes the last rows that it sees: a slice, which takes half the time of index_copy_ on a CPU.
    """

    layer: type["_KVCacheLayer"] = _KVCacheLayer

    def __init__(
        self,
        shapes: list[tuple[KVShape, KVShape]],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        writes_tail: bool = False,
        tensors: dict[KVShape, Tensor] | None = None,
    ):
        """Allocate, or use `tensors` by shape."""
        self.capacity, self.visible_length, self.writes_tail = capacity, 0, writes_tail
        self.write_positions = torch.zeros(0, dtype=torch.int64, device=device)  # [M] rows that this pass writes
        count = Counter(shape for both in shapes for shape in both)
        self.tensors = tensors or {  # [n, G, capacity, E]; zeros, because a masked NaN would still spread
            (g, e, on): torch.zeros(n, g, capacity, e, dtype=dtype, device=on) for (g, e, on), n in count.items()
        }
        rest = {shape: iter(tensor.split(1)) for shape, tensor in self.tensors.items()}
        self.layers = [self.layer(self, next(rest[key]), next(rest[value])) for key, value in shapes]

    def bind(self, rows: Tensor, visible_length: int) -> Cache:
        """Return the cache for one pass, which writes rows [M] and sees the first `visible_length` rows."""
        self.write_positions, self.visible_length = rows, visible_length
        return Cache(layers=self.layers)

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy rows source [R] to rows target [R] in every layer; the two may overlap."""
        for tensor in self.tensors.values():
            here, there = source.to(tensor.device), target.to(tensor.device)
            tensor.index_copy_(2, there, tensor.index_select(2, here))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _SlottedKVCacheLayer(_KVCacheLayer):
    """One layer of a `SlottedKVCache`."""

    owner: "SlottedKVCache"

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Write [B, G, M, E] each at the bound rows -> keys and values visible to the pass, [B, G, visible_length, E] each."""
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, kept: Tensor, new: Tensor) -> Tensor:
        """kept [1, G, num_slots * slot_capacity, E], new [B, G, M, E]"""
        owner = self.owner
        kept[0].index_copy_(1, owner.write_positions.to(kept.device), new.transpose(0, 1).flatten(1, 2))
        by_slot = kept[0].unflatten(1, (owner.num_slots, owner.slot_capacity)).transpose(0, 1)
        return by_slot[: len(new), :, : owner.visible_length]

    def get_seq_length(self) -> int:
        return self.owner.visible_length

    def get_max_length(self) -> int:
        return self.owner.slot_capacity

    get_max_cache_shape = get_max_length


class SlottedKVCache(KVCache):
    """`num_slots` prompts, one after another in each tensor: slot b starts at row b * slot_capacity."""

    layer = _SlottedKVCacheLayer

    def __init__(
        self,
        shapes: list[tuple[KVShape, KVShape]],
        num_slots: int,
        slot_capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.shapes, self.num_slots, self.slot_capacity, self.dtype = shapes, num_slots, slot_capacity, dtype
        super().__init__(shapes, num_slots * slot_capacity, dtype, device)

    def view_slot(self, index: int, writes_tail: bool) -> KVCache:
        """Return one slot as a cache that shares memory with this one."""
        first = index * self.slot_capacity
        tensors = {shape: tensor.narrow(2, first, self.slot_capacity) for shape, tensor in self.tensors.items()}
        device = self.write_positions.device
        return KVCache(self.shapes, self.slot_capacity, self.dtype, device, writes_tail, tensors)


def count_kv_bytes(shapes: list[tuple[KVShape, KVShape]], tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the target's keys and values of `tokens`."""
    return tokens * sum(g * e for both in shapes for g, e, _ in both) * dtype.itemsize


@torch.inference_mode()
def probe_kv_shapes(model: PreTrainedModel) -> list[tuple[KVShape, KVShape]]:
    """Return the shapes and devices of each layer's keys and values, found by running one token.

    Raises ValueError for a target with a layer that keeps another state (linear attention): rejected drafts could not be
    removed from it.
    """
    decoder = model.get_decoder()
    found = DynamicCache(config=decoder.config)
    decoder(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=found, use_cache=True)
    layers = [layer for layer in found.layers if getattr(layer, "keys", None) is not None]
    if len(layers) != len(decoder.layers):
        raise ValueError(
            f"{type(model).__name__} keeps keys and values in {len(layers)} of its {len(decoder.layers)} layers, the torch "
            "engine needs them in all; measure this target by benchmark_served"
        )
    kept = [(layer.keys, layer.values) for layer in layers]
    return [tuple((x.shape[1], x.shape[3], x.device) for x in both) for both in kept]  # type: ignore[misc]


def read_sliding_window(model: PreTrainedModel) -> int | None:
    """Return the sliding window of the target's layers, or None where all layers attend to every token."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)
