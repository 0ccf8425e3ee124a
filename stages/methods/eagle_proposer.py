"""EAGLE's trees: static for EAGLE; for EAGLE-2, with the same weights, EAGLE-3's dynamic ones (`expand_candidates`).

Letters as in `eagle`; M num_draft_tokens, R path length, Q branches that continue, S own ancestors with self, T prefix.
"""

import torch
from torch import Tensor

from stages.draft.eagle3 import attend_prefix_and_ancestors, build_prefix_mask, compute_first_state
from stages.engine.decode_state import (
    CacheSlots,
    DecodeState,
    PrefillOutput,
    VerifyOutput,
    compute_rope_positions,
)
from stages.engine.proposer import DraftingMethod, Proposer
from stages.methods.eagle import EagleDraft
from stages.methods.static_tree import StaticTree
from stages.params.tree_shape import TreeShape
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates


class EagleMethod(DraftingMethod):
    """An EAGLE draft with a static tree, or the shape of dynamic ones.

    Raises ValueError where the tree, or the target's embedding, does not fit the draft.
    """

    def __init__(self, eagle: EagleDraft, embedding: Tensor, tree: StaticTree | TreeShape, tree_scoring: str):
        c = eagle.config
        if (c.vocab_size, c.hidden_size) != tuple(embedding.shape):
            raise ValueError(
                f"this EAGLE draft is for a target of {c.vocab_size} tokens and width {c.hidden_size}; this target has "
                f"{embedding.shape[0]} and {embedding.shape[1]}; train a draft for it"
            )
        self.eagle, self.embedding, self.tree, self.tree_scoring = eagle, embedding, tree, tree_scoring
        if isinstance(tree, TreeShape):
            trees.check_tree(tree, c.vocab_size, c.sliding_window)
        self.num_steps, self.num_draft_tokens = tree.num_steps, tree.num_draft_tokens
        self.weight_bytes = sum(x.nbytes for x in eagle.parameters())
        self.num_parameters = sum(x.numel() for x in eagle.parameters())

    def build_proposer(self, capacity: int) -> "EagleProposer":
        return EagleProposer(self, capacity)


class EagleProposer(Proposer):
    """Extends its own KV cache by the verified rows, and grows a tree from the last of them."""

    def __init__(self, method: EagleMethod, capacity: int):
        eagle, self.method = method.eagle, method
        example, c, path_length = eagle.fc.weight, eagle.config, method.num_steps + 1
        self.keys = example.new_zeros(1, capacity, c.num_key_value_heads, c.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.hidden = example.new_zeros(1, path_length, c.hidden_size)  # of the rows that the last cycle verified
        self.steps = torch.arange(path_length, device=example.device)[None]  # [1, R]
        self.rope_positions = eagle.get_rope_positions(self.steps, None).clone()  # [1, R] or [1, R, 3], same rows
        self.graph_tensors = [self.hidden, self.rope_positions]
        self.grow = _grow_static_tree if isinstance(method.tree, StaticTree) else _grow_dynamic_tree

    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        eagle, count = self.method.eagle, len(prompt)
        positions = eagle.get_rope_positions(slot.positions[None, :count], prefill.positions)[0]  # [T] or [T, 3]
        mixed = eagle.build_layer_input(prefill.embeds[0, 1:], prefill.hidden[:-1])
        keys, values = eagle.compute_keys_values(mixed, eagle.compute_rope(positions[:-1]))
        self.keys[0, : count - 1], self.values[0, : count - 1] = keys, values
        self.hidden[0, 0], self.rope_positions[0, 0] = prefill.hidden[-1], positions[-1]

    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[trees.DraftTree, Tensor]:
        method, eagle, last = self.method, self.method.eagle, (state.num_verified - 1)[0]  # [1]
        rows = (state.cache_length - state.num_verified + self.steps)[0]  # [R]
        embeds = method.embedding[state.next_tokens]  # [1, R, H]
        keys, values = eagle.compute_keys_values(
            eagle.build_layer_input(embeds, self.hidden), eagle.compute_rope(self.rope_positions)
        )
        self.keys.index_copy_(1, rows, keys)
        self.values.index_copy_(1, rows, values)
        prefix = self.keys[:, :visible_length], self.values[:, :visible_length]
        mask = build_prefix_mask(state.cache_length - 1, visible_length, None)  # [1, 1, visible_length]
        positions = self.rope_positions[:, last]  # [1, 1] or [1, 1, 3]
        first = compute_first_state(eagle, embeds[:, last], self.hidden[:, last], positions, *prefix, mask)
        tree = self.grow(method, first, positions, *prefix, mask)
        return tree, torch.cat([state.next_tokens[:, last], tree.tokens], dim=1)

    def update(self, state: DecodeState, output: VerifyOutput) -> None:
        self.hidden.copy_(output.hidden[:, output.path[0]])
        rows = state.cache_length - state.num_verified + self.steps
        self.rope_positions.copy_(compute_rope_positions(rows, state.rope_offset, self.rope_positions))

    def count_state_bytes(self, slots: CacheSlots) -> int:
        return sum(t.nbytes for t in (self.keys, self.values, *self.graph_tensors))


def _grow_dynamic_tree(
    method: EagleMethod, state: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> trees.DraftTree:
    tree, prefix = method.tree, (state, positions, keys, values, mask)
    assert isinstance(tree, TreeShape)
    candidates = expand_candidates(
        method.eagle, method.embedding, *prefix, tree.num_steps, tree.topk, method.tree_scoring
    )
    return trees.build_tree(candidates, tree.num_draft_tokens)


def _grow_static_tree(
    method: EagleMethod, state: Tensor, positions: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> trees.DraftTree:
    """Grow the tree depth by depth; the draft runs only for branches that continue.

    state [1, 1, H] of step 0, positions [1, 1] or [1, 1, 3], keys and values [1, T, G, E] of the prefix, mask [1, 1, T].
    """
    eagle, static = method.eagle, method.tree
    assert isinstance(static, StaticTree)
    states, own_k, own_v = state[0], None, None  # [Q, H] and [Q, S, G, E] of the branches above
    tokens: list[Tensor] = []
    for depth, level in enumerate(static.levels, 1):
        ranked = trees.select_topk(eagle.logits(states).float(), static.num_ranks)[1]  # [Q, num_ranks]
        tokens.append(ranked[level.parent, level.rank])
        if depth == static.num_steps:
            break
        above = level.parent[level.continues]  # [Q] parents of the branches that continue
        mixed = eagle.build_layer_input(method.embedding[tokens[-1][level.continues]], states[above])  # [Q, H]
        rope = eagle.compute_rope(positions[0] + depth)
        key, value = (x[:, None] for x in eagle.compute_keys_values(mixed, rope))
        own_k = key if own_k is None else torch.cat([own_k[above], key], dim=1)
        own_v = value if own_v is None else torch.cat([own_v[above], value], dim=1)
        visible = mask.expand(-1, len(above), -1)
        attended = attend_prefix_and_ancestors(
            eagle.compute_queries(mixed, rope)[None], keys, values, visible, own_k[None], own_v[None]
        )[0]
        states = eagle.finish_layer(mixed, attended)
    return static.with_tokens(torch.cat(tokens))
