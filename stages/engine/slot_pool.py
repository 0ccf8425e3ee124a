"""Slots of caches, reused from prompt to prompt, and the checks that a prompt and its answer fit.

Letters: R path length (num_steps + 1), H hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.draft.eagle3 import Eagle3Draft
from stages.engine.cuda_graphs import AsyncReadback, CudaGraphRunner, measure_free_memory
from stages.engine.decode_state import CacheSlot, DecodeState, round_up_capacity
from stages.engine.kv_cache import KVCache, count_kv_bytes, probe_kv_shapes, read_sliding_window


class SlotPool:
    """Slots for one prompt each. Raises ValueError for a target that has layers without keys and values."""

    def __init__(self, model: PreTrainedModel, draft: Eagle3Draft | None):
        self.model, self.draft, self.device = model, draft, model.device
        self.embedding = model.get_input_embeddings().weight  # [V, H]
        self.sliding_window = read_sliding_window(model)
        self.kv_shapes, self.idle = probe_kv_shapes(model), list[CacheSlot]()
        self.reserved_length = 0  # tokens of the longest prompt and answer to come, as far as known
        several_devices = {device for both in self.kv_shapes for _, _, device in both} != {self.device}
        self.uses_cuda_graphs = CudaGraphRunner(self.device).captures and not several_devices

    def check_length(self, tokens: int) -> None:
        """Raise ValueError where a prompt and answer of `tokens` exceed the target's limit or its sliding window."""
        limit, window = self.model.config.get_text_config().max_position_embeddings, self.sliding_window
        if window is not None and tokens > window:
            raise ValueError(
                f"prompt and answer may take {tokens} tokens, and layers of this target see {window} (sliding_window), which "
                "the torch engine does not decode with; use shorter prompts, or measure this target by benchmark_served"
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
    def take_slot(self, tokens: int, spare: int) -> Iterator[CacheSlot]:
        """Lend a slot for prompt and answer and `spare` rows behind them: an idle one, or a larger one in its place."""
        self.check_length(tokens)
        tokens = max(tokens, self.reserved_length)
        slot = self.idle.pop() if self.idle else None
        if slot is None or slot.capacity < tokens + spare:
            slot = None  # freed before the new one is allocated
            slot = self.allocate_slot(round_up_capacity(tokens + spare))
        try:
            yield slot
        finally:
            self.idle.append(slot)

    def allocate_slot(self, capacity: int) -> CacheSlot:
        """Raise ValueError where the GPU has too little free memory."""
        like, num_heads, head_dim = self.describe_draft_cache()
        self.check_memory_fits(capacity)
        return CacheSlot(
            capacity,
            torch.arange(capacity, device=self.device),
            torch.ones(1, capacity, dtype=torch.bool, device=self.device),
            torch.zeros(capacity, dtype=torch.float64, device=self.device),
            KVCache(self.kv_shapes, capacity, self.model.dtype, self.device, writes_tail=not self.uses_cuda_graphs),
            like.new_zeros(1, capacity, num_heads, head_dim),
            like.new_zeros(1, capacity, num_heads, head_dim),
            CudaGraphRunner(self.device, self.uses_cuda_graphs),
            AsyncReadback(self.device),
            {},
            {},
        )

    def describe_draft_cache(self) -> tuple[Tensor, int, int]:
        """Return a tensor of the draft's dtype and device, and the heads and head width of its keys (0 without a draft)."""
        if self.draft is None:
            return self.embedding, 0, 0
        c = self.draft.config
        return self.draft.fc.weight, c.num_key_value_heads, c.head_dim

    def count_cache_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values of target and draft."""
        like, num_heads, head_dim = self.describe_draft_cache()
        draft_bytes = 2 * tokens * num_heads * head_dim * like.element_size()
        return count_kv_bytes(self.kv_shapes, tokens, self.model.dtype) + draft_bytes

    def check_memory_fits(self, tokens: int) -> None:
        need = self.count_cache_bytes(tokens)
        if (free := measure_free_memory(self.device)) < need:
            raise ValueError(
                f"keys and values of {tokens} tokens take {need / 2**30:.1f} GiB, {self.device} has {free / 2**30:.1f} GiB "
                "left; lower benchmark.workloads.*.max_new_tokens, use shorter prompts, or end what else runs there"
            )

    def allocate_state(self, path_length: int, *slots: int) -> DecodeState:
        """Return zeros, with a first dimension of `slots` where given."""
        integer = {"dtype": torch.int64, "device": self.device}
        axes = () if self.draft is None or self.draft.frequency_axes is None else (3,)
        width = 3 * self.embedding.shape[1]
        return DecodeState(
            cache_length=torch.zeros(*slots, 1, **integer),
            num_verified=torch.zeros(*slots, 1, **integer),
            output_length=torch.zeros(*slots, 1, **integer),
            next_tokens=torch.zeros(*slots, path_length, **integer),
            features=torch.zeros(*slots, path_length, width, dtype=self.model.dtype, device=self.device),
            rope_positions=torch.zeros(*slots, path_length, *axes, **integer),
            rope_offset=torch.zeros(*slots, 1, **integer),
            readback=torch.zeros(*slots, 1 + path_length, **integer),
        )
