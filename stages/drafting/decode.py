"""The torch engine: plain and speculative decoding of one prompt at a time, greedy or sampled, by the same machinery.

Both are generators of `Step`s, so that the caller holds the clock: the first is the token from prefill, each later one
what a decoding step (plain) or a verify cycle (speculative) commits. In float32 both yield the same tokens, sampled ones
too: what is drawn depends on the seed and the token's place alone (drafting/sampling.py).

A cycle stands at "tokens up to n are in the cache, token n is the bonus token":

    expand    from the draft's state at n - 1, grow candidates; keep the best num_draft_tokens - 1 under the root (token n)
    verify    one target forward over the tree; node i sees the whole prefix, its ancestors and itself
    accept    from the root, follow the target's own choice as long as it is in the tree
    compact   keep the accepted path's keys in the cache; feed its features to the draft

With pictures, prefill enters the target where it takes pixels; what is decoded stands at its index in the cache and `shift`
more on all three axes, since a picture takes less room there than it has tokens.

Letters: T cached tokens, M num_draft_tokens, L layers, G key-value heads, E head width, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from stages.drafting import tree as trees
from stages.drafting.draft import Draft, first_state, in_sight
from stages.drafting.expand import expand
from stages.drafting.sampling import Chooser, Sampling
from stages.drafting.target import Pictures, capture, entered, look, pixels, sees


class Step(NamedTuple):
    tokens: list[int]  # committed: accepted drafts, then the bonus token unless it was cut off
    accepted: int  # how many of them are drafts


class Begun(NamedTuple):
    """A prompt in the cache."""

    hidden: Tensor  # [1, H] of its last token
    embeds: Tensor  # [1, T, H] what the decoder was given, pictures in their place
    positions: Tensor | None  # [1, T, 3] rotary positions, of a target that sees
    shift: int  # what is added to a later token's index


class _Layer(CacheLayerMixin):
    """Keys and values in one buffer of fixed room; `used` tokens of it count."""

    is_compileable = False
    is_sliding = False

    def __init__(self, room: int):
        super().__init__()
        self.room, self.used = room, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        b, g, _, e = key_states.shape
        self.keys = key_states.new_empty(b, g, self.room, e)
        self.values = value_states.new_empty(b, g, self.room, e)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, start: int, path: Tensor) -> None:
        """Of the tokens from `start` on, keep those at start + path, in that order."""
        end = start + len(path)
        self.keys[:, :, start:end] = self.keys[:, :, start + path]
        self.values[:, :, start:end] = self.values[:, :, start + path]
        self.used = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.room

    get_max_cache_shape = get_max_length  # its name in transformers 5.17


class Engine:
    """A target, and optionally a draft, ready to decode. Raises ValueError where the two can't belong together."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos: list[int],
        feature_layers: list[int],
        draft: Draft | None = None,
        semantics: str = "sglang",  # of tree.SEMANTICS
    ):
        self.model, self.decoder = model, model.get_decoder()
        self.head = model.get_output_embeddings().weight  # [V, H]
        self.embedding = model.get_input_embeddings().weight  # [V, H]
        self.eos, self.feature_layers, self.draft, self.semantics = set(eos), feature_layers, draft, semantics
        if draft and (draft.config.vocab_size, draft.config.hidden_size) != tuple(self.embedding.shape):
            raise ValueError(
                f"the draft is for a target of {draft.config.vocab_size} tokens and width {draft.config.hidden_size}; "
                f"this target has {self.embedding.shape[0]} and {self.embedding.shape[1]}; train a draft for it"
            )

    def _cache(self, room: int) -> Cache:
        limit = self.model.config.get_text_config().max_position_embeddings
        if room > limit:
            raise ValueError(
                f"prompt and answer may take {room} tokens, the target holds {limit} (max_position_embeddings); "
                "lower benchmark.workloads.*.max_new_tokens or use shorter prompts"
            )
        return Cache(layers=[_Layer(room) for _ in self.decoder.layers])

    def _forward(self, ids: Tensor, positions: Tensor, sees: Tensor, cache: Cache) -> Tensor:
        """ids [1, M], positions [1, M], sees [1, 1, M, T+M] bool -> last hidden [M, H]; the cache grows by M."""
        out = self.decoder(
            input_ids=ids, position_ids=positions, attention_mask=sees, past_key_values=cache, use_cache=True
        )
        return out.last_hidden_state[0]

    def _prefill(self, prompt: list[int], cache: Cache, pictures: Pictures | None) -> Begun:
        """The whole prompt at once. Raises ValueError where it has not one token for each piece of its pictures."""
        ids = torch.tensor([prompt], device=self.model.device)
        count = ids.shape[1]
        causal = torch.ones(1, 1, count, count, dtype=torch.bool, device=ids.device).tril()
        if not sees(self.model):
            hidden = self._forward(ids, torch.arange(count, device=ids.device)[None], causal, cache)
            return Begun(hidden[-1:], self.embedding[ids], None, 0)
        view, given = look(self.model, ["the prompt"], [torch.tensor(prompt)], [pictures]), []
        with entered(self.model, lambda embeds, positions: given.append((embeds, positions))):
            out = self.model.base_model(
                input_ids=ids, position_ids=view.positions[:, None].to(ids.device), attention_mask=causal,
                past_key_values=cache, use_cache=True, **pixels(self.model, view),
            )  # fmt: skip
        (embeds, positions), shift = given[0], int(view.positions.max()) + 1 - count
        return Begun(out.last_hidden_state[0, -1:], embeds, positions, shift)

    def _chooser(self, sampling: Sampling | None, max_new_tokens: int) -> tuple[Chooser, Tensor]:
        """What chooses the answer's tokens, and their numbers [max_new_tokens]."""
        device = self.model.device
        return Chooser(sampling, max_new_tokens, device), torch.arange(max_new_tokens, device=device)

    def _choose(self, chooser: Chooser, hidden: Tensor, places: Tensor) -> list[int]:
        """The target's choice after each hidden state [M, H], as token number places [M] of the answer."""
        return chooser.choose(hidden @ self.head.T, places).tolist()

    @torch.inference_mode()
    def margin(self, prompt: list[int], said: list[int], pictures: Pictures | None = None) -> float:
        """The gap between the target's two best logits after `prompt` and what was `said`."""
        cache, count, more = self._cache(len(prompt) + len(said)), len(prompt), len(said)
        begun = self._prefill(prompt, cache, pictures)
        hidden = begun.hidden  # [1, H]
        if said:
            ids = torch.tensor([said], device=self.model.device)
            causal = torch.ones(1, 1, more, count + more, dtype=torch.bool, device=ids.device).tril(count)
            where = torch.arange(count, count + more, device=ids.device)[None] + begun.shift
            hidden = self._forward(ids, where, causal, cache)[-1:]
        logits = hidden[0] @ self.head.T
        first, second = logits.float().topk(2).values.tolist()
        return first - second

    @torch.inference_mode()
    def plain(
        self, prompt: list[int], max_new_tokens: int, pictures: Pictures | None = None, sampling: Sampling | None = None
    ) -> Iterator[Step]:
        """Autoregressive decoding: one token a step, until an end token or `max_new_tokens`. Without `sampling`, greedy."""
        cache = self._cache(len(prompt) + max_new_tokens)
        chooser, places = self._chooser(sampling, max_new_tokens)
        begun = self._prefill(prompt, cache, pictures)
        token = self._choose(chooser, begun.hidden, places[:1])[0]
        yield Step([token], 0)
        everything = torch.ones(1, 1, 1, cache.layers[0].room, dtype=torch.bool, device=self.model.device)
        for position in range(len(prompt), len(prompt) + max_new_tokens - 1):
            if token in self.eos:
                return
            ids = torch.tensor([[token]], device=self.model.device)
            where = torch.tensor([[position + begun.shift]], device=self.model.device)
            hidden = self._forward(ids, where, everything[..., : position + 1], cache)
            done = position + 1 - len(prompt)
            token = self._choose(chooser, hidden, places[done : done + 1])[0]
            yield Step([token], 0)

    @torch.inference_mode()
    def speculative(
        self,
        prompt: list[int],
        max_new_tokens: int,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        pictures: Pictures | None = None,
        sampling: Sampling | None = None,
    ) -> Iterator[Step]:
        """Draft, verify, accept: each step after the first is one cycle. Without `sampling`, greedy.

        What passes an end token or the length limit is cut off, so the last cycle may come without its bonus token. Raises
        ValueError for a tree that can't be built, before the first token.
        """
        assert self.draft is not None
        draft, device = self.draft, self.model.device
        trees.check(num_steps, topk, num_draft_tokens, draft.config.draft_vocab_size)
        cache = self._cache(len(prompt) + max_new_tokens + num_draft_tokens)
        with capture(self.model, self.feature_layers) as caught:
            chooser, places = self._chooser(sampling, max_new_tokens)
            begun = self._prefill(prompt, cache, pictures)
            bonus = self._choose(chooser, begun.hidden, places[:1])[0]
            yield Step([bonus], 0)
            done, verified = 1, 0
            embeds = torch.cat([begun.embeds[:, 1:], self.embedding[torch.tensor([[bonus]], device=device)]], dim=1)
            positions = begun.positions
            features = torch.cat(caught, dim=-1)[0]  # [T, 3H]
            keys = values = None
            while done < max_new_tokens and bonus not in self.eos:
                # The draft reads the newly verified positions: features of p with the embedding of token p + 1.
                places = torch.arange(verified, verified + len(features), device=device)[None]
                new = draft.turning(places, positions)
                fused = draft.fuse(features.to(draft.fc.weight.dtype))[None]
                key, value = draft.keys_values(draft.mix(embeds, fused), draft.rope(new))
                keys = key if keys is None else torch.cat([keys, key], dim=1)
                values = value if values is None else torch.cat([values, value], dim=1)
                verified += len(features)
                last = new[:, -1:]
                window = draft.config.sliding_window
                p = torch.tensor([[verified - 1]], device=device)
                allowed = None if window is None else in_sight(p, verified, window)
                state = first_state(draft, embeds[:, -1:], fused[:, -1:], last, keys, values, allowed)
                grown = num_steps, topk, self.semantics
                candidates = expand(draft, self.embedding, state, last, keys, values, allowed, *grown)
                tree = trees.keep(candidates, num_draft_tokens)

                caught.clear()
                ids = torch.cat([torch.tensor([[bonus]], device=device), tree.tokens], dim=1)  # [1, M]
                prefix_seen = torch.ones(1, num_draft_tokens, verified, dtype=torch.bool, device=device)
                seen = torch.cat([prefix_seen, trees.ancestors(tree.parents)], dim=2)[:, None]
                hidden = self._forward(ids, verified + tree.depths + begun.shift, seen, cache)
                choices = self._choose(chooser, hidden, done + tree.depths[0])
                path = trees.accept(tree, torch.tensor([choices]))[0]

                bonus = choices[path[-1]]
                drafts = ids[0].tolist()
                tokens = [*(drafts[node] for node in path[1:]), bonus]
                committed = self._cut(tokens, max_new_tokens - done)
                yield Step(committed, min(len(path) - 1, len(committed)))
                done += len(committed)
                if len(committed) < len(tokens):
                    return
                index = torch.tensor(path, device=device)
                for layer in cache.layers:
                    layer.keep(verified, index)
                features = torch.cat(caught, dim=-1)[0, index]
                embeds = self.embedding[torch.tensor([tokens], device=device)]
                if positions is not None:
                    where = torch.arange(verified, verified + len(features), device=device) + begun.shift
                    positions = where[None, :, None].expand(-1, -1, 3)

    def _cut(self, tokens: list[int], room: int) -> list[int]:
        """`tokens` up to the first end token, and at most `room` of them."""
        for place, token in enumerate(tokens[:room]):
            if token in self.eos:
                return tokens[: place + 1]
        return tokens[:room]
