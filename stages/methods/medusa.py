"""Medusa: K heads that guess the next K tokens from one hidden state, all at once (https://arxiv.org/abs/2401.10774).

    last hidden h of position p:   head k:   out_k(h + silu(block_k(h)))   ->  guess for token p + 1 + k,   k = 1 .. K

The blocks begin at zero and the outs as the target's head, so an untrained head says what the target says of token p + 1.
Outs have the draft's vocabulary, as EAGLE-3's head has. Head k is taught what EAGLE-3's step k - 1 is, on the same
positions (see `ttt`): the target's distribution of that token, whose draws are the tokens that the paper takes. How it
decodes: `medusa_trees`.

Letters: K heads, P taught positions, H hidden, D draft vocabulary, V target vocabulary.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stages.training import chunked_loss, ttt


class MedusaDraft(nn.Module):
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
    def fresh(cls, config: dict[str, Any], head: Tensor, d2t: Tensor, t2d: Tensor) -> "MedusaDraft":
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

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft token ids -> target token ids, any shape."""
        return draft_ids + self.d2t[draft_ids]


def compute_loss(
    medusa: MedusaDraft, pack: ttt.TrainingPack, embedding: Tensor, head: Tensor, objective: ttt.TrainingObjective, counts: Tensor | None = None
) -> ttt.LossOutput:  # fmt: skip
    """As ttt.forward; a step is a head."""
    if not pack.chunks:
        return ttt.compute_zero_loss(medusa, pack, objective.num_steps)
    decay = objective.decay ** torch.arange(objective.num_steps, device=head.device)
    weights = decay / (torch.tensor(pack.supervised_per_step, device=head.device) if counts is None else counts).clamp(
        min=1
    )
    parts = []
    for k, out in enumerate(medusa.outs):
        mine = pack.select_step(k)
        states = medusa.state(k, pack.last[mine.query_tokens].to(out.weight.dtype))
        view = SimpleNamespace(normalise_output=lambda x: x, lm_head=out, d2t=medusa.d2t, t2d=medusa.t2d)
        parts.append(chunked_loss.compute_chunked_loss(view, [states], mine, head, weights[k : k + 1], objective.loss))
    totals, losses, hits = zip(*parts, strict=True)
    wide = [nn.functional.pad(x[0], (0, len(pack.query_tokens) - x.shape[1])) for x in hits]
    return ttt.LossOutput(torch.stack(totals).sum(), torch.cat(losses), torch.stack(wide))


def predict_top_tokens(
    medusa: MedusaDraft, pack: ttt.TrainingPack, embedding: Tensor, head: Tensor, steps: int, count: int
) -> list[Tensor]:
    """Of each of the first `steps` heads its best `count` target ids [P_k, count], at the positions that it is taught."""
    found = []
    for k, width in enumerate(pack.queries_per_step[:steps]):
        out = medusa.outs[k]
        logits = out(medusa.state(k, pack.last[pack.query_tokens[:width]].to(out.weight.dtype)))
        found.append(medusa.to_target(logits.topk(count).indices))
    return found
