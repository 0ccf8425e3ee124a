"""EAGLE: one decoder layer that guesses the target's next hidden state (https://arxiv.org/abs/2401.15077, 2406.16858).

    position p:   embed(token p+1), last hidden of p   --fc, layer-->   hidden guessed of p+1   --head-->   guess for p+2
    one step on:  embed(guess),     that hidden        --fc, layer-->   ...                                 guess for p+3

It reads the target's last hidden state, after the final norm, and has neither that state's norm nor a head of its own; its
layer has no norm before the attention. Taught: SmoothL1 to the target's hidden state of p+1, and a tenth of the soft
cross-entropy of what the two make of the target's head; one step, on the target's own hidden states, without the
authors' noise on them. EAGLE decodes with a static tree (`static`), EAGLE-2 the same weights with EAGLE-3's dynamic one
(`expand`, which takes an Eagle for a Draft).

Letters as in `draft`; P taught positions, L steps, M nodes, R rows.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from stages.drafting import heads, sight, ttt
from stages.drafting import tree as trees
from stages.drafting.decode import Begun, Stand, Verdict
from stages.drafting.draft import MLP, Draft, DraftConfig, RMSNorm, attend, first_state, in_sight, inverse_frequency
from stages.drafting.expand import expand
from stages.drafting.mrope import axes
from stages.drafting.static import Static

CROSS_ENTROPY = 0.1  # its weight, beside SmoothL1's 1


class Eagle(Draft):
    """As a Draft, over the target's whole vocabulary; `head` [V, H] is the target's, and nobody's weight."""

    def __init__(self, config: DraftConfig, head: Tensor):
        nn.Module.__init__(self)
        c = self.config = config
        self.head = (head,)  # in a tuple it is no part of the module
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size)
        self.midlayer = nn.Module()
        self.midlayer.self_attn = nn.Module()
        for name, heads_ in (("q", c.num_attention_heads), ("k", c.num_key_value_heads), ("v", c.num_key_value_heads)):
            linear = nn.Linear(c.hidden_size, heads_ * c.head_dim, bias=False)
            self.midlayer.self_attn.add_module(f"{name}_proj", linear)
        self.midlayer.self_attn.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.midlayer.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.midlayer.mlp = MLP(c)
        self.register_buffer("inverse_frequency", inverse_frequency(c.rope, c.head_dim), persistent=False)
        self.register_buffer("axes", axes(c.rope, c.head_dim), persistent=False)

    @classmethod
    def fresh(cls, config: DraftConfig, head: Tensor, seed: int) -> "Eagle":
        """Untrained: drawn from the seed, the fusion such that the guess for p+1 begins near the hidden state of p."""
        torch.manual_seed(seed)
        made = cls(config, head)
        with torch.no_grad():
            for name, weight in made.named_parameters():
                if weight.ndim == 2:
                    nn.init.normal_(weight, std=0.02)
                if name == "fc.weight":
                    weight[:, config.hidden_size :] += torch.eye(config.hidden_size)
            made.fc.bias.zero_()
        return made

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def mix(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([embeds, hidden], dim=-1))  # [..., H]

    def residual(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        return mixed

    def readout(self, state: Tensor) -> Tensor:
        return state

    def logits(self, state: Tensor) -> Tensor:
        return state @ self.head[0].T

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def unroll(eagle: Eagle, pack: ttt.Pack, embedding: Tensor, steps: int) -> list[Tensor]:
    """`steps` steps from every asked position, fed with the row's own tokens and their own earlier states -> [P_k, H] each."""
    last = pack.last.to(eagle.fc.weight.dtype)
    turning = eagle.turning(pack.place, pack.positions)
    ids = nn.functional.pad(pack.ids, (0, steps + 1))
    mixed = eagle.mix(ttt.embeddings(pack, ids, embedding, slice(1, len(pack.ids) + 1)), last)
    visible = sight.of(pack, *eagle.keys_values(mixed, eagle.rope(turning)), None)
    hidden = last.index_select(0, pack.asked)  # [P, H]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    states: list[Tensor] = []
    for k, width in enumerate(pack.widths[:steps]):
        asked = pack.asked[:width]
        mixed = eagle.mix(ttt.embeddings(pack, ids, embedding, asked + 1 + k), hidden[:width])
        rope = eagle.rope(turning[asked] + k)
        if k:  # of step 0 it is the prefix's of p
            key, value = eagle.keys_values(mixed, rope)
            own_keys, own_values = [x[:width] for x in own_keys] + [key], [x[:width] for x in own_values] + [value]
        attended = visible.attend(eagle.queries(mixed, rope), own_keys, own_values)
        hidden = eagle.finish(mixed, attended.to(mixed.dtype))
        states.append(hidden)
    return states


def forward(
    eagle: Eagle, pack: ttt.Pack, embedding: Tensor, head: Tensor, objective: ttt.Objective, counts: Tensor | None = None
) -> ttt.Result:  # fmt: skip
    """As ttt.forward, of one step."""
    assert objective.steps == 1
    if not pack.chunks:
        return ttt.nothing(eagle, pack, 1)
    (states,) = unroll(eagle, pack, embedding, 1)
    share = 1 / (torch.tensor(pack.counts, device=head.device) if counts is None else counts).clamp(min=1)  # [1]
    all_ids = torch.zeros(len(head), dtype=torch.int64, device=head.device)
    view = SimpleNamespace(
        readout=eagle.readout, lm_head=SimpleNamespace(weight=head), d2t=all_ids, t2d=torch.ones_like(all_ids).bool()
    )
    total, loss, hits = heads.chunked(view, [states], pack, head, CROSS_ENTROPY * share, objective.loss)
    wanted = pack.last[pack.asked + 1].to(states.dtype)  # of the position guessed
    near = nn.functional.smooth_l1_loss(states, wanted, reduction="none").mean(-1).float().sum()
    return ttt.Result(total + near * share[0], CROSS_ENTROPY * loss + near.detach(), hits)


def guesses(eagle: Eagle, pack: ttt.Pack, embedding: Tensor, head: Tensor, steps: int, count: int) -> list[Tensor]:
    """Of each step its best `count` ids [P_k, count], where the row's own tokens led there."""
    states = unroll(eagle, pack, embedding, steps)
    return [trees.best((state @ head.T).float(), count)[1] for state in states]


class Guessing:
    """A Method: an Eagle with its tree, static or (steps, topk, tokens) of a dynamic one. Raises ValueError where they, or
    Eagle and target, can't belong together.
    """

    def __init__(self, eagle: Eagle, embedding: Tensor, tree: Static | tuple[int, int, int], semantics: str):
        c = eagle.config
        if (c.vocab_size, c.hidden_size) != tuple(embedding.shape):
            raise ValueError(
                f"this EAGLE draft is for a target of {c.vocab_size} tokens and width {c.hidden_size}; this target has "
                f"{embedding.shape[0]} and {embedding.shape[1]}; train a draft for it"
            )
        self.eagle, self.embedding, self.tree, self.semantics = eagle, embedding, tree, semantics
        if isinstance(tree, Static):
            self.steps, self.nodes = tree.steps, tree.nodes
        else:
            trees.check(*tree, c.vocab_size)
            self.steps, self.nodes = tree[0], tree[2]
        self.weights = sum(x.nbytes for x in eagle.parameters())
        self.parameters = sum(x.numel() for x in eagle.parameters())

    def proposer(self, size: int) -> "Guesser":
        return Guesser(self, size)


class Guesser:
    """Reads what was verified into keys and values of its own, and grows a tree from the last of it."""

    def __init__(self, method: Guessing, size: int):
        eagle, self.method = method.eagle, method
        like, c = eagle.fc.weight, eagle.config
        self.keys = like.new_zeros(1, size, c.num_key_value_heads, c.head_dim)
        self.values = torch.zeros_like(self.keys)
        self.hidden = like.new_zeros(method.steps + 1, c.hidden_size)  # [R, H] of the rows that the last cycle verified
        self.places = torch.arange(size, device=like.device)
        self.turns = eagle.turning(self.places[: method.steps + 1], None).clone()  # [R] or [R, 3] of those rows
        self.held = [self.hidden, self.turns]
        self.grow = _grow_static if isinstance(method.tree, Static) else _grow_dynamic

    def begin(self, prompt: list[int], begun: Begun, stand: Stand) -> None:
        eagle, count = self.method.eagle, len(prompt)
        turns = eagle.turning(self.places[None, :count], begun.positions)[0]  # [T] or [T, 3]
        mixed = eagle.mix(begun.embeds[0, 1:], begun.hidden[:-1])
        keys, values = eagle.keys_values(mixed, eagle.rope(turns[:-1]))
        self.keys[0, : count - 1], self.values[0, : count - 1] = keys, values
        self.hidden[0], self.turns[0] = begun.hidden[-1], turns[-1]

    def prepare(self, stand: Stand) -> None:
        """Nothing is looked up."""

    def propose(self, stand: Stand, seen: int) -> tuple[trees.Tree, Tensor]:
        method, eagle, last = self.method, self.method.eagle, stand.count - 1
        rows = stand.length - stand.count + self.places[: len(self.hidden)]  # [R]
        embeds = method.embedding[stand.tokens]  # [R, H]
        keys, values = eagle.keys_values(eagle.mix(embeds, self.hidden), eagle.rope(self.turns))
        self.keys.index_copy_(1, rows, keys[None])
        self.values.index_copy_(1, rows, values[None])
        prefix = self.keys[:, :seen], self.values[:, :seen]
        allowed = in_sight((stand.length - 1)[None], seen, None)  # [1, 1, seen]
        turns = self.turns[last][None]  # [1, 1] or [1, 1, 3]
        state = first_state(eagle, embeds[last][None], self.hidden[last][None], turns, *prefix, allowed)
        tree = self.grow(method, state, turns, *prefix, allowed)
        return tree, torch.cat([stand.tokens[last], tree.tokens[0]])

    def learn(self, stand: Stand, verdict: Verdict) -> None:
        self.hidden.copy_(verdict.hidden[verdict.path])
        rows = stand.length - stand.count + self.places[: len(self.hidden)]
        self.turns.copy_(rows if self.turns.ndim == 1 else (rows + stand.shift)[:, None].expand(-1, 3))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.keys, self.values, *self.held))


def _grow_dynamic(
    method: Guessing, state: Tensor, turns: Tensor, keys: Tensor, values: Tensor, allowed: Tensor
) -> trees.Tree:
    assert not isinstance(method.tree, Static)
    steps, topk, width = method.tree
    prefix = state, turns, keys, values, allowed
    return trees.keep(expand(method.eagle, method.embedding, *prefix, steps, topk, method.semantics), width)


def _grow_static(
    method: Guessing, state: Tensor, turns: Tensor, keys: Tensor, values: Tensor, allowed: Tensor
) -> trees.Tree:
    """Depth by depth; a branch that ends is not asked.

    state [1, 1, H] of step 0, turns [1, 1] or [1, 1, 3], keys and values [1, T, G, E] of the prefix, allowed [1, 1, T].
    """
    eagle, static = method.eagle, method.tree
    assert isinstance(static, Static)
    states, own_k, own_v = state[0], None, None  # [Q, H] and [Q, S, G, E] of the branches above
    tokens: list[Tensor] = []
    for depth, level in enumerate(static.levels, 1):
        ranked = trees.best(eagle.logits(states).float(), static.widest)[1]  # [Q, widest]
        tokens.append(ranked[level.above, level.rank])
        if depth == static.steps:
            break
        above = level.above[level.inner]  # [Q] of the branches that go on
        mixed = eagle.mix(method.embedding[tokens[-1][level.inner]], states[above])  # [Q, H]
        rope = eagle.rope(turns[0] + depth)
        key, value = (x[:, None] for x in eagle.keys_values(mixed, rope))
        own_k = key if own_k is None else torch.cat([own_k[above], key], dim=1)
        own_v = value if own_v is None else torch.cat([own_v[above], value], dim=1)
        seen = allowed.expand(-1, len(above), -1)
        attended = attend(eagle.queries(mixed, rope)[None], keys, values, seen, own_k[None], own_v[None])[0]
        states = eagle.finish(mixed, attended)
    return static.tree(torch.cat(tokens))
