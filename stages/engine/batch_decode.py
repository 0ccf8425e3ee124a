"""The torch engine with several prompts at once, each with its own length: `decode`, slot by slot.

Every slot is a `CacheSlot` inside larger tensors. A prompt is prefilled alone, in its slot; a step or a cycle is one pass
over all slots. A slot whose answer ended takes the next prompt at once. Shapes are fixed as for one prompt, so a GPU
captures one pass for each number of slots and tree; slots without a prompt take part in it, and their results are ignored.
On a CPU the slots in use are kept contiguous, and a pass covers only these.

In float32 each answer equals that of `decode`: a wider pass rounds differently, but not enough to change a token.

Letters: B slots of a pass, M num_draft_tokens, R path length, H hidden, G key-value heads, E head width.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stages.draft.eagle3 import build_prefix_mask, compute_first_state
from stages.engine.batch_state import (
    ActiveRequest,
    ActiveSlots,
    BatchState,
    DecodeRequest,
    RequestUpdate,
    TreeTuple,
    allocate_batch_state,
)
from stages.engine.decode import Engine
from stages.engine.decode_state import (
    CacheSlot,
    DecodeState,
    DecodeStep,
    advance_state,
    compute_rope_positions,
    count_scratch_rows,
    read_step,
    round_up_capacity,
)
from stages.engine.grouped_attention import use_grouped_attention
from stages.engine.memory_estimate import MemoryEstimate, count_weight_bytes, estimate_activation_bytes
from stages.engine.sampling import TokenSampler
from stages.params.tree_shape import TreeShape
from stages.target.hooks import capture_residual_streams
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates


class BatchEngine(Engine):
    """An engine that also decodes several prompts at once."""

    batch: BatchState | None = None  # the last one, reused where it is large enough

    @torch.inference_mode()
    def decode_batch(
        self, requests: Sequence[DecodeRequest], num_slots: int, tree: TreeTuple | None
    ) -> Iterator[list[RequestUpdate]]:
        """Answer all requests in order, at most `num_slots` at once, plainly without a tree; yield updates as they arrive.

        Raises ValueError, before the first token, for prompts that don't fit, for an impossible tree, and where sampled
        requests differ in temperature, top-p or top-k.
        """
        num_slots = self._check_requests(requests, num_slots, tree)
        if num_slots < 2:
            yield from self._decode_one_by_one(requests, tree)
        else:
            yield from self._decode_slots(requests, self._get_batch(requests, num_slots, tree), tree)

    @torch.inference_mode()
    def warm_up(self, requests: Sequence[DecodeRequest], num_slots: int, tree: TreeTuple | None) -> None:
        """Allocate caches for the requests and capture their pass, outside measured time. Raises as `decode_batch`."""
        num_slots = self._check_requests(requests, num_slots, tree)
        self.slots.reserve_length(max(len(request.prompt) + request.max_new_tokens for request in requests))
        if num_slots > 1:
            batch = self._get_batch(requests, num_slots, tree)
            state, sampler = self._reset_state(requests, batch, tree)
            if self.uses_cuda_graphs:
                self._launch_pass(batch, state, sampler, tree, [None] * num_slots)
        elif self.uses_cuda_graphs:
            list(self._decode_one_by_one([requests[0]._replace(max_new_tokens=2)], tree))

    def estimate_memory(
        self, tokens: int, num_slots: int, tree: TreeTuple | None, samples: bool = False
    ) -> MemoryEstimate:
        """Return the memory for `num_slots` prompts of at most `tokens` with their answers; `samples`: above temperature 0.

        Raises ValueError for a length or a tree that can't be decoded at all.
        """
        self._check_length_and_tree(tokens, tree)
        cache_tokens = num_slots * self._count_slot_rows(tokens, tree)
        return MemoryEstimate(
            count_weight_bytes(self.model),
            count_weight_bytes(self.draft),
            self.slots.count_cache_bytes(cache_tokens),
            cache_tokens,
            estimate_activation_bytes(self.model, self.draft, tokens, num_slots, tree, samples),
        )

    def _check_requests(self, requests: Sequence[DecodeRequest], num_slots: int, tree: TreeTuple | None) -> int:
        """Return how many slots will be used. Raises ValueError for what can't be decoded."""
        self._check_length_and_tree(max(len(request.prompt) + request.max_new_tokens for request in requests), tree)
        if len({request.sampling and request.sampling[:3] for request in requests}) > 1:
            raise ValueError(
                "prompts that are decoded together share temperature, top-p and top-k; decode others apart"
            )
        return min(num_slots, len(requests))

    def _check_length_and_tree(self, tokens: int, tree: TreeTuple | None) -> None:
        self.slots.check_length(tokens)
        if tree is not None:
            trees.check_tree(TreeShape(*tree), *self._get_draft_limits())

    def _decode_one_by_one(
        self, requests: Sequence[DecodeRequest], tree: TreeTuple | None
    ) -> Iterator[list[RequestUpdate]]:
        for index, (prompt, max_new_tokens, images, sampling) in enumerate(requests):
            yield [(index, None)]
            steps = (
                self.decode_plain(prompt, max_new_tokens, images, sampling)
                if tree is None
                else self.decode_speculative(prompt, max_new_tokens, *tree, images, sampling)
            )
            for step in steps:
                yield [(index, step)]

    def _decode_slots(
        self, requests: Sequence[DecodeRequest], batch: BatchState, tree: TreeTuple | None
    ) -> Iterator[list[RequestUpdate]]:
        state, sampler = self._reset_state(requests, batch, tree)
        waiting = deque(range(len(requests)))
        active: ActiveSlots = [None] * batch.target_cache.num_slots
        launched = deque[tuple[Callable[[], list[int]], ActiveSlots]]()
        while True:
            yield from self._fill_slots(batch, state, requests, waiting, active, tree)
            if not any(active):
                return
            if not self.uses_cuda_graphs:
                self._compact_slots(batch, state, active)
            while len(launched) <= self.passes_ahead and any(a and a.needs_pass for a in active):
                launched.append((self._launch_pass(batch, state, sampler, tree, active), list(active)))
            yield self._read_pass(batch, state, active, *launched.popleft())

    # Slots

    def _reset_state(
        self, requests: Sequence[DecodeRequest], batch: BatchState, tree: TreeTuple | None
    ) -> tuple[DecodeState, TokenSampler]:
        """Free every slot -> the state of all slots and their sampler."""
        path_length = tree[0] + 1 if tree else 1
        if path_length not in batch.states:
            batch.states[path_length] = self.slots.allocate_state(path_length, batch.target_cache.num_slots)
        state = batch.states[path_length]
        for index, slot in enumerate(batch.slots):
            slot.states[path_length] = DecodeState(*(whole[index] for whole in state))
            self._free_slot(batch, state, index)
        return state, TokenSampler(requests[0].sampling, batch.uniforms.flatten())

    def _fill_slots(
        self,
        batch: BatchState,
        state: DecodeState,
        requests: Sequence[DecodeRequest],
        waiting: deque[int],
        active: ActiveSlots,
        tree: TreeTuple | None,
    ) -> Iterator[list[RequestUpdate]]:
        """Prefill waiting prompts into idle slots one by one; all of them begin as soon as they have a slot."""
        while waiting and (idle := [slot for slot, a in enumerate(active) if a is None]):
            taken = [(slot, waiting.popleft()) for slot in idle[: len(waiting)]]
            yield [(index, None) for _, index in taken]
            for slot, index in taken:
                request = requests[index]
                step = self._prefill_slot(batch.slots[slot], request, len(state.next_tokens[0]), tree)
                batch.active_mask[slot] = True
                active[slot] = ActiveRequest(index, len(request.prompt), request.max_new_tokens)
                yield [(index, step)]
                if step.tokens[-1] in self.end_tokens or request.max_new_tokens == 1:
                    active[slot] = None
                    self._free_slot(batch, state, slot)

    def _prefill_slot(
        self, slot: CacheSlot, request: DecodeRequest, path_length: int, tree: TreeTuple | None
    ) -> DecodeStep:
        """Read a prompt -> the answer's first token."""
        sampler = self._make_sampler(slot, request.sampling, request.max_new_tokens)
        with capture_residual_streams(self.model, self.feature_layers if tree else []) as streams:
            prefill = self._prefill(slot, request.prompt, request.images)
        state = self._start_state(slot, path_length, prefill, sampler)
        if tree:
            self._prefill_draft(slot, state, prefill, self._join_features(streams))
        return DecodeStep([int(state.next_tokens[0])], 0)

    def _free_slot(self, batch: BatchState, state: DecodeState, slot: int) -> None:
        """Reset a slot to one cached token, so that the rows which passes write for it stay inside its capacity."""
        batch.active_mask[slot] = False
        for tensor in (state.cache_length, state.num_verified):
            tensor[slot] = 1
        state.output_length[slot] = 0

    def _compact_slots(self, batch: BatchState, state: DecodeState, active: ActiveSlots) -> None:
        """Move the last active slots into idle ones before them."""
        used = [slot for slot, a in enumerate(active) if a]
        for slot in range(len(used)):
            if active[slot] is None:
                last = used.pop()
                moved = active[slot] = active[last]
                assert moved is not None
                batch.move_slot(last, slot, moved.prompt_length + moved.num_read, state)
                batch.active_mask[slot], active[last] = True, None
                self._free_slot(batch, state, last)

    # Passes

    def _launch_pass(
        self,
        batch: BatchState,
        state: DecodeState,
        sampler: TokenSampler,
        tree: TreeTuple | None,
        active: ActiveSlots,
    ) -> Callable[[], list[int]]:
        """Launch a pass over all slots -> a function that waits for its readback."""
        num_draft_tokens = tree[2] if tree else 1
        used = [a for a in active if a]
        for a in used:
            a.num_launched += 1
        if self.uses_cuda_graphs:
            whole, visible = state, batch.target_cache.slot_capacity
        else:
            whole = DecodeState(*(tensor[: len(used)] for tensor in state))
            visible = max(a.prompt_length + a.num_read - 1 for a in used) + num_draft_tokens

        def step() -> None:
            if tree is None:
                self._run_plain_batch(batch, whole, sampler, visible)
            else:
                self._run_cycle_batch(batch, whole, tree, sampler, visible)

        batch.graphs.run((tree, sampler.graph_key), step, list(state))
        return batch.readback.start(whole.readback.flatten())

    def _read_pass(
        self,
        batch: BatchState,
        state: DecodeState,
        active: ActiveSlots,
        fetch: Callable[[], list[int]],
        launched_for: ActiveSlots,
    ) -> list[RequestUpdate]:
        """Return the steps of a pass for requests that had not finished before it; free the slots of those that finish now."""
        values, width = fetch(), state.readback.shape[1]
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
                active[slot] = None
                self._free_slot(batch, state, slot)
        return updates

    def _run_plain_batch(
        self, batch: BatchState, state: DecodeState, sampler: TokenSampler, visible_length: int
    ) -> None:
        alone = torch.ones(len(state.next_tokens), 1, 1, dtype=torch.bool, device=self.device)
        hidden, _ = self._verify_batch(batch, state, state.next_tokens, state.cache_length, alone, visible_length, [])
        state.next_tokens.copy_(self._sample_batch(batch, sampler, hidden, state.output_length))
        active = batch.active_mask[: len(state.next_tokens)]
        state.cache_length.add_(active)
        state.output_length.add_(active)
        state.readback[:, 1:].copy_(state.next_tokens)

    def _run_cycle_batch(
        self,
        batch: BatchState,
        state: DecodeState,
        shape: TreeTuple,
        sampler: TokenSampler,
        visible_length: int,
    ) -> None:
        num_steps, _, num_draft_tokens = shape
        starts, active = (x[: len(state.next_tokens)] for x in (batch.slot_starts, batch.active_mask))  # [B, 1]
        readable = batch.target_cache.slot_capacity if self.uses_cuda_graphs else visible_length - num_draft_tokens
        tree, ids = self._draft_trees(batch, state, shape, readable)
        positions = state.cache_length + tree.depths
        hidden, streams = self._verify_batch(
            batch, state, ids, positions, tree.ancestor_mask, visible_length, self.feature_layers
        )
        target_tokens = self._sample_batch(batch, sampler, hidden, state.output_length + tree.depths)  # [B, M]
        path, num_verified = trees.find_accepted_path(tree, target_tokens, num_steps)  # [B, R], [B]
        num_verified = 1 + (num_verified[:, None] - 1) * active

        rows = state.cache_length + batch.positions[: num_steps + 1]  # [B, R]
        batch.target_cache.move_rows((starts + state.cache_length + path).flatten(), (starts + rows).flatten())
        state.features.copy_(torch.cat(streams, dim=-1).take_along_dim(path[..., None], 1))
        state.rope_positions.copy_(compute_rope_positions(rows, state.rope_offset, state.rope_positions))
        advance_state(state, target_tokens.gather(1, path), num_verified, num_verified * active)

    def _draft_trees(
        self, batch: BatchState, state: DecodeState, shape: TreeTuple, visible_length: int
    ) -> tuple[trees.DraftTree, Tensor]:
        """Let the draft read the last cycles' rows and grow trees -> the trees and their tokens [B, M], the roots' first."""
        num_steps, topk, num_draft_tokens = shape
        num_slots, path_length = state.next_tokens.shape
        last = state.num_verified - 1  # [B, 1]
        starts = batch.slot_starts[:num_slots] + state.cache_length - state.num_verified
        rows = starts + batch.positions[:path_length]  # [B, R]
        if self.fused_draft is not None:
            inputs = state.next_tokens.flatten(), state.features.flatten(0, 1), state.rope_positions.flatten(0, 1)
            first = torch.arange(num_slots, device=self.device) * path_length
            at = first[:, None] + last  # [B, 1] of B * R
            caches = batch.draft_keys, batch.draft_values
            keys, values = (x[:num_slots].flatten(0, 1).transpose(0, 1) for x in caches)
            candidates = self.fused_draft.expand_candidates(
                *inputs,
                at[:, 0],
                rows.flatten(),
                state.cache_length[:, 0],
                keys,
                values,
                num_steps,
                topk,
                self.tree_scoring,
                batch.target_cache.slot_capacity,
            )
        else:
            candidates = self._expand_unfused(batch, state, shape, rows, last, visible_length)
        tree = trees.build_tree(candidates, num_draft_tokens)
        return tree, torch.cat([state.next_tokens.gather(1, last), tree.tokens], dim=1)

    def _expand_unfused(
        self,
        batch: BatchState,
        state: DecodeState,
        shape: TreeTuple,
        rows: Tensor,  # [B, R] of the draft's cache
        last: Tensor,  # [B, 1] index of the last verified row
        visible_length: int,
    ) -> trees.Candidates:
        draft = self.draft
        assert draft is not None
        num_slots, (num_steps, topk, _) = len(last), shape
        embeds = self.embedding[state.next_tokens]  # [B, R, H]
        fused = draft.fuse_features(state.features.to(draft.fc.weight.dtype))  # [B, R, H]
        new = draft.compute_keys_values(
            draft.build_layer_input(embeds, fused), draft.compute_rope(state.rope_positions)
        )  # [B, R, G, E] each
        for kept, written in zip((batch.draft_keys, batch.draft_values), new, strict=True):
            kept.flatten(0, 1).index_copy_(0, rows.flatten(), written.flatten(0, 1))
        embeds, fused = (x.take_along_dim(last[..., None], 1) for x in (embeds, fused))  # [B, 1, H]
        index = last if state.rope_positions.ndim == 2 else last[..., None]
        positions = state.rope_positions.take_along_dim(index, 1)  # [B, 1], or [B, 1, 3]
        mask = build_prefix_mask(state.cache_length - 1, visible_length, draft.config.sliding_window)  # [B, 1, visible]
        keys, values = (x[:num_slots, :visible_length] for x in (batch.draft_keys, batch.draft_values))
        first = compute_first_state(draft, embeds, fused, positions, keys, values, mask)
        return expand_candidates(
            draft, self.embedding, first, positions, keys, values, mask, num_steps, topk, self.tree_scoring
        )

    def _verify_batch(
        self,
        batch: BatchState,
        state: DecodeState,
        ids: Tensor,
        positions: Tensor,
        ancestor_mask: Tensor,
        visible_length: int,
        layers: list[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the target over trees behind the caches: ids [B, M] at positions [B, M], ancestor_mask [B, M, M] bool.

        Returns the last hidden [B, M, H] and the streams [B, M, H] entering `layers`.
        """
        num_slots, width = ids.shape
        rows = state.cache_length + batch.positions[:width]  # [B, M] in each slot
        positions = positions + state.rope_offset
        cache_rows = batch.slot_starts[:num_slots] + rows
        if self.fused_decoder is not None:
            hidden, streams = self.fused_decoder.forward(
                ids.flatten(),
                positions.flatten(),
                ancestor_mask,
                state.cache_length[:, 0],
                cache_rows.flatten(),
                batch.target_cache,
                layers,
                batch.target_cache.slot_capacity,
            )
            return hidden.unflatten(0, (num_slots, width)), [x.unflatten(0, (num_slots, width)) for x in streams]
        mask = (batch.positions[:visible_length] < state.cache_length)[:, None].repeat(1, width, 1)  # [B, M, visible]
        mask.scatter_(2, rows[:, None].expand(-1, width, -1), ancestor_mask)
        cache = batch.target_cache.bind(cache_rows.flatten(), visible_length)
        with capture_residual_streams(self.model, layers) as streams, use_grouped_attention(self.decoder.config):
            out = self.decoder(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask[:, None],
                past_key_values=cache,
                use_cache=True,
            )
        return out.last_hidden_state, [stream.to(self.device) for stream in streams]

    def _sample_batch(self, batch: BatchState, sampler: TokenSampler, hidden: Tensor, indices: Tensor) -> Tensor:
        """Return the target's tokens [B, M] after hidden states [B, M, H]; indices [B, M]: their positions in the answers."""
        at = (batch.slot_starts[: len(indices)] + indices).flatten()
        return self._sample(sampler, hidden.flatten(0, 1), at).view_as(indices)

    # Allocation

    def _get_batch(self, requests: Sequence[DecodeRequest], num_slots: int, tree: TreeTuple | None) -> BatchState:
        """Return the last batch state where its slots are as many and large enough, else a new one in its place."""
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        capacity, batch = self._count_slot_rows(longest, tree), self.batch
        if batch is None or batch.target_cache.num_slots != num_slots or batch.target_cache.slot_capacity < capacity:
            batch = self.batch = None  # freed before the new one is allocated
            batch = self.batch = allocate_batch_state(self.slots, num_slots, capacity)
        return batch

    def _count_slot_rows(self, tokens: int, tree: TreeTuple | None) -> int:
        """Return the capacity of a slot for a prompt and its answer of `tokens`.

        A pass writes scratch rows behind the verified ones; passes launched before it was read advance as many more.
        """
        num_steps, topk, num_draft_tokens = tree or (0, 1, 1)
        scratch = count_scratch_rows(num_steps, topk, num_draft_tokens)
        return round_up_capacity(tokens + scratch + (1 + self.passes_ahead) * (num_steps + 1))
