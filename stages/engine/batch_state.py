"""Requests, slots and caches of the batch engine.

Letters: B slots, R path length, G key-value heads, E head width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stages.engine.cuda_graphs import AsyncReadback, CudaGraphRunner
from stages.engine.decode_state import CacheSlot, DecodeState, DecodeStep
from stages.engine.kv_cache import SlottedKVCache
from stages.engine.sampling import SamplingParams
from stages.engine.slot_pool import SlotPool
from stages.target.multimodal import ImagePatchesProtocol

TreeTuple = tuple[int, int, int]  # num_steps, topk, num_draft_tokens
RequestUpdate = tuple[int, DecodeStep | None]  # index of the request; None: its prefill begins


class DecodeRequest(NamedTuple):
    """A prompt, and how to answer it."""

    prompt: list[int]
    max_new_tokens: int
    images: ImagePatchesProtocol | None = None
    sampling: SamplingParams | None = None


@dataclass(eq=False)
class ActiveRequest:
    """The request that a slot is decoding."""

    request_index: int
    prompt_length: int
    max_new_tokens: int
    num_read: int = 1  # tokens that the host has read
    num_launched: int = 0  # passes launched and not read
    finished: bool = False

    @property
    def needs_pass(self) -> bool:
        """Return whether another pass may bring a token."""
        return self.num_read + self.num_launched < self.max_new_tokens


ActiveSlots = list[ActiveRequest | None]  # by slot; None: idle


@dataclass
class BatchState:
    """KV caches and captured CUDA graphs of all slots."""

    target_cache: SlottedKVCache
    draft_keys: Tensor  # [slots, slot_capacity, G, E]
    draft_values: Tensor
    uniforms: Tensor  # [slots, slot_capacity] float64
    slot_starts: Tensor  # [slots, 1]: first cache row of each slot
    active_mask: Tensor  # [slots, 1] bool
    slots: list[CacheSlot]
    states: dict[int, DecodeState]  # by R, [slots, ...] each
    graphs: CudaGraphRunner
    readback: AsyncReadback

    @property
    def positions(self) -> Tensor:
        """[slot_capacity] 0, 1, 2, ..."""
        return self.slots[0].positions

    def move_slot(self, source: int, target: int, length: int, state: DecodeState) -> None:
        """Move the first `length` rows of a slot, and its state, to another slot."""
        rows = self.positions[:length]
        self.target_cache.move_rows(self.slot_starts[source] + rows, self.slot_starts[target] + rows)
        for tensor in (self.draft_keys, self.draft_values, self.uniforms, *state):
            tensor[target] = tensor[source]


def allocate_batch_state(pool: SlotPool, num_slots: int, capacity: int) -> BatchState:
    """Return empty slots of `capacity` tokens. Raises ValueError where the GPU has too little free memory."""
    like, num_heads, head_dim = pool.describe_draft_cache()
    pool.check_memory_fits(num_slots * capacity)
    integer = {"dtype": torch.int64, "device": pool.device}
    cache = SlottedKVCache(pool.kv_shapes, num_slots, capacity, pool.model.dtype, pool.device)
    keys, values = (like.new_zeros(num_slots, capacity, num_heads, head_dim) for _ in range(2))
    uniforms = torch.zeros(num_slots, capacity, dtype=torch.float64, device=pool.device)
    positions = torch.arange(capacity, **integer)
    all_true = torch.ones(1, capacity, dtype=torch.bool, device=pool.device)
    graphs, readback = CudaGraphRunner(pool.device, pool.uses_cuda_graphs), AsyncReadback(pool.device)
    slots = [
        CacheSlot(
            capacity,
            positions,
            all_true,
            uniforms[n],
            cache.view_slot(n, writes_tail=not pool.uses_cuda_graphs),
            keys[n : n + 1],
            values[n : n + 1],
            graphs,
            readback,
            {},
            {},
        )
        for n in range(num_slots)
    ]
    starts = (torch.arange(num_slots, **integer) * capacity)[:, None]
    active = torch.zeros(num_slots, 1, dtype=torch.bool, device=pool.device)
    return BatchState(cache, keys, values, uniforms, starts, active, slots, {}, graphs, readback)
