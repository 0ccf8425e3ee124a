"""Many prompts answered by the target alone, at a temperature each, in slots that are refilled.

The loop, the pass and its CUDA graph are `Engine`'s. What differs serves many short answers: prompts are read packed, several
in one forward, once a share of the slots is idle; each slot has its temperature, so that greedy and sampled answers share a
pass; and slots are as many as the memory holds.

An answer follows from its prompt, temperature and seed: its random numbers are its own, wherever and beside which it is
decoded. In half precision a pass of another width rounds differently, and a near tie may fall otherwise.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from stages.engine.cuda_graphs import measure_free_memory
from stages.engine.decode import DecodingRun, Engine
from stages.engine.decode_state import (
    ActiveRequest,
    CacheSlots,
    DecodeRequest,
    DecodeStep,
    RequestUpdate,
    round_up_capacity,
)
from stages.engine.proposer import DraftingMethod
from stages.engine.sampling import SamplingParams, SlotSampler, draw_uniforms
from stages.target import packed_forward
from stages.target.multimodal import is_multimodal

REFILLED_SHARE = 16  # prompts are read once one in so many slots is idle
MAX_PACKED_TOKENS = 1 << 14  # of the prompts read together
LOGIT_BYTES = 32  # of one logit: itself, in float32, divided, as a probability, and sums in float64
MEMORY_SHARE = 0.8  # of the free memory, for keys, values and logits
LENGTH_BOUND_ROPES = ("dynamic", "longrope")  # whose angles follow from the longest text of a pass


def explain_unsupported(model: PreTrainedModel) -> str | None:
    """Return why a target's prompts can't be answered in a pool; None where they can, if building the engine does not fail."""
    if is_multimodal(model):
        return "it is multimodal"
    config = model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if ropes.get("rope_type") in LENGTH_BOUND_ROPES:
        return f"its rotary positions ({ropes['rope_type']}) depend on the length of other rows"
    return None if packed_forward.supports_packing(model) else "its class does not keep packed prompts apart"


class PooledEngine(Engine):
    """A target that answers many prompts. Raises ValueError for one that keeps other state than keys and values."""

    def __init__(self, model: PreTrainedModel, end_tokens: list[int], top_p: float, logits_scale: float = 1.0):
        super().__init__(model, end_tokens, None, logits_scale)
        self.slots.max_length = math.inf  # longer texts are the caller's, as with transformers' generate
        self.top_p, self.samples, self.num_slots = top_p, False, 0  # of the answers under way

    @torch.inference_mode()
    def answer(self, requests: Sequence[DecodeRequest], num_slots: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (index of a request, its answer's ids with their end token) as answers end, `num_slots` at once if they fit."""
        self.samples = any(request.sampling for request in requests)
        self.num_slots = self.fit_slots(requests, num_slots)
        answers = defaultdict[int, list[int]](list)
        for updates in self._decode_requests(requests, self.num_slots, None):
            for index, step in updates:
                if step is None:
                    continue
                answers[index] += step.tokens
                if step.tokens[-1] in self.end_tokens or len(answers[index]) == requests[index].max_new_tokens:
                    yield index, answers.pop(index)

    def fit_slots(self, requests: Sequence[DecodeRequest], num_slots: int) -> int:
        """Return how many slots the free memory holds: the number wanted, or that halved until they fit."""
        capacity = round_up_capacity(max(request.num_tokens for request in requests) + self.count_spare_rows(None))
        each = self.slots.count_cache_bytes(capacity) + len(self.lm_head) * LOGIT_BYTES
        idle = sum(slots.target_cache.nbytes for slots in self.slots.idle)  # reused, or freed first
        free, num_slots = MEMORY_SHARE * (measure_free_memory(self.device) + idle), min(num_slots, len(requests))
        while num_slots > 1 and num_slots * each > free:
            num_slots //= 2
        return num_slots

    def free_memory(self) -> None:
        """Free caches and captured passes."""
        self.slots.idle.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _start_run(
        self, slots: CacheSlots, sampling: SamplingParams | None, method: DraftingMethod | None
    ) -> DecodingRun:
        if not self.samples:
            return super()._start_run(slots, None, method)
        sampler = SlotSampler(slots.temperatures, slots.uniforms, self.top_p, self.logits_scale)
        run = super()._start_run(slots, None, method)
        return replace(run, sampler=sampler, graph_key=(sampler.graph_key, slots.exceeds_window))

    def _fill_slots(self, run: DecodingRun, waiting: deque[tuple[int, DecodeRequest]]) -> Iterator[list[RequestUpdate]]:
        """Read waiting prompts packed into idle slots, once enough are idle."""
        while waiting and (idle := [slot for slot, a in enumerate(run.active) if a is None]):
            if len(idle) < min(len(waiting), -(-len(run.active) // REFILLED_SHARE)):
                return
            free = iter(idle)
            started: list[tuple[int, int, DecodeRequest]] = []
            tokens = 0
            while waiting and (not started or tokens + len(waiting[0][1].prompt) <= MAX_PACKED_TOKENS):
                if (slot := next(free, None)) is None:
                    break
                started.append((slot, *waiting.popleft()))
                tokens += len(started[-1][2].prompt)
            yield self._prefill_packed(run, started)

    def _prefill_packed(self, run: DecodingRun, started: list[tuple[int, int, DecodeRequest]]) -> list[RequestUpdate]:
        """Read prompts (slot, index of the request, request) in one forward -> the first token of each answer."""
        slots, state, device = run.slots, run.state, self.device
        requests = [request for _, _, request in started]
        lengths, width = [len(r.prompt) for r in requests], max(r.max_new_tokens for r in requests)
        numbers = torch.tensor([slot for slot, _, _ in started], device=device)
        starts = numbers * slots.capacity
        ids = torch.tensor([token for r in requests for token in r.prompt], device=device)  # [N]
        counts = torch.tensor(lengths, device=device)
        ends = counts.cumsum(0)
        rows = torch.arange(len(ids), device=device) + (starts - ends + counts).repeat_interleave(
            counts, output_size=len(ids)
        )
        hidden = packed_forward.forward_documents(
            self.model, ids, lengths, True, cache=slots.target_cache.bind_prompts(rows)
        )
        if self.samples:
            drawn = [draw_uniforms(r.sampling.seed if r.sampling else 0, width) for r in requests]
            slots.uniforms[numbers, :width] = torch.stack(drawn).to(device)
        slots.temperatures[numbers] = torch.tensor(
            [r.sampling.temperature if r.sampling else 0.0 for r in requests], device=device
        )
        first = self._sample(run.sampler, hidden[ends - 1], starts)
        state.cache_length[numbers] = counts[:, None]
        state.num_verified[numbers] = state.output_length[numbers] = 1
        state.next_tokens[numbers] = first[:, None]
        if slots.active_mask is not None:
            slots.active_mask[numbers] = True
        updates: list[RequestUpdate] = []
        for (slot, index, request), token in zip(started, first.tolist(), strict=True):
            updates.append((index, DecodeStep([token], 0)))
            run.active[slot] = ActiveRequest(index, len(request.prompt), request.max_new_tokens)
            if token in self.end_tokens or request.max_new_tokens == 1:
                self._free_slot(run, slot)
        return updates
