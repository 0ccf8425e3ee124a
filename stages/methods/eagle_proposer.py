"""EAGLE's trees: EAGLE with a static one (`static`), EAGLE-2 the same weights with EAGLE-3's dynamic one (`expand_candidates`, which
takes an Eagle for a Draft).

Letters as in `eagle`; M nodes, R rows that a cycle verified, Q branches that go on, S own ancestors with self.
"""

import torch
from torch import Tensor

from stages.draft.eagle3 import attend_prefix_and_ancestors, build_prefix_mask, compute_first_state
from stages.engine.decode import DecodeState, PrefillOutput, VerifyOutput
from stages.methods.eagle import EagleDraft
from stages.methods.static_tree import StaticTree
from stages.params.tree_sections import TreeShape
from stages.trees import draft_tree as trees
from stages.trees.expansion import expand_candidates


class EagleMethod:
    """A Method: an Eagle with its tree, static or (steps, topk, tokens) of a dynamic one. Raises ValueError where they, or
    Eagle and target, can't belong together.
    """

    def __init__(self, eagle: EagleDraft, embedding: Tensor, tree: StaticTree | tuple[int, int, int], semantics: str):
        c = eagle.config
        if (c.vocab_size, c.hidden_size) != tuple(embedding.shape):
            raise ValueError(
                f"this EAGLE draft is for a target of {c.vocab_size} tokens and width {c.hidden_size}; this target has "
                f"{embedding.shape[0]} and {embedding.shape[1]}; train a draft for it"
            )
        self.eagle, self.embedding, self.tree, self.semantics = eagle, embedding, tree, semantics
        if isinstance(tree, StaticTree):
            self.steps, self.nodes = tree.steps, tree.nodes
        else:
            trees.check_tree(TreeShape(*tree), c.vocab_size, c.sliding_window)
            self.steps, self.nodes = tree[0], tree[2]
        self.weights = sum(x.nbytes for x in eagle.parameters())
        self.parameters = sum(x.numel() for x in eagle.parameters())

    def proposer(self, size: int) -> "EagleProposer":
        return EagleProposer(self, size)


class EagleProposer:
    """Reads what was verified into keys and values of its own, and grows a tree from the last of it."""

    def __init__(self, method: EagleMethod, size: int):
        eagle, self.method = method.eagle, method
        like, c = eagle.fc.weight, eagle.config
        self.keys = like.new_zeros(1, size, c.num_key_value_heads, c.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.hidden = like.new_zeros(method.steps + 1, c.hidden_size)  # [R, H] of the rows that the last cycle verified
        self.places = torch.arange(size, device=like.device)
        self.turns = eagle.get_rope_positions(
            self.places[: method.steps + 1], None
        ).clone()  # [R] or [R, 3] of those rows
        self.held = [self.hidden, self.turns]
        self.grow = _grow_static_tree if isinstance(method.tree, StaticTree) else _grow_dynamic_tree

    def begin(self, prompt: list[int], begun: PrefillOutput, stand: DecodeState) -> None:
        eagle, count = self.method.eagle, len(prompt)
        turns = eagle.get_rope_positions(self.places[None, :count], begun.positions)[0]  # [T] or [T, 3]
        mixed = eagle.build_layer_input(begun.embeds[0, 1:], begun.hidden[:-1])
        keys, values = eagle.compute_keys_values(mixed, eagle.compute_rope(turns[:-1]))
        self.keys[0, : count - 1], self.values[0, : count - 1] = keys, values
        self.hidden[0], self.turns[0] = begun.hidden[-1], turns[-1]

    def prepare(self, stand: DecodeState) -> None:
        """Nothing is looked up."""

    def propose(self, stand: DecodeState, seen: int) -> tuple[trees.DraftTree, Tensor]:
        method, eagle, last = self.method, self.method.eagle, stand.count - 1
        rows = stand.length - stand.count + self.places[: len(self.hidden)]  # [R]
        embeds = method.embedding[stand.tokens]  # [R, H]
        keys, values = eagle.compute_keys_values(
            eagle.build_layer_input(embeds, self.hidden), eagle.compute_rope(self.turns)
        )
        self.keys.index_copy_(1, rows, keys[None])
        self.values.index_copy_(1, rows, values[None])
        prefix = self.keys[:, :seen], self.values[:, :seen]
        allowed = build_prefix_mask((stand.length - 1)[None], seen, None)  # [1, 1, seen]
        turns = self.turns[last][None]  # [1, 1] or [1, 1, 3]
        state = compute_first_state(eagle, embeds[last][None], self.hidden[last][None], turns, *prefix, allowed)
        tree = self.grow(method, state, turns, *prefix, allowed)
        return tree, torch.cat([stand.tokens[last], tree.tokens[0]])

    def learn(self, stand: DecodeState, verdict: VerifyOutput) -> None:
        self.hidden.copy_(verdict.hidden[verdict.path])
        rows = stand.length - stand.count + self.places[: len(self.hidden)]
        self.turns.copy_(rows if self.turns.ndim == 1 else (rows + stand.shift)[:, None].expand(-1, 3))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.keys, self.values, *self.held))


def _grow_dynamic_tree(
    method: EagleMethod, state: Tensor, turns: Tensor, keys: Tensor, values: Tensor, allowed: Tensor
) -> trees.DraftTree:
    assert not isinstance(method.tree, StaticTree)
    steps, topk, width = method.tree
    prefix = state, turns, keys, values, allowed
    return trees.build_tree(
        expand_candidates(method.eagle, method.embedding, *prefix, steps, topk, method.semantics), width
    )


def _grow_static_tree(
    method: EagleMethod, state: Tensor, turns: Tensor, keys: Tensor, values: Tensor, allowed: Tensor
) -> trees.DraftTree:
    """Depth by depth; a branch that ends is not asked.

    state [1, 1, H] of step 0, turns [1, 1] or [1, 1, 3], keys and values [1, T, G, E] of the prefix, allowed [1, 1, T].
    """
    eagle, static = method.eagle, method.tree
    assert isinstance(static, StaticTree)
    states, own_k, own_v = state[0], None, None  # [Q, H] and [Q, S, G, E] of the branches above
    tokens: list[Tensor] = []
    for depth, level in enumerate(static.levels, 1):
        ranked = trees.select_topk(eagle.logits(states).float(), static.widest)[1]  # [Q, widest]
        tokens.append(ranked[level.above, level.rank])
        if depth == static.steps:
            break
        above = level.above[level.inner]  # [Q] of the branches that go on
        mixed = eagle.build_layer_input(method.embedding[tokens[-1][level.inner]], states[above])  # [Q, H]
        rope = eagle.compute_rope(turns[0] + depth)
        key, value = (x[:, None] for x in eagle.compute_keys_values(mixed, rope))
        own_k = key if own_k is None else torch.cat([own_k[above], key], dim=1)
        own_v = value if own_v is None else torch.cat([own_v[above], value], dim=1)
        seen = allowed.expand(-1, len(above), -1)
        attended = attend_prefix_and_ancestors(
            eagle.compute_queries(mixed, rope)[None], keys, values, seen, own_k[None], own_v[None]
        )[0]
        states = eagle.finish_layer(mixed, attended)
    return static.tree(torch.cat(tokens))
