"""Medusa: K heads that guess the next K tokens from one hidden state, all at once (https://arxiv.org/abs/2401.10774).

    last hidden h of position p:   head k:   out_k(h + silu(block_k(h)))   ->  guess for token p + 1 + k,   k = 1 .. K

The blocks begin at zero and the outs as the target's head, so an untrained head says what the target says of token p + 1.
Outs have the draft's vocabulary, as EAGLE-3's head has. Head k is taught what EAGLE-3's step k - 1 is, on the same
positions (see `ttt`): the target's distribution of that token, whose draws are the tokens that the paper takes. Heads
know nothing of each other, so a tree is that of `static`, and all of it is guessed at once. Verification is the engine's:
without loss. The paper's typical acceptance is not here.

Letters: K heads, P taught positions, H hidden, D draft vocabulary, M nodes, R rows.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stages.drafting import heads, ttt
from stages.drafting import tree as trees
from stages.drafting.decode import Begun, Stand, Verdict
from stages.drafting.static import Static


class Medusa(nn.Module):
    d2t: Tensor  # [D] int64 offsets: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        hidden, count, vocabulary = config["hidden_size"], config["heads"], config["draft_vocab_size"]
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        self.outs = nn.ModuleList(nn.Linear(hidden, vocabulary, bias=False) for _ in range(count))
        self.register_buffer("d2t", torch.zeros(vocabulary, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    @classmethod
    def fresh(cls, config: dict[str, Any], head: Tensor, d2t: Tensor, t2d: Tensor) -> "Medusa":
        """Untrained, of a target with `head` [V, H], with a draft's vocabulary."""
        made = cls(config)
        made.d2t.copy_(d2t)
        made.t2d.copy_(t2d)
        with torch.no_grad():
            for block, out in zip(made.blocks, made.outs, strict=True):
                nn.init.zeros_(block.weight)
                nn.init.zeros_(block.bias)
                out.weight.copy_(head[d2t + torch.arange(len(d2t))])
        return made

    def state(self, number: int, hidden: Tensor) -> Tensor:
        """What head `number`, from 0, reads: hidden [..., H] -> [..., H]."""
        return hidden + nn.functional.silu(self.blocks[number](hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [1, H] -> [K, D]."""
        states = [self.state(k, hidden) for k in range(len(self.outs))]
        return torch.cat([out(state) for out, state in zip(self.outs, states, strict=True)])


def forward(
    medusa: Medusa, pack: ttt.Pack, embedding: Tensor, head: Tensor, objective: ttt.Objective, counts: Tensor | None = None
) -> ttt.Result:  # fmt: skip
    """As ttt.forward; a step is a head."""
    if not pack.chunks:
        return ttt.nothing(medusa, pack, objective.steps)
    decay = objective.decay ** torch.arange(objective.steps, device=head.device)
    weights = decay / (torch.tensor(pack.counts, device=head.device) if counts is None else counts).clamp(min=1)
    parts = []
    for k, out in enumerate(medusa.outs):
        mine = pack.step(k)
        states = medusa.state(k, pack.last[mine.asked].to(out.weight.dtype))
        view = SimpleNamespace(readout=lambda x: x, lm_head=out, d2t=medusa.d2t, t2d=medusa.t2d)
        parts.append(heads.chunked(view, [states], mine, head, weights[k : k + 1], objective.loss))
    totals, losses, hits = zip(*parts, strict=True)
    wide = [nn.functional.pad(x[0], (0, len(pack.asked) - x.shape[1])) for x in hits]
    return ttt.Result(torch.stack(totals).sum(), torch.cat(losses), torch.stack(wide))


def guesses(medusa: Medusa, pack: ttt.Pack, embedding: Tensor, head: Tensor, steps: int, count: int) -> list[Tensor]:
    """Of each of the first `steps` heads its best `count` target ids [P_k, count], at the positions that it is taught."""
    found = []
    for k, width in enumerate(pack.widths[:steps]):
        logits = medusa.outs[k](medusa.state(k, pack.last[pack.asked[:width]]))
        found.append(_targets(medusa, trees.best(logits.float(), count)[1]))
    return found


def _targets(medusa: Medusa, ids: Tensor) -> Tensor:
    return ids + medusa.d2t[ids]


class Heads:
    """A Method: a trained Medusa's heads and a static tree. Raises ValueError where they can't belong together."""

    def __init__(self, medusa: Medusa, tree: Static, hidden_size: int, vocab_size: int):
        c = medusa.config
        if (c["vocab_size"], c["hidden_size"]) != (vocab_size, hidden_size):
            raise ValueError(
                f"these Medusa heads are for a target of {c['vocab_size']} tokens and width {c['hidden_size']}; this target has "
                f"{vocab_size} and {hidden_size}; train heads for it"
            )
        if tree.steps > c["heads"]:
            raise ValueError(
                f"the tree is {tree.steps} deep, expected at most {c['heads']}: a Medusa head guesses one depth; lower the "
                "depth, or train more heads (train_draft.checkpoints)"
            )
        self.medusa, self.tree, self.steps, self.nodes = medusa, tree, tree.steps, tree.nodes
        self.weights = sum(x.nbytes for x in medusa.state_dict().values())
        self.parameters = sum(x.numel() for x in medusa.parameters())

    def proposer(self, size: int) -> "Headed":
        return Headed(self)


class Headed:
    """Proposes from the hidden state of the last token that was verified."""

    def __init__(self, method: Heads):
        weight = method.medusa.outs[0].weight
        self.method, self.hidden = method, weight.new_zeros(1, weight.shape[1])
        self.held = [self.hidden]

    def begin(self, prompt: list[int], begun: Begun, stand: Stand) -> None:
        self.hidden.copy_(begun.hidden[-1:])

    def prepare(self, stand: Stand) -> None:
        """Nothing is looked up."""

    def propose(self, stand: Stand, seen: int) -> tuple[trees.Tree, Tensor]:
        medusa, static = self.method.medusa, self.method.tree
        ranked = trees.best(medusa.logits(self.hidden).float(), static.widest)[1]  # [K, widest]
        tokens = _targets(medusa, ranked[static.depths[0, 1:] - 1, static.ranks])  # [M-1]
        return static.tree(tokens), torch.cat([stand.tokens[stand.count - 1], tokens])

    def learn(self, stand: Stand, verdict: Verdict) -> None:
        self.hidden.copy_(verdict.hidden[verdict.path[stand.count - 1]])

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes
