"""Slots of caches, reused from prompt to prompt, and the checks that a prompt and its answer fit.

Letters: R path length (num_steps + 1), H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.engine.cuda_graphs import AsyncReadback, CudaGraphRunner, measure_free_memory
from stages.engine.decode_state import CacheSlots, DecodeState, round_up_capacity
from stages.engine.kv_cache import KVCache, count_kv_bytes, probe_kv_shapes
from stages.engine.proposer import Drafter
from stages.params.units import format_bytes
from stages.target.config_facts import read_sliding_window
from stages.target.multimodal import is_multimodal


class SlotPool:
    """Slots for one prompt or several. Raises ValueError for a target that has layers without keys and values."""

    def __init__(self, model: PreTrainedModel, drafter: Drafter | None):
        self.model, self.drafter, self.device = model, drafter, model.device
        self.embedding = model.get_input_embeddings().weight  # [V, H]
        self.sliding_window, self.is_multimodal = read_sliding_window(model.config), is_multimodal(model)
        self.kv_shapes, self.idle = probe_kv_shapes(model), list[CacheSlots]()
        self.max_length: float = model.config.get_text_config().max_position_embeddings
        self.reserved_length = 0  # tokens of the longest prompt and answer to come, as far as known
        several_devices = {device for both in self.kv_shapes for _, _, device in both} != {self.device}
        self.uses_cuda_graphs = CudaGraphRunner(self.device).captures and not several_devices

    def check_length(self, tokens: int) -> None:
        """Raise ValueError where a prompt and answer of `tokens` exceed the target's limit, or a multimodal one's window."""
        limit, window = self.max_length, self.sliding_window
        if window is not None and tokens > window and self.is_multimodal:
            raise ValueError(
                f"prompt and answer may take {tokens} tokens, a multimodal target with a sliding window decodes {window} at most "
                "in the torch engine; use shorter prompts, or benchmark_served"
            )
        if tokens > limit:
            raise ValueError(
                f"prompt and answer may take {tokens} tokens, the target holds {limit} (max_position_embeddings); "
                "lower benchmark.workloads.*.max_new_tokens or use shorter prompts"
            )

    def reserve_length(self, tokens: int) -> None:
        """Make every new slot large enough for a prompt and answer of `tokens`. Raises ValueError as `check_length`."""
        self.check_length(tokens)
        self.reserved_length = tokens

    @contextmanager
    def take_slots(self, num_slots: int, tokens: int, spare: int) -> Iterator[CacheSlots]:
        """Yield slots for prompts and answers of `tokens`, with `spare` rows behind them.

        Idle slots are used where they are large enough, else new ones replace them. Slots of several prompts stay allocated for
        one `num_slots` only, the last.
        """
        self.check_length(tokens)
        longest = tokens if num_slots > 1 else max(tokens, self.reserved_length)
        capacity = longest + spare
        slots = next((idle for idle in reversed(self.idle) if idle.num_slots == num_slots), None)
        if slots is not None:
            self.idle.remove(slots)
        if slots is None or slots.capacity < capacity:
            slots = None  # freed before the new ones are allocated
            if num_slots > 1:
                self.idle = [idle for idle in self.idle if idle.num_slots == 1]
            slots = self.allocate_slots(num_slots, round_up_capacity(capacity))
        for slot_view in (slots, *slots.views):
            slot_view.exceeds_window = self.sliding_window is not None and longest > self.sliding_window
        try:
            yield slots
        finally:
            self.idle.append(slots)

    def allocate_slots(self, num_slots: int, capacity: int) -> CacheSlots:
        """Raise ValueError where the GPU has too little free memory."""
        drafter = self.drafter
        num_heads, head_dim = (drafter.cache_heads, drafter.cache_head_dim) if drafter else (0, 0)
        self.check_memory_fits(num_slots * capacity)
        draft_cache = self.embedding.new_zeros(num_slots, capacity, num_heads, head_dim)
        is_single, integer = num_slots == 1, {"dtype": torch.int64, "device": self.device}
        has_dynamic_shapes = is_single and not self.uses_cuda_graphs
        numbers = torch.arange(num_slots, **integer)[:, None]
        slots = CacheSlots(
            capacity,
            has_dynamic_shapes,
            torch.arange(capacity, **integer),
            numbers,
            numbers * capacity,
            None if is_single else torch.zeros(num_slots, 1, dtype=torch.bool, device=self.device),
            torch.ones(1, 1, capacity, dtype=torch.bool, device=self.device),
            torch.ones(num_slots, 1, 1, dtype=torch.bool, device=self.device),
            torch.zeros(num_slots, capacity, dtype=torch.float64, device=self.device),
            torch.zeros(num_slots, device=self.device),
            torch.zeros(num_slots, capacity, 2, dtype=torch.float64, device=self.device),
            KVCache(self.kv_shapes, capacity, self.model.dtype, self.device, num_slots, has_dynamic_shapes),
            draft_cache,
            torch.zeros_like(draft_cache),
            CudaGraphRunner(self.device, self.uses_cuda_graphs),
            AsyncReadback(self.device),
            states={},
            proposers={},
            views=[],
        )
        if not is_single:
            slots.views = [self._view_slot(slots, index) for index in range(num_slots)]
        return slots

    def _view_slot(self, slots: CacheSlots, index: int) -> CacheSlots:
        own, has_dynamic_shapes = slice(index, index + 1), not self.uses_cuda_graphs
        return replace(
            slots,
            has_dynamic_shapes=has_dynamic_shapes,
            numbers=slots.numbers[:1],
            starts=slots.starts[:1],
            active_mask=None,
            lone_roots=slots.lone_roots[:1],
            uniforms=slots.uniforms[own],
            draft_uniforms=slots.draft_uniforms[own],
            target_cache=slots.target_cache.view_slot(index, has_dynamic_shapes),
            draft_keys=slots.draft_keys[own],
            draft_values=slots.draft_values[own],
        )

    def count_cache_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values of target and draft."""
        drafter = self.drafter
        of_draft = 2 * tokens * drafter.cache_heads * drafter.cache_head_dim if drafter else 0
        return count_kv_bytes(self.kv_shapes, tokens, self.model.dtype) + of_draft * self.embedding.element_size()

    def check_memory_fits(self, tokens: int) -> None:
        need = self.count_cache_bytes(tokens)
        if (free := measure_free_memory(self.device)) < need:
            raise ValueError(
                f"keys and values of {tokens} tokens take {format_bytes(need)}, {self.device} has {format_bytes(free)} "
                "left; lower benchmark.workloads.*.max_new_tokens, use shorter prompts, or end what else runs there"
            )

    def take_state(self, slots: CacheSlots, path_length: int) -> DecodeState:
        """Return the slots' state for paths of `path_length`, all of them free."""
        axes, width = (self.drafter.rope_axes, self.drafter.feature_width) if self.drafter else ((), 0)

        def allocate(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(slots.num_slots, *shape, dtype=dtype, device=self.device)

        if path_length not in slots.states:
            slots.states[path_length] = DecodeState(
                cache_length=allocate(1),
                num_verified=allocate(1),
                output_length=allocate(1),
                next_tokens=allocate(path_length),
                features=allocate(path_length, width, dtype=self.model.dtype),
                rope_positions=allocate(path_length, *axes),
                rope_offset=allocate(1),
                readback=allocate(1 + path_length),
            )
        slots.free_slots(slots.states[path_length], slice(None))
        return slots.states[path_length]
