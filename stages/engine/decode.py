"""The torch engine: plain and speculative decoding of one prompt at a time, greedy or sampled, by the same machinery.

Both are generators of `DecodeStep`s, so that the caller holds the clock: the first is the token from prefill, each later one
what a decoding step (plain) or a verify cycle (speculative) commits. In float32 both yield the same tokens, sampled ones
too: what is drawn depends on the seed and the token's place alone (engine/sampling.py).

A cycle stands at "tokens up to n are in the cache, token n is the bonus token":

    extend    the draft reads what the last cycle verified
    expand    from the draft's state at n - 1, grow candidates; keep the best num_draft_tokens - 1 under the root (token n)
    verify    one target forward over the tree; node i sees the whole prefix, its ancestors and itself
    accept    from the root, follow the target's own choice as long as it is in the tree
    move      keep the accepted path's keys in the cache; its features are what the draft reads next

Its shapes are fixed by the tree: the path is padded to R = num_steps + 1 rows, and rows beyond it are overwritten before a
mask lets them be seen. So a GPU records a cycle once and plays it (`graphs`); what was accepted comes to the host in one
copy, which is read while the next cycle runs. A plain step is the same with a tree of one node.

Other methods than this draft (ngram, lookahead, medusa_trees, eagle_trees) propose their trees as a `Proposer`; verifying,
accepting and moving are the same, so what one says is what plain decoding says, too.

With pictures, prefill enters the target where it takes pixels; what is decoded stands at its index in the cache and `shift`
more on all three axes, since a picture takes less room there than it has tokens.

Letters: T tokens of the prompt, n cached tokens, M num_draft_tokens, R rows, L layers, H hidden, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.draft.eagle3 import Eagle3Draft, build_prefix_mask, compute_first_state
from stages.engine.cuda_graphs import AsyncReadback, CudaGraphRunner, measure_free_memory
from stages.engine.draft_kernels import FusedDraft
from stages.engine.kv_cache import KVCache, probe_kv_shapes, read_sliding_window
from stages.engine.sampling import SamplingParams, TokenSampler, draw_uniforms
from stages.engine.target_kernels import FusedDecoder
from stages.params.tree_sections import TreeShape
from stages.target.hooks import capture_residual_streams, tap_decoder_inputs
from stages.target.multimodal import ImagePatchesProtocol, build_multimodal_inputs, build_pixel_kwargs, is_multimodal
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates

CACHE_SIZE_MULTIPLE = 256  # tokens; room is taken in whole multiples, so that few prompts ask for another


class DecodeStep(NamedTuple):
    tokens: list[int]  # committed: accepted drafts, then the bonus token unless it was cut off
    accepted: int  # how many of them are drafts


class PrefillOutput(NamedTuple):
    """A prompt in the cache."""

    hidden: Tensor  # [T, H] of its tokens, after the final norm
    embeds: Tensor  # [1, T, H] what the decoder was given, pictures in their place
    positions: Tensor | None  # [1, T, 3] rotary positions, of a target that sees
    shift: int  # what is added to a later token's index


class DecodeState(NamedTuple):
    """Where a decoding stands, on the device: all that a cycle reads and changes beside keys and values."""

    length: Tensor  # [1] n: tokens in the cache
    count: Tensor  # [1] rows that the last cycle verified, of R
    said: Tensor  # [1] tokens of the answer so far: the place of the next
    tokens: Tensor  # [R] the token after each; that of the last is the bonus token
    features: Tensor  # [R, 3H]
    turns: Tensor  # [R], or [R, 3]: what turns the draft's queries and keys of these rows
    shift: Tensor  # [1]
    told: Tensor  # [1 + R] accepted drafts and the tokens, for the host


class VerifyOutput(NamedTuple):
    """What the target made of a tree."""

    choices: Tensor  # [M] its token after each node
    hidden: Tensor  # [M, H] of each node, after the final norm
    path: Tensor  # [R] the accepted nodes, the root first; of those past stand.count any


class Proposer(Protocol):
    """What gives each cycle its tree, instead of the engine's own draft: one prompt's at a time.

    `prepare` alone runs on the host; a GPU records the others once, so they are tensors of fixed shapes and keep what they
    change in `held`.
    """

    held: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Of all that is kept between cycles."""
        ...

    def begin(self, prompt: list[int], begun: PrefillOutput, stand: DecodeState) -> None:
        """The prompt is in the cache, and the answer's first token, stand.tokens[0], is known."""

    def prepare(self, stand: DecodeState) -> None:
        """Before each cycle."""

    def propose(self, stand: DecodeState, seen: int) -> tuple[trees.DraftTree, Tensor]:
        """A tree and its tokens [M], the root's first; of the cache's rows `seen` may be looked at."""
        ...

    def learn(self, stand: DecodeState, verdict: VerifyOutput) -> None:
        """The cycle is over, and `stand` behind it."""


class DraftingMethod(Protocol):
    """A way to propose trees."""

    steps: int  # most drafts that a tree has on a path
    nodes: int  # M
    weights: int  # their bytes, of those that aren't the target's
    parameters: int  # that were trained

    def proposer(self, size: int) -> Proposer:
        """For a room of `size` tokens."""
        ...


@dataclass
class CacheSlot:
    """Where one decoding at a time has its caches, and the passes that were recorded upon them."""

    size: int  # tokens
    places: Tensor  # [size] 0, 1, 2, ...
    yes: Tensor  # [1, size] bool, all true
    numbers: Tensor  # [size] float64: what the answer's tokens are drawn by
    store: KVCache
    draft_keys: Tensor  # [1, size, G, E]
    draft_values: Tensor
    graphs: CudaGraphRunner
    mail: AsyncReadback
    stands: dict[int, DecodeState]  # by R
    proposers: dict[DraftingMethod, Proposer]


class Engine:
    """A target, and optionally a draft, ready to decode. Raises ValueError where the two can't belong together."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos: list[int],
        feature_layers: list[int],
        draft: Eagle3Draft | None = None,
        semantics: str = "sglang",  # of tree.SEMANTICS
    ):
        self.model, self.decoder, self.device = model, model.get_decoder(), model.device
        self.head = model.get_output_embeddings().weight  # [V, H]
        self.embedding = model.get_input_embeddings().weight  # [V, H]
        self.eos, self.feature_layers, self.draft, self.semantics = set(eos), feature_layers, draft, semantics
        if draft and (draft.config.vocab_size, draft.config.hidden_size) != tuple(self.embedding.shape):
            raise ValueError(
                f"the draft is for a target of {draft.config.vocab_size} tokens and width {draft.config.hidden_size}; "
                f"this target has {self.embedding.shape[0]} and {self.embedding.shape[1]}; train a draft for it"
            )
        read, blocks = draft.fc.in_features // draft.config.hidden_size if draft else 0, len(self.decoder.layers)
        if draft and (len(feature_layers) != read or not all(0 <= layer < blocks for layer in feature_layers)):
            raise ValueError(
                f"the draft reads {read} feature layers of the target, expected as many ids below {blocks}, its blocks; found "
                f"{feature_layers}; correct target.feature_layers and run prepare_target, or take the draft trained for these"
            )

        self.window = read_sliding_window(model)
        self.shapes, self.idle = probe_kv_shapes(model), list[CacheSlot]()
        self.expected = (
            0  # tokens that a prompt and its answer will take at most, as far as is known: room for all at once
        )
        apart = {on for both in self.shapes for _, _, on in both} != {self.device}  # on several cards: cards.py
        self.records = CudaGraphRunner(self.device).records and not apart
        self.blocks = self._blocks() if self.records else None
        self.beams = FusedDraft.of(draft, self.embedding) if draft and self.records else None
        self.ahead = int(self.records)  # how many steps are begun before the one before is read

    def _blocks(self) -> FusedDecoder | None:
        """The target in few kernels, where it is of the build that they are made for."""
        return FusedDecoder.of(self.model, KVCache(self.shapes, 8, self.model.dtype, self.device))

    def _forward(
        self, room: CacheSlot, ids: Tensor, positions: Tensor, sees: Tensor, places: Tensor, seen: int
    ) -> Tensor:
        """ids [1, M], positions [1, M], sees [1, 1, M, seen] bool, places [M] -> last hidden [M, H]."""
        out = self.decoder(
            input_ids=ids, position_ids=positions, attention_mask=sees, past_key_values=room.store.cache(places, seen),
            use_cache=True,
        )  # fmt: skip
        return out.last_hidden_state[0]

    def _prefill(self, room: CacheSlot, prompt: list[int], pictures: ImagePatchesProtocol | None) -> PrefillOutput:
        """The whole prompt at once. Raises ValueError where it has not one token for each piece of its pictures."""
        ids = torch.tensor([prompt], device=self.device)
        count = ids.shape[1]
        places = room.places[:count]
        causal = torch.ones(1, 1, count, count, dtype=torch.bool, device=ids.device).tril()
        if not is_multimodal(self.model):
            hidden = self._forward(room, ids, places[None], causal, places, count)
            return PrefillOutput(hidden, self.embedding[ids], None, 0)
        view, given = build_multimodal_inputs(self.model, ["the prompt"], [torch.tensor(prompt)], [pictures]), []
        with tap_decoder_inputs(self.model, lambda embeds, positions: given.append((embeds, positions))):
            out = self.model.base_model(
                input_ids=ids, position_ids=view.positions[:, None].to(ids.device), attention_mask=causal,
                past_key_values=room.store.cache(places, count), use_cache=True, **build_pixel_kwargs(self.model, view),
            )  # fmt: skip
        (embeds, positions), shift = given[0], int(view.positions.max()) + 1 - count
        return PrefillOutput(out.last_hidden_state[0], embeds, positions, shift)

    def _chooser(self, room: CacheSlot, sampling: SamplingParams | None, max_new_tokens: int) -> TokenSampler:
        """What chooses the answer's tokens, by numbers that lie where a recorded pass finds them."""
        if sampling is not None:
            room.numbers[:max_new_tokens] = draw_uniforms(sampling.seed, max_new_tokens)
        return TokenSampler(sampling, room.numbers)

    def _choose(self, chooser: TokenSampler, hidden: Tensor, places: Tensor) -> Tensor:
        """The target's choice [M] after each hidden state [M, H], as token number places [M] of the answer."""
        return chooser.choose(hidden @ self.head.T, places)

    @torch.inference_mode()
    def margin(self, prompt: list[int], said: list[int], pictures: ImagePatchesProtocol | None = None) -> float:
        """The gap between the target's two best logits after `prompt` and what was `said`."""
        count, more = len(prompt), len(said)
        with self._room(count + more, 0) as room:
            begun = self._prefill(room, prompt, pictures)
            hidden = begun.hidden[-1:]  # [1, H]
            if said:
                ids = torch.tensor([said], device=self.device)
                causal = torch.ones(1, 1, more, count + more, dtype=torch.bool, device=self.device).tril(count)
                places = room.places[count : count + more]
                hidden = self._forward(room, ids, places[None] + begun.shift, causal, places, count + more)[-1:]
        logits = hidden[0] @ self.head.T
        first, second = logits.float().topk(2).values.tolist()
        return first - second

    @torch.inference_mode()
    def plain(
        self,
        prompt: list[int],
        max_new_tokens: int,
        pictures: ImagePatchesProtocol | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """Autoregressive decoding: one token a step, until an end token or `max_new_tokens`. Without `sampling`, greedy."""
        with self._room(len(prompt) + max_new_tokens, self.ahead) as room:
            chooser = self._chooser(room, sampling, max_new_tokens)
            begun = self._prefill(room, prompt, pictures)
            stand = self._stand(room, 1, begun, chooser)

            def step(seen: int) -> None:
                self._plain_step(room, stand, chooser, seen)

            key = "plain", chooser.kind
            yield from self._steps(room, stand, key, step, 1, len(prompt), max_new_tokens)

    @torch.inference_mode()
    def speculative(
        self,
        prompt: list[int],
        max_new_tokens: int,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        pictures: ImagePatchesProtocol | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """Draft, verify, accept: each step after the first is one cycle. Without `sampling`, greedy.

        What passes an end token or the length limit is cut off, so the last cycle may come without its bonus token. Raises
        ValueError for a tree that can't be built, before the first token.
        """
        assert self.draft is not None
        trees.check_tree(TreeShape(num_steps, topk, num_draft_tokens), *self._draft_limits())
        rows, shape = num_steps + 1, (num_steps, topk, num_draft_tokens)
        spare = max(rows, num_draft_tokens, (num_steps - 1) * topk) + self.ahead * rows
        with self._room(len(prompt) + max_new_tokens, spare) as room:
            chooser = self._chooser(room, sampling, max_new_tokens)
            with capture_residual_streams(self.model, self.feature_layers) as caught:
                begun = self._prefill(room, prompt, pictures)
            stand = self._stand(room, rows, begun, chooser)
            self._enter(room, stand, begun, self._features(caught))

            def cycle(seen: int) -> None:
                self._cycle(room, stand, shape, chooser, seen)

            key = shape, chooser.kind
            yield from self._steps(room, stand, key, cycle, num_draft_tokens, len(prompt), max_new_tokens)

    @torch.inference_mode()
    def proposed(
        self,
        prompt: list[int],
        max_new_tokens: int,
        method: DraftingMethod,
        pictures: ImagePatchesProtocol | None = None,
        sampling: SamplingParams | None = None,
    ) -> Iterator[DecodeStep]:
        """As `speculative`, with the trees of `method`."""
        rows = method.steps + 1
        with self._room(len(prompt) + max_new_tokens, max(rows, method.nodes) + self.ahead * rows) as room:
            chooser = self._chooser(room, sampling, max_new_tokens)
            begun = self._prefill(room, prompt, pictures)
            stand = self._stand(room, rows, begun, chooser)
            if method not in room.proposers:
                room.proposers[method] = method.proposer(room.size)
            proposer = room.proposers[method]
            proposer.begin(prompt, begun, stand)

            def cycle(seen: int) -> None:
                tree, ids = proposer.propose(stand, room.size if self.records else seen - method.nodes)
                proposer.learn(stand, self._judge(room, stand, tree, ids, method.steps, chooser, seen, []))

            key = proposer, chooser.kind
            yield from self._steps(
                room, stand, key, cycle, method.nodes, len(prompt), max_new_tokens, lambda: proposer.prepare(stand),
                proposer.held,
            )  # fmt: skip

    def _steps(
        self, room: CacheSlot, stand: DecodeState, key: Hashable, work: Callable[[int], None], width: int, count: int, most: int,
        prepare: Callable[[], None] = lambda: None, held: Sequence[Tensor] = (),
    ) -> Iterator[DecodeStep]:  # fmt: skip
        """Steps of a decoding that stands behind a prompt of `count` tokens: `work` is one, with `width` nodes.

        `prepare` comes before each, on the host; `held` is what `work` changes beside the stand.

        On a GPU the next one is begun before the last is read: an end token is found one step late, and what was decoded
        past it is dropped.
        """
        bonus = int(stand.tokens[0])
        yield DecodeStep([bonus], 0)
        done, sent = 1, deque[Callable[[], list[int]]]()
        while done < most and bonus not in self.eos:
            while len(sent) <= self.ahead and done + len(sent) < most:
                seen = room.size if self.records else count + done - 1 + width
                prepare()
                room.graphs.run(key, lambda: work(seen), [*stand, *held])  # noqa: B023 - called at once
                sent.append(room.mail.send(stand.told))
            accepted, *tokens = sent.popleft()()
            tokens = tokens[: accepted + 1]
            committed = self._cut(tokens, most - done)
            yield DecodeStep(committed, min(accepted, len(committed)))
            if len(committed) < len(tokens):
                return
            done, bonus = done + len(committed), tokens[-1]

    def check(self, tokens: int) -> None:
        """Raises ValueError where prompt and answer take more `tokens` than this target holds or this engine decodes."""
        limit, window = self.model.config.get_text_config().max_position_embeddings, self.window
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

    def expect(self, tokens: int) -> None:
        """Prompts and answers of at most so many are to come: room is taken for them at once. Raises ValueError as `check`."""
        self.check(tokens)
        self.expected = tokens

    @contextmanager
    def _room(self, tokens: int, spare: int) -> Iterator[CacheSlot]:
        """Room for prompt and answer, and for what is written beyond: an idle one, or a larger one in its place."""
        self.check(tokens)
        tokens = max(tokens, self.expected)
        room = self.idle.pop() if self.idle else None
        if room is None or room.size < tokens + spare:
            room = None  # it goes before the new one is taken
            room = self._new_room(-(-(tokens + spare) // CACHE_SIZE_MULTIPLE) * CACHE_SIZE_MULTIPLE)
        try:
            yield room
        finally:
            self.idle.append(room)

    def _features(self, caught: list[Tensor]) -> Tensor:
        """Streams [1, T, H] of a prompt, wherever their blocks lie -> [T, 3H]."""
        return torch.cat([stream[0].to(self.device) for stream in caught], dim=-1)

    def _graphs(self) -> CudaGraphRunner:
        found = CudaGraphRunner(self.device)
        found.records = self.records
        return found

    def _new_room(self, size: int) -> CacheSlot:
        """Raises ValueError where a GPU has less memory left than that takes."""
        like, groups, width = self._draft_cache()
        self._fits(size, self._draft_bytes(size))
        return CacheSlot(
            size,
            torch.arange(size, device=self.device),
            torch.ones(1, size, dtype=torch.bool, device=self.device),
            torch.zeros(size, dtype=torch.float64, device=self.device),
            KVCache(self.shapes, size, self.model.dtype, self.device, last=not self.records),
            like.new_zeros(1, size, groups, width),
            like.new_zeros(1, size, groups, width),
            self._graphs(),
            AsyncReadback(self.device),
            {},
            {},
        )

    def _draft_limits(self) -> tuple[int, int | None]:
        """What of the draft limits its trees: its vocabulary, and its sliding window."""
        assert self.draft is not None
        return self.draft.config.draft_vocab_size, self.draft.config.sliding_window

    def _draft_cache(self) -> tuple[Tensor, int, int]:
        """Of the draft's keys: what they are like, G and E."""
        if self.draft is None:
            return self.embedding, 0, 0
        c = self.draft.config
        return self.draft.fc.weight, c.num_key_value_heads, c.head_dim

    def _draft_bytes(self, tokens: int) -> int:
        """Of the draft's keys and values of so many."""
        like, groups, width = self._draft_cache()
        return 2 * tokens * groups * width * like.element_size()

    def _fits(self, size: int, drafts: int) -> None:
        """drafts: the bytes of the draft's keys and values."""
        need = sum(g * e for both in self.shapes for g, e, _ in both) * size * self.model.dtype.itemsize + drafts
        if (free := measure_free_memory(self.device)) < need:
            raise ValueError(
                f"keys and values of {size} tokens take {need / 2**30:.1f} GiB, {self.device} has {free / 2**30:.1f} GiB left; "
                "lower benchmark.workloads.*.max_new_tokens, use shorter prompts, or end what else runs there"
            )

    def _stand(self, room: CacheSlot, rows: int, begun: PrefillOutput, chooser: TokenSampler) -> DecodeState:
        """Behind the prompt, which was all verified, and the answer's first token; the draft has its last row still to read."""
        if rows not in room.stands:
            room.stands[rows] = self._empty_stand(rows)
        stand = room.stands[rows]
        stand.length.fill_(begun.embeds.shape[1])
        stand.count.fill_(1)
        stand.tokens[:1] = self._choose(chooser, begun.hidden[-1:], stand.said.zero_())
        stand.said.fill_(1)
        stand.shift.fill_(begun.shift)
        return stand

    def _empty_stand(self, rows: int, *slots: int) -> DecodeState:
        """Of one decoding, or of as many as there are slots, one behind the other."""
        whole = {"dtype": torch.int64, "device": self.device}
        axes = () if self.draft is None or self.draft.frequency_axes is None else (3,)
        width = 3 * self.embedding.shape[1]
        return DecodeState(
            length=torch.zeros(*slots, 1, **whole),
            count=torch.zeros(*slots, 1, **whole),
            said=torch.zeros(*slots, 1, **whole),
            tokens=torch.zeros(*slots, rows, **whole),
            features=torch.zeros(*slots, rows, width, dtype=self.model.dtype, device=self.device),
            turns=torch.zeros(*slots, rows, *axes, **whole),
            shift=torch.zeros(*slots, 1, **whole),
            told=torch.zeros(*slots, 1 + rows, **whole),
        )

    def _enter(self, room: CacheSlot, stand: DecodeState, begun: PrefillOutput, features: Tensor) -> None:
        """The draft reads the prompt, features [T, 3H]: all of it but the last row, which waits for the first cycle."""
        assert self.draft is not None
        count = len(features)
        turns = self.draft.get_rope_positions(room.places[None, :count], begun.positions)  # [1, T] or [1, T, 3]
        stand.features[0], stand.turns[0] = features[-1], turns[0, -1]
        if count > 1:
            self._extend(room, begun.embeds[:, 1:], features[:-1], turns[:, :-1], room.places[: count - 1])

    def _extend(self, room: CacheSlot, embeds: Tensor, features: Tensor, turns: Tensor, places: Tensor) -> Tensor:
        """The draft reads rows: embeds [1, R, H] of the tokens after them, their features [R, 3H] -> fused [1, R, H]."""
        draft = self.draft
        assert draft is not None
        fused = draft.fuse_features(features.to(draft.fc.weight.dtype))[None]
        keys, values = draft.compute_keys_values(draft.build_layer_input(embeds, fused), draft.compute_rope(turns))
        room.draft_keys.index_copy_(1, places, keys)
        room.draft_values.index_copy_(1, places, values)
        return fused

    def _plain_step(self, room: CacheSlot, stand: DecodeState, chooser: TokenSampler, seen: int) -> None:
        hidden, _ = self._verify(room, stand, stand.tokens, stand.length, room.yes[:, :1], seen, [])
        stand.tokens.copy_(self._choose(chooser, hidden, stand.said))
        stand.length.add_(1)
        stand.said.add_(1)
        stand.told[1:].copy_(stand.tokens)

    def _cycle(
        self, room: CacheSlot, stand: DecodeState, shape: tuple[int, int, int], chooser: TokenSampler, seen: int
    ) -> None:
        """One cycle, on the device alone."""
        steps, topk, width = shape
        tree, ids = self._grow(room, stand, steps, topk, width, room.size if self.records else seen - width)
        self._judge(room, stand, tree, ids, steps, chooser, seen, self.feature_layers)

    def _judge(
        self, room: CacheSlot, stand: DecodeState, tree: trees.DraftTree, ids: Tensor, steps: int, chooser: TokenSampler, seen: int,
        layers: list[int],
    ) -> VerifyOutput:  # fmt: skip
        """Verify, accept, move: a tree, its tokens [M], and the streams entering `layers` that are features."""
        depths = tree.depths[0]  # [M]
        hidden, streams = self._verify(room, stand, ids, stand.length + depths, tree.ancestor_mask[0], seen, layers)
        choices = self._choose(chooser, hidden, stand.said + depths)
        path, count = trees.find_accepted_path(tree, choices[None], steps)
        path = path[0]  # [R]

        rows = stand.length + room.places[: steps + 1]  # [R]
        room.store.move(stand.length + path, rows)
        if streams:
            stand.features.copy_(torch.cat(streams, dim=-1)[path])
        stand.turns.copy_(rows if stand.turns.ndim == 1 else (rows + stand.shift)[:, None].expand(-1, 3))
        stand.tokens.copy_(choices[path])  # what the target chose after a node is the next node's token
        stand.count.copy_(count)
        stand.length.add_(count)
        stand.said.add_(count)
        stand.told.copy_(torch.cat([count - 1, stand.tokens]))
        return VerifyOutput(choices, hidden, path)

    def _grow(
        self, room: CacheSlot, stand: DecodeState, steps: int, topk: int, width: int, seen: int
    ) -> tuple[trees.DraftTree, Tensor]:
        """The draft reads the last cycle's rows and grows a tree -> it and its tokens [M], the root's first."""
        draft, last = self.draft, stand.count - 1
        assert draft is not None
        count = len(stand.tokens) if self.records else int(stand.count)
        tokens, features, read = stand.tokens[:count], stand.features[:count], stand.turns[:count]
        places = stand.length - stand.count + room.places[:count]
        if self.beams is not None:
            keys, values = (x[0].transpose(0, 1) for x in (room.draft_keys, room.draft_values))  # [G, room, E]
            rows = tokens, features, read, last, places
            candidates = self.beams.grow(*rows, stand.length, keys, values, steps, topk, self.semantics)
            tree = trees.build_tree(candidates, width)
            return tree, torch.cat([tokens[last], tree.tokens[0]])
        embeds = self.embedding[tokens][None]  # [1, R, H]
        fused = self._extend(room, embeds, features, read[None], places)
        keys, values = room.draft_keys[:, :seen], room.draft_values[:, :seen]
        window, at = draft.config.sliding_window, (stand.length - 1)[None]  # [1, 1]
        allowed = None if window is None and not self.records else build_prefix_mask(at, seen, window)
        turns = read[last][None]  # [1, 1] or [1, 1, 3]
        state = compute_first_state(draft, embeds[:, last], fused[:, last], turns, keys, values, allowed)
        candidates = expand_candidates(
            draft, self.embedding, state, turns, keys, values, allowed, steps, topk, self.semantics
        )
        tree = trees.build_tree(candidates, width)
        return tree, torch.cat([tokens[last], tree.tokens[0]])

    def _verify(
        self,
        room: CacheSlot,
        stand: DecodeState,
        ids: Tensor,
        places: Tensor,
        tree: Tensor,
        seen: int,
        layers: list[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """The target reads a tree behind the cache: ids [M] at places [M], tree [M, M] of who sees whom.

        Returns the last hidden [M, H] and the streams [M, H] entering `layers`.
        """
        rows, positions = stand.length + room.places[: len(ids)], places + stand.shift  # [M] where they lie, and stand
        if self.blocks is not None:
            return self.blocks.forward(ids, positions, tree[None], stand.length, rows, room.store, layers)
        if self.records:
            mask = (room.places[:seen] < stand.length).repeat(len(ids), 1).index_copy_(1, rows, tree)  # [M, seen]
        elif len(ids) == 1:
            mask = room.yes[:, :seen]
        else:
            prefix = room.yes[:, : seen - len(ids)].expand(len(ids), -1)
            mask = torch.cat([prefix, tree], dim=1)
        with capture_residual_streams(self.model, layers) as streams:
            hidden = self._forward(room, ids[None], positions[None], mask[None, None], rows, seen)
        return hidden, [stream[0].to(self.device) for stream in streams]

    def _cut(self, tokens: list[int], room: int) -> list[int]:
        """`tokens` up to the first end token, and at most `room` of them."""
        for place, token in enumerate(tokens[:room]):
            if token in self.eos:
                return tokens[: place + 1]
        return tokens[:room]
