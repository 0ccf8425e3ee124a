"""The torch engine with several prompts at once, each at its own length: what `decode` does for one, slot by slot.

Every slot is a `decode.Room` that lies in larger tensors. A prompt is prefilled alone, in its slot; a step or a cycle is
one pass over all slots. A slot whose answer ended takes the next prompt at once, so that as many are under way as there
are slots until no more wait. Shapes are fixed as they are for one prompt, so a GPU records one pass for each number of
slots and tree; a slot without a prompt goes on in place there, and nobody reads what it says. On a CPU the slots that are
in use are kept together, and a pass is as wide as they are.

In float32 each answer is the one that `decode` gives: a pass of several rounds otherwise, but not by a token.

Letters: B slots of a pass, M num_draft_tokens, R rows, H hidden, G key-value heads, E head width.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.draft.eagle3 import build_prefix_mask, compute_first_state
from stages.engine.cuda_graphs import AsyncReadback, CudaGraphRunner
from stages.engine.decode import CACHE_SIZE_MULTIPLE, CacheSlot, DecodeState, DecodeStep, Engine
from stages.engine.kv_cache import SlottedKVCache
from stages.engine.memory_estimate import MemoryEstimate, count_weight_bytes, estimate_activation_bytes
from stages.engine.sampling import SamplingParams, TokenSampler
from stages.params.tree_sections import TreeShape
from stages.target.hooks import capture_residual_streams
from stages.target.multimodal import ImagePatchesProtocol
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates

GROUPED_ATTENTION = "aerie_grouped"  # the name of our attention in transformers' registry
TreeTuple = tuple[int, int, int]  # num_steps, topk, num_draft_tokens
RequestUpdate = tuple[int, DecodeStep | None]  # which of the asks; None: its prefill begins


class DecodeRequest(NamedTuple):
    """A prompt, and how it is answered."""

    prompt: list[int]
    max_new_tokens: int
    pictures: ImagePatchesProtocol | None = None
    sampling: SamplingParams | None = None


@dataclass(eq=False)
class ActiveRequest:
    """What a slot is decoding."""

    number: int  # of the ask
    prompt: int  # its tokens
    most: int
    done: int = 1  # tokens that were told
    sent: int = 0  # passes that were begun, and not read
    over: bool = False

    @property
    def wants(self) -> bool:
        """Whether another pass may bring a token."""
        return self.done + self.sent < self.most


@dataclass
class BatchState:
    """Where all of them have their caches, and the passes that were recorded upon them."""

    store: SlottedKVCache
    draft_keys: Tensor  # [slots, each, G, E]
    draft_values: Tensor
    numbers: Tensor  # [slots, each] float64
    starts: Tensor  # [slots, 1]: where each slot's rows begin
    awake: Tensor  # [slots, 1] bool: those in use
    rooms: list[CacheSlot]  # the slots
    stands: dict[int, DecodeState]  # by R, [slots, ...] each
    graphs: CudaGraphRunner
    mail: AsyncReadback

    @property
    def places(self) -> Tensor:
        """[each] 0, 1, 2, ..."""
        return self.rooms[0].places

    def move(self, source: int, target: int, length: int, stand: DecodeState) -> None:
        """A slot of so many rows to another."""
        rows = self.places[:length]
        self.store.move(self.starts[source] + rows, self.starts[target] + rows)
        for tensor in (self.draft_keys, self.draft_values, self.numbers, *stand):
            tensor[target] = tensor[source]


class BatchEngine(Engine):
    """An engine that decodes several prompts at once, too."""

    crowd: BatchState | None = None  # the last one, for the next

    @torch.inference_mode()
    def together(
        self, asks: Sequence[DecodeRequest], slots: int, tree: TreeTuple | None
    ) -> Iterator[list[RequestUpdate]]:
        """Answer all of `asks`, at most `slots` at once, in order; plainly without a tree. Yields whatever becomes known at once.

        Raises ValueError, before the first token, for what doesn't fit, for a tree that can't be built, and where those that
        are sampled don't share temperature, top-p and top-k.
        """
        slots = self._check(asks, slots, tree)
        if slots < 2:
            yield from self._one_by_one(asks, tree)
        else:
            yield from self._decode(asks, self._crowd(asks, slots, tree), tree)

    @torch.inference_mode()
    def prepare(self, asks: Sequence[DecodeRequest], slots: int, tree: TreeTuple | None) -> None:
        """Take the room that these need and record their pass, so that no clock sees it. Raises ValueError as `together`."""
        slots = self._check(asks, slots, tree)
        self.expect(max(len(ask.prompt) + ask.max_new_tokens for ask in asks))
        if slots > 1:
            crowd = self._crowd(asks, slots, tree)
            stand, chooser = self._begin(asks, crowd, tree)
            if self.records:
                self._pass(crowd, stand, chooser, tree, [None] * slots)
        elif self.records:
            list(self._one_by_one([asks[0]._replace(max_new_tokens=2)], tree))

    def memory(self, tokens: int, slots: int, tree: TreeTuple | None, drawn: bool = False) -> MemoryEstimate:
        """What `slots` prompts at once take, each with its answer of at most so many tokens; `drawn` above temperature 0.

        Raises ValueError for what can't be decoded, whatever the memory: so many tokens, or that tree.
        """
        self._check_one(tokens, tree)
        held = slots * self._rows(tokens, tree)
        of_draft = self._draft_bytes(held)
        cache = held * sum(g * e for both in self.shapes for g, e, _ in both) * self.model.dtype.itemsize + of_draft
        made = estimate_activation_bytes(self.model, self.draft, tokens, slots, tree, drawn)
        return MemoryEstimate(count_weight_bytes(self.model), count_weight_bytes(self.draft), cache, held, made)

    def _check(self, asks: Sequence[DecodeRequest], slots: int, tree: TreeTuple | None) -> int:
        """How many slots will be used. Raises ValueError for what can't be decoded."""
        self._check_one(max(len(ask.prompt) + ask.max_new_tokens for ask in asks), tree)
        if len({ask.sampling and ask.sampling[:3] for ask in asks}) > 1:
            raise ValueError(
                "prompts that are decoded together share temperature, top-p and top-k; decode others apart"
            )
        return min(slots, len(asks))

    def _check_one(self, tokens: int, tree: TreeTuple | None) -> None:
        self.check(tokens)
        if tree is not None:
            trees.check_tree(TreeShape(*tree), *self._draft_limits())

    def _one_by_one(self, asks: Sequence[DecodeRequest], tree: TreeTuple | None) -> Iterator[list[RequestUpdate]]:
        for number, (prompt, most, pictures, how) in enumerate(asks):
            yield [(number, None)]
            steps = (
                self.plain(prompt, most, pictures, how)
                if tree is None
                else self.speculative(prompt, most, *tree, pictures, how)
            )
            for step in steps:
                yield [(number, step)]

    def _decode(
        self, asks: Sequence[DecodeRequest], crowd: BatchState, tree: TreeTuple | None
    ) -> Iterator[list[RequestUpdate]]:
        stand, chooser = self._begin(asks, crowd, tree)
        waiting = deque(range(len(asks)))
        held: list[ActiveRequest | None] = [None] * crowd.store.slots
        sent = deque[tuple[Callable[[], list[int]], list[ActiveRequest | None]]]()
        while True:
            yield from self._fill(crowd, stand, asks, waiting, held, tree)
            if not any(held):
                return
            if not self.records:
                self._close_up(crowd, stand, held)
            while len(sent) <= self.ahead and any(h and h.wants for h in held):
                sent.append((self._pass(crowd, stand, chooser, tree, held), list(held)))
            yield self._read_back(crowd, stand, held, *sent.popleft())

    # Slots

    def _begin(
        self, asks: Sequence[DecodeRequest], crowd: BatchState, tree: TreeTuple | None
    ) -> tuple[DecodeState, TokenSampler]:
        """Every slot empty, and what chooses for all of them."""
        rows = tree[0] + 1 if tree else 1
        if rows not in crowd.stands:
            crowd.stands[rows] = self._empty_stand(rows, crowd.store.slots)
        stand = crowd.stands[rows]
        for slot, room in enumerate(crowd.rooms):
            room.stands[rows] = DecodeState(*(whole[slot] for whole in stand))
            self._leave(crowd, stand, slot)
        return stand, TokenSampler(asks[0].sampling, crowd.numbers.flatten())

    def _fill(
        self, crowd: BatchState, stand: DecodeState, asks: Sequence[DecodeRequest], waiting: deque[int], held: list[ActiveRequest | None], tree: TreeTuple | None
    ) -> Iterator[list[RequestUpdate]]:  # fmt: skip
        """The next prompts into slots without one, one by one; all of them have begun once they have a slot."""
        while waiting and (free := [slot for slot, h in enumerate(held) if h is None]):
            taken = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
            yield [(number, None) for _, number in taken]
            for slot, number in taken:
                step = self._enter_slot(crowd, crowd.rooms[slot], asks[number], len(stand.tokens[0]), tree)
                crowd.awake[slot] = True
                held[slot] = ActiveRequest(number, len(asks[number].prompt), asks[number].max_new_tokens)
                yield [(number, step)]
                if step.tokens[-1] in self.eos or asks[number].max_new_tokens == 1:
                    held[slot] = None
                    self._leave(crowd, stand, slot)

    def _enter_slot(
        self, crowd: BatchState, room: CacheSlot, ask: DecodeRequest, rows: int, tree: TreeTuple | None
    ) -> DecodeStep:
        """Prefill -> the answer's first token."""
        chooser = self._chooser(room, ask.sampling, ask.max_new_tokens)
        with capture_residual_streams(self.model, self.feature_layers if tree else []) as caught:
            begun = self._prefill(room, ask.prompt, ask.pictures)
        stand = self._stand(room, rows, begun, chooser)
        if tree:
            self._enter(room, stand, begun, self._features(caught))
        return DecodeStep([int(stand.tokens[0])], 0)

    def _leave(self, crowd: BatchState, stand: DecodeState, slot: int) -> None:
        """It stays behind its first token, so that its rows stay inside its room."""
        crowd.awake[slot] = False
        for tensor in (stand.length, stand.count):
            tensor[slot] = 1
        stand.said[slot] = 0

    def _close_up(self, crowd: BatchState, stand: DecodeState, held: list[ActiveRequest | None]) -> None:
        """The last ones in use move to slots that are not."""
        used = [slot for slot, h in enumerate(held) if h]
        for slot in range(len(used)):
            if held[slot] is None:
                last = used.pop()
                h = held[slot] = held[last]
                assert h is not None
                crowd.move(last, slot, h.prompt + h.done, stand)
                crowd.awake[slot], held[last] = True, None
                self._leave(crowd, stand, last)

    # Passes

    def _pass(
        self,
        crowd: BatchState,
        stand: DecodeState,
        chooser: TokenSampler,
        tree: TreeTuple | None,
        held: list[ActiveRequest | None],
    ) -> Callable[[], list[int]]:
        """Begin one of all slots -> what fetches what it tells."""
        width = tree[2] if tree else 1
        using = [h for h in held if h]
        for h in using:
            h.sent += 1
        count = len(held) if self.records else len(using)
        seen = crowd.store.each if self.records else max(h.prompt + h.done - 1 for h in using) + width
        whole = stand if self.records else DecodeState(*(tensor[:count] for tensor in stand))

        def work() -> None:
            if tree is None:
                self._plain_pass(crowd, whole, chooser, seen)
            else:
                self._tree_pass(crowd, whole, tree, chooser, seen)

        crowd.graphs.run((tree, chooser.kind), work, list(stand))
        return crowd.mail.send(whole.told.flatten())

    def _read_back(
        self, crowd: BatchState, stand: DecodeState, held: list[ActiveRequest | None], fetch: Callable[[], list[int]], whose: list[ActiveRequest | None]
    ) -> list[RequestUpdate]:  # fmt: skip
        """What a pass told, of those whose answers had not ended; slots of those that end with it are free."""
        numbers, each = fetch(), stand.told.shape[1]
        found: list[RequestUpdate] = []
        for slot, h in enumerate(whose):
            if h is None or h.over:
                continue
            h.sent -= 1
            accepted, *tokens = numbers[slot * each : (slot + 1) * each]
            tokens = tokens[: accepted + 1]
            committed = self._cut(tokens, h.most - h.done)
            found.append((h.number, DecodeStep(committed, min(accepted, len(committed)))))
            h.done += len(committed)
            h.over = len(committed) < len(tokens) or committed[-1] in self.eos or h.done == h.most
            if h.over:
                held[slot] = None
                self._leave(crowd, stand, slot)
        return found

    def _plain_pass(self, crowd: BatchState, stand: DecodeState, chooser: TokenSampler, seen: int) -> None:
        alone = torch.ones(len(stand.tokens), 1, 1, dtype=torch.bool, device=self.device)
        hidden, _ = self._see(crowd, stand, stand.tokens, stand.length, alone, seen, [])
        stand.tokens.copy_(self._choose_all(crowd, chooser, hidden, stand.said))
        awake = crowd.awake[: len(stand.tokens)]
        stand.length.add_(awake)
        stand.said.add_(awake)
        stand.told[:, 1:].copy_(stand.tokens)

    def _tree_pass(
        self, crowd: BatchState, stand: DecodeState, shape: TreeTuple, chooser: TokenSampler, seen: int
    ) -> None:
        """A cycle of every slot, on the device alone."""
        steps, _, width = shape
        starts, awake = (x[: len(stand.tokens)] for x in (crowd.starts, crowd.awake))  # [B, 1]
        tree, ids = self._grow_all(crowd, stand, shape, crowd.store.each if self.records else seen - width)
        layers = self.feature_layers
        hidden, streams = self._see(crowd, stand, ids, stand.length + tree.depths, tree.ancestor_mask, seen, layers)
        choices = self._choose_all(crowd, chooser, hidden, stand.said + tree.depths)  # [B, M]
        path, count = trees.find_accepted_path(tree, choices, steps)  # [B, R], [B]
        count = 1 + (count[:, None] - 1) * awake

        rows = stand.length + crowd.places[: steps + 1]  # [B, R]
        crowd.store.move((starts + stand.length + path).flatten(), (starts + rows).flatten())
        stand.features.copy_(torch.cat(streams, dim=-1).take_along_dim(path[..., None], 1))
        stand.turns.copy_(rows if stand.turns.ndim == 2 else (rows + stand.shift)[..., None].expand(*rows.shape, 3))
        stand.tokens.copy_(choices.gather(1, path))
        stand.count.copy_(count)
        stand.length.add_(count * awake)
        stand.said.add_(count * awake)
        stand.told.copy_(torch.cat([count - 1, stand.tokens], dim=1))

    def _grow_all(
        self, crowd: BatchState, stand: DecodeState, shape: TreeTuple, seen: int
    ) -> tuple[trees.DraftTree, Tensor]:
        """The draft reads the last cycles' rows and grows trees -> these and their tokens [B, M], the roots' first."""
        (steps, topk, width), draft = shape, self.draft
        assert draft is not None
        slots, rows = stand.tokens.shape
        last = stand.count - 1  # [B, 1]
        places = crowd.starts[:slots] + stand.length - stand.count + crowd.places[:rows]  # [B, R]
        if self.beams is not None:
            read = stand.tokens.flatten(), stand.features.flatten(0, 1), stand.turns.flatten(0, 1)
            at = (torch.arange(slots, device=self.device) * rows)[:, None] + last  # [B, 1] of B * R
            keys, values = (x[:slots].flatten(0, 1).transpose(0, 1) for x in (crowd.draft_keys, crowd.draft_values))
            candidates = self.beams.grow(
                *read, at[:, 0], places.flatten(), stand.length[:, 0], keys, values, steps, topk, self.semantics,
                crowd.store.each,
            )  # fmt: skip
            tree = trees.build_tree(candidates, width)
            return tree, torch.cat([stand.tokens.gather(1, last), tree.tokens], dim=1)
        embeds, fused = (
            self.embedding[stand.tokens],
            draft.fuse_features(stand.features.to(draft.fc.weight.dtype)),
        )  # [B, R, H]
        new = draft.compute_keys_values(
            draft.build_layer_input(embeds, fused), draft.compute_rope(stand.turns)
        )  # [B, R, G, E] each
        for kept, rows_of in zip((crowd.draft_keys, crowd.draft_values), new, strict=True):
            kept.flatten(0, 1).index_copy_(0, places.flatten(), rows_of.flatten(0, 1))
        keys, values = crowd.draft_keys[:slots, :seen], crowd.draft_values[:slots, :seen]
        embeds, fused = (x.take_along_dim(last[..., None], 1) for x in (embeds, fused))  # [B, 1, H]
        turns = stand.turns.take_along_dim(
            last if stand.turns.ndim == 2 else last[..., None], 1
        )  # [B, 1], or [B, 1, 3]
        allowed = build_prefix_mask(stand.length - 1, seen, draft.config.sliding_window)  # [B, 1, seen]
        state = compute_first_state(draft, embeds, fused, turns, keys, values, allowed)
        candidates = expand_candidates(
            draft, self.embedding, state, turns, keys, values, allowed, steps, topk, self.semantics
        )
        tree = trees.build_tree(candidates, width)
        return tree, torch.cat([stand.tokens.gather(1, last), tree.tokens], dim=1)

    def _see(
        self,
        crowd: BatchState,
        stand: DecodeState,
        ids: Tensor,
        places: Tensor,
        tree: Tensor,
        seen: int,
        layers: list[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """The target reads trees behind the caches: ids [B, M] at places [B, M], tree [B, M, M] of who sees whom.

        Returns the last hidden [B, M, H] and the streams [B, M, H] entering `layers`.
        """
        slots, width = ids.shape
        rows = stand.length + crowd.places[:width]  # [B, M]
        if self.blocks is not None:
            whole = (ids, places + stand.shift, crowd.starts[:slots] + rows)
            ids, places, rows = (x.flatten() for x in whole)  # [B * M]
            hidden, caught = self.blocks.forward(
                ids, places, tree, stand.length[:, 0], rows, crowd.store, layers, crowd.store.each
            )
            return hidden.unflatten(0, (slots, width)), [stream.unflatten(0, (slots, width)) for stream in caught]
        mask = (crowd.places[:seen] < stand.length)[:, None].repeat(1, width, 1)  # [B, M, seen]
        mask.scatter_(2, rows[:, None].expand(-1, width, -1), tree)
        cache = crowd.store.cache((crowd.starts[:slots] + rows).flatten(), seen)
        with capture_residual_streams(self.model, layers) as streams, use_grouped_attention(self.decoder.config):
            out = self.decoder(
                input_ids=ids, position_ids=places + stand.shift, attention_mask=mask[:, None], past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
        return out.last_hidden_state, [stream.to(self.device) for stream in streams]

    def _choose_all(self, crowd: BatchState, chooser: TokenSampler, hidden: Tensor, places: Tensor) -> Tensor:
        """The target's choices [B, M] after hidden states [B, M, H], as tokens number places [B, M] of their answers."""
        chosen = self._choose(chooser, hidden.flatten(0, 1), (crowd.starts[: len(places)] + places).flatten())
        return chosen.view_as(places)

    # Room

    def _crowd(self, asks: Sequence[DecodeRequest], slots: int, tree: TreeTuple | None) -> BatchState:
        """The last one, where it has as many slots and room enough, or a new one in its place."""
        each = self._rows(max(len(ask.prompt) + ask.max_new_tokens for ask in asks), tree)
        crowd = self.crowd
        if crowd is None or crowd.store.slots != slots or crowd.store.each < each:
            crowd = self.crowd = None  # it goes before the new one is taken
            crowd = self.crowd = self._new_crowd(slots, each)
        return crowd

    def _rows(self, tokens: int, tree: TreeTuple | None) -> int:
        """Room of a slot for a prompt and its answer of so many tokens.

        A pass writes up to `beyond` rows behind what it finds; what was begun before the one before it was read, as many
        more as that moved on.
        """
        steps, topk, width = tree or (0, 1, 1)
        beyond = max(steps + 1, width, (steps - 1) * topk) + (1 + self.ahead) * (steps + 1)
        return -(-(tokens + beyond) // CACHE_SIZE_MULTIPLE) * CACHE_SIZE_MULTIPLE

    def _new_crowd(self, slots: int, each: int) -> BatchState:
        """Raises ValueError where a GPU has less memory left than that takes."""
        like, groups, width = self._draft_cache()
        self._fits(slots * each, self._draft_bytes(slots * each))
        whole = {"dtype": torch.int64, "device": self.device}
        store = SlottedKVCache(self.shapes, slots, each, self.model.dtype, self.device)
        keys, values = (like.new_zeros(slots, each, groups, width) for _ in range(2))
        drawn = torch.zeros(slots, each, dtype=torch.float64, device=self.device)
        places, yes = torch.arange(each, **whole), torch.ones(1, each, dtype=torch.bool, device=self.device)
        graphs, mail = self._graphs(), AsyncReadback(self.device)
        rooms = [
            CacheSlot(
                each, places, yes, drawn[n], store.slot(n, last=not self.records), keys[n : n + 1], values[n : n + 1],
                graphs, mail, {}, {},
            )
            for n in range(slots)
        ]  # fmt: skip
        starts = (torch.arange(slots, **whole) * each)[:, None]
        awake = torch.zeros(slots, 1, dtype=torch.bool, device=self.device)
        return BatchState(store, keys, values, drawn, starts, awake, rooms, {}, graphs, mail)


# Attention


@contextmanager
def use_grouped_attention(config: PretrainedConfig) -> Iterator[None]:
    """Inside the block a decoder whose attention is sdpa reads each key once for all the queries of its group.

    transformers repeats keys and values for every query head where there are several queries of a prompt, the whole room of
    them: more bytes than all else that a pass over many prompts reads.
    """
    before = config._attn_implementation
    config._attn_implementation = GROUPED_ATTENTION if before == "sdpa" else before
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend_by_key_group(
    module: Any,
    query: Tensor,  # [B, heads, M, E]
    key: Tensor,  # [B, G, seen, E]
    value: Tensor,
    attention_mask: Tensor | None,  # [B, 1, M, seen] bool
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[B, M, heads, E]. The heads of a group become rows of one head, as if there were as many more queries."""
    groups, width = key.shape[1], query.shape[2]
    unknown = any(others.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "sliding_window"))
    if attention_mask is None or query.shape[1] == groups or unknown:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    rows = query.unflatten(1, (groups, -1)).flatten(2, 3)  # [B, G, heads / G * M, E]
    mask = attention_mask.repeat(1, 1, rows.shape[2] // width, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.unflatten(2, (-1, width)).flatten(1, 2).transpose(1, 2), None


AttentionInterface.register(GROUPED_ATTENTION, _attend_by_key_group)
