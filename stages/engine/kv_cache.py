"""Keys and values of every layer in place: fixed room, so that a recorded pass finds them where they were.

Rows are written at places given as a tensor and moved by tensors; what no mask lets see may hold anything finite.

Letters: M tokens of a pass, L layers, G key-value heads, E head width, R rows that may move, B slots in use.
"""

from collections import Counter
from weakref import proxy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

KVShape = tuple[int, int, torch.device]  # G, E, and where the layer lies


class _KVCacheLayer(CacheLayerMixin):
    """One layer of the store, as transformers asks for it."""

    is_compileable = False
    is_sliding = False

    def __init__(self, store: "KVCache", keys: Tensor, values: Tensor):
        super().__init__()
        # A proxy: in a circle with its layers the store, gigabytes of it, would stay until Python next looks for circles.
        self.store: KVCache = proxy(store)
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to do: keys and values are there from the first."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """[1, G, M, E] each are written at the store's places -> all that the pass may see, [1, G, seen, E] each."""
        store, count = self.store, key_states.shape[2]
        if store.last:
            begin, end = store.seen - count, store.seen
            self.keys[:, :, begin:end], self.values[:, :, begin:end] = key_states, value_states
        else:
            places = store.places.to(self.keys.device)
            self.keys.index_copy_(2, places, key_states)
            self.values.index_copy_(2, places, value_states)
        return self.keys.narrow(2, 0, store.seen), self.values.narrow(2, 0, store.seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.seen, 0

    def get_seq_length(self) -> int:
        return self.store.seen - len(self.store.places)

    def get_max_length(self) -> int:
        return self.store.room

    get_max_cache_shape = get_max_length  # its name in transformers 5.17


class KVCache:
    """Room for `room` tokens in every layer. Layers of one shape lie in one tensor, so that all move at once.

    With `last` a pass writes the last rows that it sees: a slice, which takes a CPU half the time.
    """

    layer: type["_KVCacheLayer"] = _KVCacheLayer

    def __init__(
        self, shapes: list[tuple[KVShape, KVShape]], room: int, dtype: torch.dtype, device: torch.device, last: bool = False,
        tensors: dict[KVShape, Tensor] | None = None,
    ):  # fmt: skip
        """tensors: where it lies, if not in tensors of its own."""
        self.room, self.seen, self.last = room, 0, last
        self.places = torch.zeros(0, dtype=torch.int64, device=device)  # [M] where this pass writes
        count = Counter(shape for both in shapes for shape in both)
        self.tensors = tensors or {  # [n, G, room, E]; zeros, since a masked NaN would still be one
            (g, e, on): torch.zeros(n, g, room, e, dtype=dtype, device=on) for (g, e, on), n in count.items()
        }
        rest = {shape: iter(tensor.split(1)) for shape, tensor in self.tensors.items()}
        self.layers = [self.layer(self, next(rest[key]), next(rest[value])) for key, value in shapes]

    def cache(self, places: Tensor, seen: int) -> Cache:
        """What a pass is given: it writes at places [M], and sees the first `seen` rows."""
        self.places, self.seen = places, seen
        return Cache(layers=self.layers)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows at source [R] to target [R], in every layer; the two may overlap."""
        for tensor in self.tensors.values():
            here, there = source.to(tensor.device), target.to(tensor.device)
            tensor.index_copy_(2, there, tensor.index_select(2, here))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _SlottedKVCacheLayer(_KVCacheLayer):
    """One layer of slots."""

    store: "SlottedKVCache"

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """[B, G, M, E] each are written at the store's places -> all that the pass may see, [B, G, seen, E] each."""
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, kept: Tensor, new: Tensor) -> Tensor:
        """kept [1, G, slots * each, E]"""
        store = self.store
        kept[0].index_copy_(1, store.places.to(kept.device), new.transpose(0, 1).flatten(1, 2))
        return kept[0].unflatten(1, (store.slots, store.each)).transpose(0, 1)[: len(new), :, : store.seen]

    def get_seq_length(self) -> int:
        return self.store.seen

    def get_max_length(self) -> int:
        return self.store.each

    get_max_cache_shape = get_max_length


class SlottedKVCache(KVCache):
    """Room for several prompts at once: `slots` of them one behind the other, slot b from row b * each on."""

    layer = _SlottedKVCacheLayer

    def __init__(
        self, shapes: list[tuple[KVShape, KVShape]], slots: int, each: int, dtype: torch.dtype, device: torch.device
    ):
        self.shapes, self.slots, self.each, self.dtype = shapes, slots, each, dtype
        super().__init__(shapes, slots * each, dtype, device)

    def slot(self, number: int, last: bool) -> KVCache:
        """One of them, as a store: what is written there is written here."""
        first = number * self.each
        tensors = {shape: tensor.narrow(2, first, self.each) for shape, tensor in self.tensors.items()}
        return KVCache(self.shapes, self.each, self.dtype, self.places.device, last, tensors)


@torch.inference_mode()
def probe_kv_shapes(model: PreTrainedModel) -> list[tuple[KVShape, KVShape]]:
    """Of each layer the shapes of its keys and values, and where they lie: asked of the model itself, by one token.

    Raises ValueError for a target with a layer that keeps something else (a linear attention's state): drafts that were
    refused could not be taken back from it.
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
    """How many tokens the shortest-sighted layers see; None where all see all."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)
