"""P-EAGLE: EAGLE-3's layers draft all tokens in one pass (https://arxiv.org/abs/2602.01469, AWS; serving: vLLM from 0.16).

The first layer is EAGLE-3's (draft/eagle3.py), those above it are plain ones. What is not known yet while drafting, a token and
the target's features, is replaced in every slot after the first by the same pair, a mask token and the learned `mask_hidden`:

    slot 0 at position p:       embed(token p+1),     fc(features of p)     --layers, norm, lm_head-->    draft of token p+2
    slot d at p + d:            embed(mask token),    fc(mask_hidden)       ...                           draft of token p+2+d

    attends to          rows 0 .. p      slots 1, 2, 3
    slot 0 (row p):     1 1 1 1 . .      . . .
    slot 1:             1 1 1 1 . .      1 . .
    slot 3:             1 1 1 1 . .      1 1 1

So a slot depends on no later one, a chain is the beginning of every longer one, and given the rows all drafts are independent of
each other. Keys and values of slots are dropped after a cycle, and those of rows are of verified tokens alone: drafts are a
function of the text, as replay needs it. Layers see all positions, on one axis: vLLM refuses M-RoPE for such drafts.

Tensor names as vLLM's llama_eagle3.py loads them: EAGLE-3's, mask_hidden [1, 3H], layers.1 and up, and embed_tokens where the
draft has trained an embedding of its own; config.json names the mask token ptd_token_id (v1/spec_decode/llm_base_proposer.py).

Dimensions as in draft/eagle3.py; N requests, R rows, P positions that are drafted from, S drafts, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import DraftConfig, DraftLayer, Eagle3Draft
from stages.families.block.model import Shortlist, build_dense_attention, compute_logits
from stages.params.tree_shape import TreeShape
from stages.trees.draft_tree import check_tree

MASK_TOKEN_KEY = "ptd_token_id"

# The attention of a layer: its number, queries [..., A, E] of the rows that are asked, keys and values [..., G, E] of all rows.
LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PEagleConfig(DraftConfig):
    """EAGLE-3's sizes and options, and P-EAGLE's own."""

    num_hidden_layers: int = 1  # L
    ptd_token_id: int = 0  # the mask token
    own_embedding: bool = False  # else the target's

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        if config.get(MASK_TOKEN_KEY) is None:
            raise ValueError(f"config.json lacks {MASK_TOKEN_KEY!r}")
        return super().from_json(config)

    def check(self) -> None:
        """Raise ValueError for a draft that is not run."""
        if not 0 <= self.ptd_token_id < self.vocab_size:
            raise ValueError(f"{MASK_TOKEN_KEY} is {self.ptd_token_id}, expected a token below {self.vocab_size}")
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}, expected 1 or more")
        if self.sliding_window:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, expected none: P-EAGLE's layers see all positions"
            )
        if "mrope_section" in self.rope:
            raise ValueError(
                "rope has mrope_section, expected positions on one axis, which are all that vLLM gives P-EAGLE"
            )


class RowContext(NamedTuple):
    """The rows that slots attend to, of one request: keys and values by layer, and the last layer's normed output."""

    keys: list[Tensor]  # L tensors [1, T, G, E]
    values: list[Tensor]
    states: Tensor  # [T, H]


class PEagleDraft(Eagle3Draft):
    """Weights and operations. Its logits are over the draft vocabulary, `lm_head` times states after the final norm."""

    is_conditional = False  # no draft depends on the one before
    config: PEagleConfig

    def __init__(self, config: PEagleConfig):
        config.check()
        super().__init__(config)

    def _add_layers(self, c: DraftConfig) -> None:
        super()._add_layers(c)
        assert isinstance(c, PEagleConfig)
        self.mask_hidden = nn.Parameter(torch.zeros(1, self.fc.in_features))
        deeper = (DraftLayer(c, c.hidden_size, c.qk_norm, ("input_layernorm",)) for _ in range(1, c.num_hidden_layers))
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(deeper, 1)})
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if c.own_embedding else None

    def check_tree(self, tree: TreeShape) -> None:
        """Raise ValueError for a tree that can't be built."""
        check_tree(tree, self.config.draft_vocab_size)

    def choose_embedding(self, embedding: Tensor) -> Tensor:
        """Return the draft's own embedding [V, H], else the target's."""
        return embedding if self.embed_tokens is None else self.embed_tokens.weight

    def append_slots(self, embeds: Tensor, features: Tensor, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return embeddings and fused features [..., R + count, H] of rows and of `count` mask slots after them.

        embeds [..., R, H] of the tokens after the rows, features [..., R, 3H]; table [V, H] of `choose_embedding`.
        """
        fused, shape = self.fuse_features(features.to(self.fc.weight.dtype)), (*embeds.shape[:-2], count, -1)
        masked = table[self.config.ptd_token_id].to(embeds.dtype), self.fuse_features(self.mask_hidden)[0]
        embeds, fused = (torch.cat([x, y.expand(shape)], -2) for x, y in zip((embeds, fused), masked, strict=True))
        return embeds, fused

    def run_layers(
        self,
        embeds: Tensor,  # [..., R, H]
        fused: Tensor,  # [..., R, H]
        positions: Tensor,  # [..., R]
        attend: LayerAttention,
        select: Callable[[Tensor], Tensor] = lambda x: x,  # [..., R, *] -> the rows whose output is asked for
    ) -> Tensor:
        """Return the output [..., H] of the last layer, before the final norm."""
        stream, x, rope = fused, self.build_layer_input(embeds, fused), self.compute_rope(positions)
        for i in range(self.config.num_hidden_layers):
            layer = self.layers[str(i)] if i else self.midlayer
            assert isinstance(layer, DraftLayer)
            if i:
                x = layer.input_layernorm(stream)
            keys, values = layer.self_attn.compute_keys_values(x, rope)
            if i == self.config.num_hidden_layers - 1:
                x, stream, rope = select(x), select(stream), (select(rope[0]), select(rope[1]))
            attended = attend(i, layer.self_attn.compute_queries(x, rope), keys, values).to(stream.dtype)
            stream = layer.finish(stream, attended) if i else self.finish_layer(stream, attended)
        return stream

    def read_rows(self, embeds: Tensor, features: Tensor) -> RowContext:
        """Read the first T rows of a text: embeds [T, H] of the tokens after them, features [T, 3H]."""
        keys, values = [], []

        def attend(_i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            by_head = (t.transpose(1, 2) for t in (q, k, v))
            attended = nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
            return attended.transpose(1, 2)

        fused = self.fuse_features(features.to(self.fc.weight.dtype))
        states = self.run_layers(
            embeds[None], fused[None], torch.arange(len(embeds), device=embeds.device)[None], attend
        )
        return RowContext(keys, values, self.normalise_output(states[0]))

    def draft_from(self, context: RowContext, positions: Tensor, table: Tensor, num_drafts: int) -> Tensor:
        """Return the normed states [P, S, H] that draft from rows `positions` [P] of a context; table [V, H]."""
        first, count = context.states[positions][:, None], num_drafts - 1
        if not count or not len(positions):
            return first.expand(-1, num_drafts, -1)
        depths = torch.arange(1, num_drafts, device=positions.device)
        root, depth = positions.repeat_interleave(count), depths.repeat(len(positions))  # [Q] of each slot
        rows = torch.arange(len(context.states), device=positions.device)
        own = (root[:, None] == root) & (depth[:, None] >= depth)
        dense = build_dense_attention(torch.cat([rows <= root[:, None], own], 1)[None])

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dense(q, torch.cat([context.keys[i], k], 1), torch.cat([context.values[i], v], 1))

        none = first[:0, 0]
        embeds, fused = self.append_slots(none, none.new_zeros(0, self.fc.in_features), table, len(root))
        states = self.run_layers(embeds[None], fused[None], (root + depth)[None], attend)
        return torch.cat([first, self.normalise_output(states[0]).unflatten(0, (-1, count))], 1)

    def build_shortlist(self, logits: Tensor) -> Shortlist:
        """Return the choice of drafts by logits [..., D]: the tokens of the draft vocabulary."""
        ids = self.to_target(torch.arange(len(self.d2t), device=logits.device))
        return Shortlist(logits, ids.expand(logits.shape))

    def condition_shortlist(self, shortlist: Shortlist, _states: Tensor, _previous: Tensor) -> Tensor:
        return shortlist.logits

    def draft_greedily(self, states: Tensor, _anchors: Tensor, head: Tensor) -> Tensor:
        """Return the most probable drafts [..., S] of normed states [..., S, H]; head [D, H] is its own."""
        return self.to_target(compute_logits(states, head).argmax(-1))
