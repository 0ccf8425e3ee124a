"""The torch engine: plain and speculative decoding of one prompt or several, greedy or sampled, by the same machinery.

Decodings of one prompt are generators of `DecodeStep`s, so that the caller measures time: the first step is the token from
prefill, each later one the tokens of a decoding step (plain) or a verify cycle (speculative). In float32 both yield the same
tokens, also when sampling: a draw depends on the seed and the token's position alone (engine/sampling.py). Only with sampled
drafts, whose acceptance is drawn too, is the same distribution all that they share.

A cycle starts with tokens up to n in the cache; token n is the bonus token:

    extend    the draft reads the rows that the last cycle verified
    expand    from the draft's state at n - 1, grow candidates; keep the best num_draft_tokens - 1 under the root (token n)
    verify    one target forward over the tree; node i attends to the prefix, its ancestors and itself
    accept    from the root, follow the target's tokens (engine/sampling.py) as long as they are in the tree
    move      keep the accepted path's keys and values in the cache; its features are the draft's next input

Its shapes depend on the tree only: the path is padded to R = num_steps + 1 rows, and rows beyond it are overwritten before
a mask admits them. So a GPU captures a cycle once as a CUDA graph and replays it; the host reads the result of a cycle in
one copy while the next cycle runs. A plain step is the same with a tree of one node.

A `Proposer` of the draft's family proposes the trees (stages/families). Verify, accept and move are shared, so the output of
all equals plain decoding.

Several prompts, each with its own length, are decoded in slots. A prompt is prefilled alone, in its slot; a step or a cycle
is one pass over all slots. A slot whose answer ended takes the next prompt at once. A GPU captures one pass for each number
of slots and tree; slots without a prompt take part in it, and their results are ignored. On a CPU the slots in use are kept
contiguous, and a pass covers only these. In float32 each answer equals that of its prompt alone: a wider pass rounds
differently, but not enough to change a token. One prompt is the case of one slot, whose passes need no mask of active slots,
and on a CPU have shapes that depend on lengths.

With images, prefill calls the multimodal model; a decoded token has the rotary position `cache index + rope_offset` on all
three axes, because an image spans fewer positions than it has tokens.

Letters: B slots of a pass, T prompt tokens, n cached tokens, M num_draft_tokens, R path length, L layers, H hidden,
V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.engine.decode_state import (
    ActiveRequest,
    ActiveSlots,
    CacheSlots,
    DecodeRequest,
    DecodeState,
    DecodeStep,
    RequestUpdate,
    VerifyOutput,
    advance_state,
    compute_rope_positions,
    read_step,
)
from stages.engine.proposer import Drafter, DraftingMethod, Proposer
from stages.engine.sampling import SamplingParams, TokenSampler, draw_draft_uniforms, draw_uniforms
from stages.engine.slot_pool import SlotPool
from stages.engine.target_runner import TargetRunner
from stages.params.tree_shape import TreeShape
from stages.target.multimodal import ImagePatches
from stages.trees import draft_tree
from stages.trees.draft_tree import DraftTree


@dataclass(frozen=True)
class DecodingRun:
    """Requests under way in some slots, all plainly or all by one proposer."""

    slots: CacheSlots
    state: DecodeState
    sampler: TokenSampler  # of all slots
    proposer: Proposer | None  # None decodes plainly
    num_draft_tokens: int
    graph_key: Hashable
    active: ActiveSlots

    @property
    def feature_layers(self) -> list[int]:
        return list(self.proposer.feature_layers) if self.proposer else []


class Engine:
    """A target, and optionally a draft that fits it, ready to decode."""

    def __init__(
        self,
        model: PreTrainedModel,
        end_tokens: list[int],
        drafter: Drafter | None = None,
        logits_scale: float = 1.0,  # of the target's manifest
    ):
        self.model, self.decoder, self.device = model, model.get_decoder(), model.device
        self.lm_head = model.get_output_embeddings().weight  # [V, H]
        self.logits_scale = logits_scale
        self.embedding = model.get_input_embeddings().weight  # [V, H]
        self.end_tokens, self.drafter, self.slots = set(end_tokens), drafter, SlotPool(model, drafter)
        self.uses_cuda_graphs = self.slots.uses_cuda_graphs
        if drafter is not None and self.uses_cuda_graphs:
            drafter.use_fused_kernels()
        self.target = TargetRunner(model, self.slots)
        self.methods: dict[tuple[TreeShape, float | None], DraftingMethod] = {}
        self.passes_ahead = int(self.uses_cuda_graphs)  # passes launched before the one before them is read

    def get_tree_method(self, tree: TreeShape, sampling: SamplingParams | None = None) -> DraftingMethod:
        """Return the method that proposes trees of one shape, with draft tokens sampled as `sampling` says; greedy without it.

        Raises ValueError for an impossible tree, and for one whose drafts can't be sampled.
        """
        assert self.drafter is not None
        key = tree, sampling.draft_temperature if sampling else None
        if key not in self.methods:
            self.methods[key] = self.drafter.build_method(*key)
        return self.methods[key]

    # Decoding

    @torch.inference_mode()
    def measure_margin(self, prompt: list[int], output: list[int], images: ImagePatches | None = None) -> float:
        """Return the gap between the target's two highest logits after `prompt` and `output`."""
        start, end = len(prompt), len(prompt) + len(output)
        with self.slots.take_slots(1, end, 0) as slot:
            prefill = self.target.prefill(slot, prompt, images, [])
            hidden = prefill.hidden[-1]  # [H]
            if output:
                ids = torch.tensor([output], device=self.device)
                causal = torch.ones(1, 1, end - start, end, dtype=torch.bool, device=self.device).tril(start)
                rows = slot.positions[None, start:end]
                hidden = self.target.forward(slot, ids, rows + prefill.rope_offset, causal, rows, end)[0, -1]
        first, second = (hidden @ self.lm_head.T).float().topk(2).values.tolist()
        return (first - second) * self.logits_scale

    @torch.inference_mode()
    def decode_plain(
        self,
        prompt: list[int],
        max_new_tokens: int,
        images: ImagePatches | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """Yield one token a step, until an end token or `max_new_tokens`; greedy without `sampling`."""
        yield from self._decode_alone(DecodeRequest(prompt, max_new_tokens, images, sampling), None)

    @torch.inference_mode()
    def decode_speculative(
        self,
        prompt: list[int],
        max_new_tokens: int,
        tree: TreeShape,
        images: ImagePatches | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """Yield prefill's token, then one step a cycle; greedy without `sampling`.

        Tokens past an end token or `max_new_tokens` are cut off, so the last cycle may come without its bonus token. Raises
        ValueError for an impossible tree, before the first token.
        """
        method = self.get_tree_method(tree, sampling)
        yield from self._decode_alone(DecodeRequest(prompt, max_new_tokens, images, sampling), method)

    @torch.inference_mode()
    def decode_batch(
        self, requests: Sequence[DecodeRequest], num_slots: int, tree: TreeShape | None
    ) -> Iterator[list[RequestUpdate]]:
        """Answer all requests in order, at most `num_slots` at once, plainly without a tree; yield updates as they arrive.

        Raises ValueError, before the first token, for prompts that don't fit, for an impossible tree, and where sampled
        requests differ in temperature, top-p, top-k or whether drafts are sampled.
        """
        num_slots = self._check_requests(requests, num_slots)
        method = self.get_tree_method(tree, requests[0].sampling) if tree else None
        yield from self._decode_requests(requests, num_slots, method)

    @torch.inference_mode()
    def warm_up(self, requests: Sequence[DecodeRequest], num_slots: int, tree: TreeShape | None) -> None:
        """Allocate caches for the requests and capture their pass, outside measured time. Raises as `decode_batch`."""
        num_slots = self._check_requests(requests, num_slots)
        method = self.get_tree_method(tree, requests[0].sampling) if tree else None
        self.slots.reserve_length(max(request.num_tokens for request in requests))
        with self._take_slots(requests, num_slots, method) as slots:
            if self.uses_cuda_graphs:
                run = self._start_run(slots, requests[0].sampling, method)
                self._prefill_slot(run, 0, 0, requests[0])
                self._launch_pass(run)

    def _check_requests(self, requests: Sequence[DecodeRequest], num_slots: int) -> int:
        """Return how many slots will be used. Raises ValueError for what can't be decoded together."""
        self.slots.check_length(max(request.num_tokens for request in requests))
        if len({request.sampling and request.sampling.shared for request in requests}) > 1:
            raise ValueError(
                "prompts that are decoded together share temperature, top-p, top-k and how drafts are sampled; decode others "
                "apart"
            )
        return min(num_slots, len(requests))

    # Slots

    def _decode_alone(self, request: DecodeRequest, method: DraftingMethod | None) -> Iterator[DecodeStep]:
        for updates in self._decode_requests([request], 1, method):
            for _, step in updates:
                if step is not None:
                    yield step

    def _decode_requests(
        self, requests: Sequence[DecodeRequest], num_slots: int, method: DraftingMethod | None
    ) -> Iterator[list[RequestUpdate]]:
        """Decode requests in `num_slots` slots and yield what each pass has added to them.

        On a GPU a pass is launched before the one before it is read: an end token is found one pass late, and the tokens decoded
        past it are dropped.
        """
        with self._take_slots(requests, num_slots, method) as slots:
            run = self._start_run(slots, requests[0].sampling, method)
            waiting = deque(enumerate(requests))
            launched = deque[tuple[Callable[[], list[int]], ActiveSlots]]()
            while True:
                yield from self._fill_slots(run, waiting)
                if not any(run.active):
                    return
                if not self.uses_cuda_graphs:
                    self._compact_slots(run)
                while len(launched) <= self.passes_ahead and any(a and a.needs_pass for a in run.active):
                    launched.append((self._launch_pass(run), list(run.active)))
                yield self._read_pass(run, *launched.popleft())

    def _take_slots(
        self, requests: Sequence[DecodeRequest], num_slots: int, method: DraftingMethod | None
    ) -> AbstractContextManager[CacheSlots]:
        longest = max(request.num_tokens for request in requests)
        return self.slots.take_slots(num_slots, longest, self.count_spare_rows(method))

    def count_spare_rows(self, method: DraftingMethod | None) -> int:
        """Return the rows of a slot besides those of a prompt and its answer.

        A pass writes scratch rows behind the verified ones; passes launched before it was read advance as many more.
        """
        scratch, path_length = (method.num_scratch_rows, method.num_steps + 1) if method else (1, 1)
        return scratch + (1 + self.passes_ahead) * path_length

    def _start_run(
        self, slots: CacheSlots, sampling: SamplingParams | None, method: DraftingMethod | None
    ) -> DecodingRun:
        """Return a run whose slots are all idle."""
        if method is not None and method not in slots.proposers:
            slots.proposers[method] = method.build_proposer(slots.capacity)
        sampler = TokenSampler(sampling, slots.uniforms.flatten(), self.logits_scale)
        return DecodingRun(
            slots,
            self.slots.take_state(slots, method.num_steps + 1 if method else 1),
            sampler,
            slots.proposers[method] if method else None,
            method.num_draft_tokens if method else 1,
            (method, sampler.graph_key, slots.exceeds_window),
            [None] * slots.num_slots,
        )

    def _fill_slots(self, run: DecodingRun, waiting: deque[tuple[int, DecodeRequest]]) -> Iterator[list[RequestUpdate]]:
        """Prefill waiting prompts into idle slots one by one; all of them begin as soon as they have a slot."""
        while waiting and (idle := [slot for slot, a in enumerate(run.active) if a is None]):
            started = [(slot, *waiting.popleft()) for slot in idle[: len(waiting)]]
            yield [(index, None) for _, index, _ in started]
            for slot, index, request in started:
                step = self._prefill_slot(run, slot, index, request)
                yield [(index, step)]
                if step.tokens[-1] in self.end_tokens or request.max_new_tokens == 1:
                    self._free_slot(run, slot)

    def _prefill_slot(self, run: DecodingRun, index: int, request_index: int, request: DecodeRequest) -> DecodeStep:
        """Read a prompt -> the answer's first token; the draft has the last row still to read."""
        slot, state = run.slots.view_slot(index), run.state.view_slots(index, index + 1)
        sampling, count = request.sampling, len(request.prompt)
        if sampling is not None:  # random numbers are in the slot, where a captured pass reads them
            slot.uniforms[0, : request.max_new_tokens] = draw_uniforms(sampling.seed, request.max_new_tokens)
            if sampling.samples_drafts:
                numbers = draw_draft_uniforms(sampling.seed, request.max_new_tokens)
                slot.draft_uniforms[0, : request.max_new_tokens] = numbers
        prefill = self.target.prefill(slot, request.prompt, request.images, run.feature_layers)
        state.cache_length.fill_(count)
        state.num_verified.fill_(1)
        first = state.output_length.zero_()[0]
        sampler = TokenSampler(sampling, slot.uniforms[0], self.logits_scale)
        state.next_tokens[0, :1] = self._sample(sampler, prefill.hidden[-1:], first)
        state.output_length.fill_(1)
        state.rope_offset.fill_(prefill.rope_offset)
        if run.proposer is not None:
            run.proposer.start(slot, request.prompt, prefill, state)
        if run.slots.active_mask is not None:
            run.slots.active_mask[index] = True
        run.active[index] = ActiveRequest(request_index, count, request.max_new_tokens)
        return DecodeStep([int(state.next_tokens[0, 0])], 0)

    def _free_slot(self, run: DecodingRun, slot: int) -> None:
        run.active[slot] = None
        run.slots.free_slots(run.state, slice(slot, slot + 1))

    def _compact_slots(self, run: DecodingRun) -> None:
        """Move the last active slots into idle ones before them."""
        active = run.active
        used = [slot for slot, a in enumerate(active) if a]
        for slot in range(len(used)):
            if active[slot] is None:
                last = used.pop()
                moved = active[slot] = active[last]
                assert moved is not None and run.slots.active_mask is not None
                run.slots.move_slot(last, slot, moved.prompt_length + moved.num_read, run.state)
                run.slots.active_mask[slot] = True
                self._free_slot(run, last)

    # Passes

    def _launch_pass(self, run: DecodingRun) -> Callable[[], list[int]]:
        """Launch a pass over all slots, on a CPU over those in use -> a function that waits for its readback."""
        used = [a for a in run.active if a]
        for a in used:
            a.num_launched += 1
        state, visible_length = run.state, run.slots.capacity
        if not self.uses_cuda_graphs:
            visible_length = max(a.prompt_length + a.num_read - 1 for a in used) + run.num_draft_tokens
            state = state if len(used) == run.slots.num_slots else state.view_slots(0, len(used))
        own_tensors: Sequence[Tensor] = ()
        if run.proposer is not None:
            run.proposer.prepare(state)
            own_tensors = run.proposer.graph_tensors
        run.slots.graphs.run(
            run.graph_key, lambda: self._run_pass(run, state, visible_length), [*run.state, *own_tensors]
        )
        return run.slots.readback.start(state.readback.flatten())

    def _read_pass(
        self, run: DecodingRun, fetch: Callable[[], list[int]], launched_for: ActiveSlots
    ) -> list[RequestUpdate]:
        """Return the steps of a pass for requests that had not finished before it; free the slots of those that finish now."""
        values, width = fetch(), run.state.readback.shape[1]
        updates: list[RequestUpdate] = []
        for slot, a in enumerate(launched_for):
            if a is None or a.finished:
                continue
            a.num_launched -= 1
            row = values[slot * width : (slot + 1) * width]
            step, cut = read_step(row, self.end_tokens, a.max_new_tokens - a.num_read)
            updates.append((a.request_index, step))
            a.num_read += len(step.tokens)
            a.finished = cut or step.tokens[-1] in self.end_tokens or a.num_read == a.max_new_tokens
            if a.finished:
                self._free_slot(run, slot)
        return updates

    def _run_pass(self, run: DecodingRun, state: DecodeState, visible_length: int) -> None:
        """Run a plain step or a cycle over the slots of `state`."""
        slots, proposer = run.slots, run.proposer
        if proposer is not None:
            readable = slots.capacity if self.uses_cuda_graphs else visible_length - run.num_draft_tokens
            tree, ids = proposer.propose(slots, state, readable)
            proposer.update(state, self._verify_and_accept(run, state, tree, ids, visible_length))
            return
        num_slots = len(state.next_tokens)
        hidden, _ = self.target.verify(
            slots, state, state.next_tokens, state.cache_length, slots.lone_roots[:num_slots], visible_length, []
        )
        state.next_tokens.copy_(self._sample_nodes(run, hidden, state.output_length))
        moved = 1 if slots.active_mask is None else slots.active_mask[:num_slots]
        state.cache_length.add_(moved)
        state.output_length.add_(moved)
        state.readback[:, 1:].copy_(state.next_tokens)

    def _verify_and_accept(
        self, run: DecodingRun, state: DecodeState, tree: DraftTree, ids: Tensor, visible_length: int
    ) -> VerifyOutput:
        """Verify trees with tokens ids [B, M], accept paths, move their rows; streams of feature layers become features."""
        slots, (num_slots, path_length) = run.slots, state.next_tokens.shape
        hidden, streams = self.target.verify(
            slots, state, ids, state.cache_length + tree.depths, tree.ancestor_mask, visible_length, run.feature_layers
        )
        target_tokens = self._sample_nodes(run, hidden, state.output_length + tree.depths, tree)  # [B, M]
        path, lengths = draft_tree.find_accepted_path(tree, target_tokens, path_length - 1)  # [B, R], [B]
        num_verified = moved = lengths[:, None]
        if slots.active_mask is not None:
            active = slots.active_mask[:num_slots]
            num_verified = 1 + (num_verified - 1) * active
            moved = num_verified * active

        rows = state.cache_length + slots.positions[:path_length]  # [B, R]
        accepted_rows = slots.locate_rows(state.cache_length + path)
        slots.target_cache.move_rows(accepted_rows.flatten(), slots.locate_rows(rows).flatten())
        if streams:
            state.features.copy_(torch.cat(streams, dim=-1)[slots.numbers[:num_slots], path])
        state.rope_positions.copy_(compute_rope_positions(rows, state.rope_offset, state.rope_positions))
        # The target's token after a node on the path is the token of the next node.
        advance_state(state, target_tokens.gather(1, path), num_verified, moved)
        return VerifyOutput(target_tokens, hidden, path)

    def _sample_nodes(self, run: DecodingRun, hidden: Tensor, indices: Tensor, tree: DraftTree | None = None) -> Tensor:
        """Return the target's tokens [B, M] after hidden states [B, M, H]; indices [B, M]: their positions in the answers.

        In a chain of sampled drafts, the token after a node is the next draft where that is accepted.
        """
        cache_rows = run.slots.locate_rows(indices)  # uniforms has a row for each cache row of a slot
        if tree is None or tree.probabilities is None:
            return self._sample(run.sampler, hidden.flatten(0, 1), cache_rows.flatten()).view_as(indices)
        coins = run.slots.draft_uniforms.flatten(0, 1)[cache_rows[:, :-1], 1]
        return run.sampler.sample_after_drafts(
            hidden @ self.lm_head.T, cache_rows, tree.tokens, tree.probabilities, coins
        )

    def _sample(self, sampler: TokenSampler, hidden: Tensor, indices: Tensor) -> Tensor:
        """Return the target's tokens [M] after hidden states [M, H]; indices [M]: their random numbers."""
        return sampler.sample(hidden @ self.lm_head.T, indices)
