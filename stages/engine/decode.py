"""The torch engine: plain and speculative decoding of one prompt at a time, greedy or sampled, by the same machinery.

Both are generators of `DecodeStep`s, so that the caller measures time: the first step is the token from prefill, each later
one the tokens of a decoding step (plain) or a verify cycle (speculative). In float32 both yield the same tokens, also when
sampling: a draw depends on the seed and the token's position alone (engine/sampling.py).

A cycle starts with tokens up to n in the cache; token n is the bonus token:

    extend    the draft reads the rows that the last cycle verified
    expand    from the draft's state at n - 1, grow candidates; keep the best num_draft_tokens - 1 under the root (token n)
    verify    one target forward over the tree; node i attends to the prefix, its ancestors and itself
    accept    from the root, follow the target's own tokens as long as they are in the tree
    move      keep the accepted path's keys and values in the cache; its features are the draft's next input

Its shapes depend on the tree only: the path is padded to R = num_steps + 1 rows, and rows beyond it are overwritten before
a mask admits them. So a GPU captures a cycle once as a CUDA graph and replays it; the host reads the result of a cycle in
one copy while the next cycle runs. A plain step is the same with a tree of one node.

Methods other than this draft (stages/methods) propose their trees as a `Proposer`; verify, accept and move are shared, so
their output also equals plain decoding.

With images, prefill calls the multimodal model; a decoded token has the rotary position `cache index + rope_offset` on all
three axes, because an image spans fewer positions than it has tokens.

Letters: T prompt tokens, n cached tokens, M num_draft_tokens, R path length, L layers, H hidden, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.draft.eagle3 import Eagle3Draft, build_prefix_mask, compute_first_state
from stages.engine.decode_state import (
    CacheSlot,
    DecodeState,
    DecodeStep,
    PrefillOutput,
    VerifyOutput,
    advance_state,
    compute_rope_positions,
    count_scratch_rows,
    read_step,
)
from stages.engine.draft_kernels import FusedDraft
from stages.engine.kv_cache import KVCache
from stages.engine.proposer import DraftingMethod
from stages.engine.sampling import SamplingParams, TokenSampler, draw_uniforms
from stages.engine.slot_pool import SlotPool
from stages.engine.target_kernels import FusedDecoder
from stages.params.tree_shape import TreeShape
from stages.target.hooks import capture_residual_streams, tap_decoder_inputs
from stages.target.multimodal import ImagePatchesProtocol, build_multimodal_inputs, build_pixel_kwargs, is_multimodal
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates


class Engine:
    """A target, and optionally a draft, ready to decode. Raises ValueError where the draft does not fit the target."""

    def __init__(
        self,
        model: PreTrainedModel,
        end_tokens: list[int],
        feature_layers: list[int],
        draft: Eagle3Draft | None = None,
        tree_scoring: str = "sglang",  # a key of draft_tree.TREE_SCORINGS
    ):
        self.model, self.decoder, self.device = model, model.get_decoder(), model.device
        self.lm_head = model.get_output_embeddings().weight  # [V, H]
        self.embedding = model.get_input_embeddings().weight  # [V, H]
        self.end_tokens, self.feature_layers = set(end_tokens), feature_layers
        self.draft, self.tree_scoring = draft, tree_scoring
        if draft:
            self._check_draft_fits(draft)
        self.slots = SlotPool(model, draft)
        self.uses_cuda_graphs = self.slots.uses_cuda_graphs
        self.fused_decoder = self._build_fused_decoder() if self.uses_cuda_graphs else None
        self.fused_draft = (
            FusedDraft.build_if_supported(draft, self.embedding) if draft and self.uses_cuda_graphs else None
        )
        self.passes_ahead = int(self.uses_cuda_graphs)  # passes launched before the one before them is read

    def _check_draft_fits(self, draft: Eagle3Draft) -> None:
        if (draft.config.vocab_size, draft.config.hidden_size) != tuple(self.embedding.shape):
            raise ValueError(
                f"the draft is for a target of {draft.config.vocab_size} tokens and width {draft.config.hidden_size}; "
                f"this target has {self.embedding.shape[0]} and {self.embedding.shape[1]}; train a draft for it"
            )
        wanted, num_blocks = draft.fc.in_features // draft.config.hidden_size, len(self.decoder.layers)
        if len(self.feature_layers) != wanted or not all(0 <= layer < num_blocks for layer in self.feature_layers):
            raise ValueError(
                f"the draft reads {wanted} feature layers of the target, expected as many ids below {num_blocks}, its blocks; "
                f"found {self.feature_layers}; correct target.feature_layers and run prepare_target, or take the draft "
                "trained for these"
            )

    def _build_fused_decoder(self) -> FusedDecoder | None:
        """Return the target on fused kernels, or None where its architecture is not supported."""
        cache = KVCache(self.slots.kv_shapes, 8, self.model.dtype, self.device)
        return FusedDecoder.build_if_supported(self.model, cache)

    # Decoding

    @torch.inference_mode()
    def measure_margin(self, prompt: list[int], output: list[int], images: ImagePatchesProtocol | None = None) -> float:
        """Return the gap between the target's two highest logits after `prompt` and `output`."""
        count, more = len(prompt), len(output)
        with self.slots.take_slot(count + more, 0) as slot:
            prefill = self._prefill(slot, prompt, images)
            hidden = prefill.hidden[-1:]  # [1, H]
            if output:
                ids = torch.tensor([output], device=self.device)
                causal = torch.ones(1, 1, more, count + more, dtype=torch.bool, device=self.device).tril(count)
                rows = slot.positions[count : count + more]
                hidden = self._forward(slot, ids, rows[None] + prefill.rope_offset, causal, rows, count + more)[-1:]
        logits = hidden[0] @ self.lm_head.T
        first, second = logits.float().topk(2).values.tolist()
        return first - second

    @torch.inference_mode()
    def decode_plain(
        self,
        prompt: list[int],
        max_new_tokens: int,
        images: ImagePatchesProtocol | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """Yield one token a step, until an end token or `max_new_tokens`; greedy without `sampling`."""
        with self.slots.take_slot(len(prompt) + max_new_tokens, self.passes_ahead) as slot:
            sampler = self._make_sampler(slot, sampling, max_new_tokens)
            prefill = self._prefill(slot, prompt, images)
            state = self._start_state(slot, 1, prefill, sampler)

            def step(visible_length: int) -> None:
                self._run_plain_step(slot, state, sampler, visible_length)

            key = "plain", sampler.graph_key
            yield from self._run_steps(slot, state, key, step, 1, len(prompt), max_new_tokens)

    @torch.inference_mode()
    def decode_speculative(
        self,
        prompt: list[int],
        max_new_tokens: int,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        images: ImagePatchesProtocol | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """Yield prefill's token, then one step a cycle; greedy without `sampling`.

        Tokens past an end token or `max_new_tokens` are cut off, so the last cycle may come without its bonus token. Raises
        ValueError for an impossible tree, before the first token.
        """
        assert self.draft is not None
        trees.check_tree(TreeShape(num_steps, topk, num_draft_tokens), *self._get_draft_limits())
        path_length, tree = num_steps + 1, (num_steps, topk, num_draft_tokens)
        spare = count_scratch_rows(*tree) + self.passes_ahead * path_length
        with self.slots.take_slot(len(prompt) + max_new_tokens, spare) as slot:
            sampler = self._make_sampler(slot, sampling, max_new_tokens)
            with capture_residual_streams(self.model, self.feature_layers) as streams:
                prefill = self._prefill(slot, prompt, images)
            state = self._start_state(slot, path_length, prefill, sampler)
            self._prefill_draft(slot, state, prefill, self._join_features(streams))

            def cycle(visible_length: int) -> None:
                self._run_cycle(slot, state, tree, sampler, visible_length)

            key = tree, sampler.graph_key
            yield from self._run_steps(slot, state, key, cycle, num_draft_tokens, len(prompt), max_new_tokens)

    @torch.inference_mode()
    def decode_with_method(
        self,
        prompt: list[int],
        max_new_tokens: int,
        method: DraftingMethod,
        images: ImagePatchesProtocol | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """Yield steps as `decode_speculative` does, with the trees of `method`."""
        path_length, width = method.num_steps + 1, method.num_draft_tokens
        spare = max(path_length, width) + self.passes_ahead * path_length
        with self.slots.take_slot(len(prompt) + max_new_tokens, spare) as slot:
            sampler = self._make_sampler(slot, sampling, max_new_tokens)
            prefill = self._prefill(slot, prompt, images)
            state = self._start_state(slot, path_length, prefill, sampler)
            if method not in slot.proposers:
                slot.proposers[method] = method.build_proposer(slot.capacity)
            proposer = slot.proposers[method]
            proposer.start(prompt, prefill, state)

            def cycle(visible_length: int) -> None:
                readable = slot.capacity if self.uses_cuda_graphs else visible_length - width
                tree, ids = proposer.propose(state, readable)
                output = self._verify_and_accept(slot, state, tree, ids, method.num_steps, sampler, visible_length, [])
                proposer.update(state, output)

            yield from self._run_steps(
                slot,
                state,
                (proposer, sampler.graph_key),
                cycle,
                width,
                len(prompt),
                max_new_tokens,
                lambda: proposer.prepare(state),
                proposer.graph_tensors,
            )

    def _run_steps(
        self,
        slot: CacheSlot,
        state: DecodeState,
        key: Hashable,
        step: Callable[[int], None],
        num_draft_tokens: int,
        prompt_length: int,
        max_new_tokens: int,
        prepare: Callable[[], None] = lambda: None,
        graph_tensors: Sequence[Tensor] = (),
    ) -> Iterator[DecodeStep]:
        """Yield the steps after a prefill: `step`, given the visible cache length, runs one over `num_draft_tokens` nodes.

        `prepare` runs on the host before each; `graph_tensors` are changed by `step` in addition to the state.

        On a GPU a step is launched before the one before it is read: an end token is found one step late, and the tokens
        decoded past it are dropped.
        """
        bonus = int(state.next_tokens[0])
        yield DecodeStep([bonus], 0)
        num_read, launched = 1, deque[Callable[[], list[int]]]()
        while num_read < max_new_tokens and bonus not in self.end_tokens:
            while len(launched) <= self.passes_ahead and num_read + len(launched) < max_new_tokens:
                visible = slot.capacity if self.uses_cuda_graphs else prompt_length + num_read - 1 + num_draft_tokens
                prepare()
                slot.graphs.run(key, lambda: step(visible), [*state, *graph_tensors])  # noqa: B023 - called at once
                launched.append(slot.readback.start(state.readback))
            found, cut = read_step(launched.popleft()(), self.end_tokens, max_new_tokens - num_read)
            yield found
            if cut:
                return
            num_read, bonus = num_read + len(found.tokens), found.tokens[-1]

    # Passes

    def _start_state(
        self, slot: CacheSlot, path_length: int, prefill: PrefillOutput, sampler: TokenSampler
    ) -> DecodeState:
        """Return the state after a prefill: the answer's first token is chosen, the draft has the last row still to read."""
        if path_length not in slot.states:
            slot.states[path_length] = self.slots.allocate_state(path_length)
        state = slot.states[path_length]
        state.cache_length.fill_(prefill.embeds.shape[1])
        state.num_verified.fill_(1)
        state.next_tokens[:1] = self._sample(sampler, prefill.hidden[-1:], state.output_length.zero_())
        state.output_length.fill_(1)
        state.rope_offset.fill_(prefill.rope_offset)
        return state

    def _get_draft_limits(self) -> tuple[int, int | None]:
        """Return the draft's limits on trees: its vocabulary size and its sliding window."""
        assert self.draft is not None
        return self.draft.config.draft_vocab_size, self.draft.config.sliding_window

    def _forward(
        self, slot: CacheSlot, ids: Tensor, positions: Tensor, mask: Tensor, rows: Tensor, visible_length: int
    ) -> Tensor:
        """ids [1, M], positions [1, M], mask [1, 1, M, visible_length] bool, rows [M] to write -> last hidden [M, H]."""
        cache = slot.target_cache.bind(rows, visible_length)
        out = self.decoder(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        return out.last_hidden_state[0]

    def _prefill(self, slot: CacheSlot, prompt: list[int], images: ImagePatchesProtocol | None) -> PrefillOutput:
        """Read the whole prompt. Raises ValueError where it has not one token for each merged patch of its images."""
        ids = torch.tensor([prompt], device=self.device)
        count = ids.shape[1]
        rows = slot.positions[:count]
        causal = torch.ones(1, 1, count, count, dtype=torch.bool, device=ids.device).tril()
        if not is_multimodal(self.model):
            hidden = self._forward(slot, ids, rows[None], causal, rows, count)
            return PrefillOutput(hidden, self.embedding[ids], None, 0)
        inputs = build_multimodal_inputs(self.model, ["the prompt"], [torch.tensor(prompt)], [images])
        tapped: list[tuple[Tensor, Tensor]] = []
        with tap_decoder_inputs(self.model, lambda embeds, positions: tapped.append((embeds, positions))):
            out = self.model.base_model(
                input_ids=ids,
                position_ids=inputs.positions[:, None].to(ids.device),
                attention_mask=causal,
                past_key_values=slot.target_cache.bind(rows, count),
                use_cache=True,
                **build_pixel_kwargs(self.model, inputs),
            )
        (embeds, positions), rope_offset = tapped[0], int(inputs.positions.max()) + 1 - count
        return PrefillOutput(out.last_hidden_state[0], embeds, positions, rope_offset)

    def _make_sampler(self, slot: CacheSlot, sampling: SamplingParams | None, max_new_tokens: int) -> TokenSampler:
        """Return the answer's sampler; its random numbers are in the slot, where a captured pass reads them."""
        if sampling is not None:
            slot.uniforms[:max_new_tokens] = draw_uniforms(sampling.seed, max_new_tokens)
        return TokenSampler(sampling, slot.uniforms)

    def _sample(self, sampler: TokenSampler, hidden: Tensor, indices: Tensor) -> Tensor:
        """Return the target's tokens [M] after hidden states [M, H]; indices [M]: their positions in the answer."""
        return sampler.sample(hidden @ self.lm_head.T, indices)

    def _join_features(self, streams: list[Tensor]) -> Tensor:
        """Residual streams [1, T, H] of a prompt, on any device -> [T, 3H]."""
        return torch.cat([stream[0].to(self.device) for stream in streams], dim=-1)

    def _prefill_draft(self, slot: CacheSlot, state: DecodeState, prefill: PrefillOutput, features: Tensor) -> None:
        """Let the draft read the prompt, features [T, 3H], but for the last row, which the first cycle reads."""
        assert self.draft is not None
        count = len(features)
        positions = self.draft.get_rope_positions(
            slot.positions[None, :count], prefill.positions
        )  # [1, T] or [1, T, 3]
        state.features[0], state.rope_positions[0] = features[-1], positions[0, -1]
        if count > 1:
            rows = slot.positions[: count - 1]
            self._extend_draft_cache(slot, prefill.embeds[:, 1:], features[:-1], positions[:, :-1], rows)

    def _extend_draft_cache(
        self, slot: CacheSlot, embeds: Tensor, features: Tensor, positions: Tensor, rows: Tensor
    ) -> Tensor:
        """Write keys and values of rows: embeds [1, R, H] of the tokens after them, features [R, 3H] -> fused [1, R, H]."""
        draft = self.draft
        assert draft is not None
        fused = draft.fuse_features(features.to(draft.fc.weight.dtype))[None]
        keys, values = draft.compute_keys_values(draft.build_layer_input(embeds, fused), draft.compute_rope(positions))
        slot.draft_keys.index_copy_(1, rows, keys)
        slot.draft_values.index_copy_(1, rows, values)
        return fused

    def _run_plain_step(self, slot: CacheSlot, state: DecodeState, sampler: TokenSampler, visible_length: int) -> None:
        alone = slot.all_true[:, :1]
        hidden, _ = self._verify(slot, state, state.next_tokens, state.cache_length, alone, visible_length, [])
        state.next_tokens.copy_(self._sample(sampler, hidden, state.output_length))
        state.cache_length.add_(1)
        state.output_length.add_(1)
        state.readback[1:].copy_(state.next_tokens)

    def _run_cycle(
        self,
        slot: CacheSlot,
        state: DecodeState,
        shape: tuple[int, int, int],
        sampler: TokenSampler,
        visible_length: int,
    ) -> None:
        num_steps, _, num_draft_tokens = shape
        readable = slot.capacity if self.uses_cuda_graphs else visible_length - num_draft_tokens
        tree, ids = self._draft_tree(slot, state, shape, readable)
        self._verify_and_accept(slot, state, tree, ids, num_steps, sampler, visible_length, self.feature_layers)

    def _verify_and_accept(
        self,
        slot: CacheSlot,
        state: DecodeState,
        tree: trees.DraftTree,
        ids: Tensor,
        num_steps: int,
        sampler: TokenSampler,
        visible_length: int,
        layers: list[int],
    ) -> VerifyOutput:
        """Verify a tree with tokens ids [M], accept a path, move its rows; the streams entering `layers` become features."""
        depths = tree.depths[0]  # [M]
        hidden, streams = self._verify(
            slot, state, ids, state.cache_length + depths, tree.ancestor_mask[0], visible_length, layers
        )
        target_tokens = self._sample(sampler, hidden, state.output_length + depths)
        paths, num_verified = trees.find_accepted_path(tree, target_tokens[None], num_steps)
        path = paths[0]  # [R]

        rows = state.cache_length + slot.positions[: num_steps + 1]  # [R]
        slot.target_cache.move_rows(state.cache_length + path, rows)
        if streams:
            state.features.copy_(torch.cat(streams, dim=-1)[path])
        state.rope_positions.copy_(compute_rope_positions(rows, state.rope_offset, state.rope_positions))
        # The target's token after a node on the path is the token of the next node.
        advance_state(state, target_tokens[path], num_verified, num_verified)
        return VerifyOutput(target_tokens, hidden, path)

    def _draft_tree(
        self, slot: CacheSlot, state: DecodeState, shape: tuple[int, int, int], visible_length: int
    ) -> tuple[trees.DraftTree, Tensor]:
        """Let the draft read the last cycle's rows and grow a tree -> the tree and its tokens [M], the root's first."""
        draft, last = self.draft, state.num_verified - 1
        assert draft is not None
        num_steps, topk, num_draft_tokens = shape
        count = len(state.next_tokens) if self.uses_cuda_graphs else int(state.num_verified)
        tokens, features, positions = state.next_tokens[:count], state.features[:count], state.rope_positions[:count]
        rows = state.cache_length - state.num_verified + slot.positions[:count]
        if self.fused_draft is not None:
            keys, values = (x[0].transpose(0, 1) for x in (slot.draft_keys, slot.draft_values))  # [G, capacity, E]
            inputs = tokens, features, positions, last, rows, state.cache_length
            candidates = self.fused_draft.expand_candidates(*inputs, keys, values, num_steps, topk, self.tree_scoring)
        else:
            embeds = self.embedding[tokens][None]  # [1, R, H]
            fused = self._extend_draft_cache(slot, embeds, features, positions[None], rows)
            window, position = draft.config.sliding_window, (state.cache_length - 1)[None]  # [1, 1]
            sees_all = window is None and not self.uses_cuda_graphs
            mask = None if sees_all else build_prefix_mask(position, visible_length, window)
            prefix = slot.draft_keys[:, :visible_length], slot.draft_values[:, :visible_length], mask
            last_position = positions[last][None]  # [1, 1] or [1, 1, 3]
            first = compute_first_state(draft, embeds[:, last], fused[:, last], last_position, *prefix)
            candidates = expand_candidates(
                draft, self.embedding, first, last_position, *prefix, num_steps, topk, self.tree_scoring
            )
        tree = trees.build_tree(candidates, num_draft_tokens)
        return tree, torch.cat([tokens[last], tree.tokens[0]])

    def _verify(
        self,
        slot: CacheSlot,
        state: DecodeState,
        ids: Tensor,
        positions: Tensor,
        ancestor_mask: Tensor,
        visible_length: int,
        layers: list[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the target over a tree behind the cache: ids [M] at positions [M], ancestor_mask [M, M] bool.

        Returns the last hidden [M, H] and the streams [M, H] entering `layers`.
        """
        rows, positions = state.cache_length + slot.positions[: len(ids)], positions + state.rope_offset  # [M]
        if self.fused_decoder is not None:
            return self.fused_decoder.forward(
                ids, positions, ancestor_mask[None], state.cache_length, rows, slot.target_cache, layers
            )
        if self.uses_cuda_graphs:
            prefix = (slot.positions[:visible_length] < state.cache_length).repeat(len(ids), 1)  # [M, visible_length]
            mask = prefix.index_copy_(1, rows, ancestor_mask)
        elif len(ids) == 1:
            mask = slot.all_true[:, :visible_length]
        else:
            prefix = slot.all_true[:, : visible_length - len(ids)].expand(len(ids), -1)
            mask = torch.cat([prefix, ancestor_mask], dim=1)
        with capture_residual_streams(self.model, layers) as streams:
            hidden = self._forward(slot, ids[None], positions[None], mask[None, None], rows, visible_length)
        return hidden, [stream[0].to(self.device) for stream in streams]
