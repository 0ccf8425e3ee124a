"""Training-time test: L draft steps from every supervised position, each fed with its own earlier states.

EAGLE-3, section 3.1, https://arxiv.org/abs/2503.01840. Step k of position p takes the embedding of token p+1+k and
the state of step k-1, and is taught the target's distribution of token p+2+k (the last hidden state of p+1+k through
the target's head), renormalised over the draft vocabulary.

Which labels count (`mask: aligned`): token p+2+k lies in an assistant span and token p+1 is at or after its start,
which is just where serving asks. With span tokens s..e-1:

    step 0 learns s+1 .. e-1        step 2 learns s+3 .. e-1        (token s itself comes from the target's prefill)

`mask: eagle` keeps the papers' gate, mask[p+k], which is two tokens early (research/specforge.md 2.4): for comparison.
Each step's loss is the mean over its supervised positions of the whole batch; then the steps are weighted decay**k.

Only positions that some step supervises are computed: prefix keys need every token, but queries, the layer and both
heads run on those positions alone. Letters as in `draft`; P supervised positions of a row (padded), L steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.drafting.draft import Draft, attend, prefix


@dataclass
class Batch:
    """Rows padded to the longest. Padding is never supervised and, the layer being causal, never seen."""

    ids: Tensor  # [B, T] int64
    features: Tensor  # [B, T, 3H]
    last: Tensor  # [B, T, H] the target's last hidden state, after its final norm
    mask: Tensor  # [B, T] bool: tokens of assistant spans
    lengths: Tensor  # [B] tokens of each row, padding not counted

    @classmethod
    def of(cls, rows: Sequence[Any], device: str) -> "Batch":
        """Pad rows (each with ids [T], features [T, 3H], last [T, H], mask [T]) on the right."""

        def pad(name: str) -> Tensor:
            return nn.utils.rnn.pad_sequence([getattr(r, name) for r in rows], batch_first=True).to(device)

        lengths = torch.tensor([len(r.ids) for r in rows], device=device)
        return cls(pad("ids").to(torch.int64), pad("features"), pad("last"), pad("mask"), lengths)


@dataclass
class StepResult:
    """Per TTT step: the mean loss, hits (the draft's argmax is the target's), and how many positions were supervised."""

    loss: list[Tensor]
    hits: list[Tensor]  # each [B, P] bool, False where not supervised
    supervised: list[Tensor]  # each [B, P] bool


def supervision(mask: Tensor, lengths: Tensor, steps: int, kind: str) -> list[Tensor]:
    """mask [B, T] of assistant tokens, lengths [B] -> for each step k, [B, T] bool: is position p taught at this step?"""
    gates: list[Tensor] = []
    place = torch.arange(mask.shape[1], device=mask.device)
    for k in range(steps):
        if kind == "eagle":
            gate = _ahead(mask, k) & (place + k + 2 < lengths[:, None])  # the label must exist, whatever its span
        else:
            # Token p+1 at or after the start of the span of p+2+k: all of p+1 .. p+2+k are assistant tokens.
            gate = _ahead(mask, k + 2) & (gates[-1] if gates else _ahead(mask, 1))
        gates.append(gate)
    return gates


def forward(draft: Draft, batch: Batch, embedding: Tensor, head: Tensor, steps: int, mask: str) -> StepResult:
    """All L steps. embedding [V, H] and head [V, H] are the target's, frozen."""
    gates = supervision(batch.mask, batch.lengths, steps, mask)
    where, valid = _gather_index(torch.stack(gates).any(0))  # [B, P] positions, and which of them are real
    teacher, answer = _teacher(draft, batch.last, head, _ahead_any(where, valid, batch.mask.shape, steps))

    fused, keys, values = prefix(draft, batch.ids, batch.features, embedding)
    columns = torch.arange(batch.ids.shape[1], device=where.device)
    allowed = columns <= where[..., None]  # [B, P, T]
    hidden = torch.gather(fused, 1, where[..., None].expand(-1, -1, fused.shape[-1]))  # [B, P, H]
    padded_ids = nn.functional.pad(batch.ids, (0, steps + 1))
    own_k = own_v = None
    result = StepResult([], [], [])
    for k in range(steps):
        embeds = embedding[torch.gather(padded_ids, 1, where + 1 + k)]
        mixed = draft.mix(embeds, hidden)
        rope = draft.rope(where + k)
        if k > 0:  # step 0's own key is the prefix key of p
            key, value = draft.keys_values(mixed, rope)
            own_k = key[:, :, None] if own_k is None else torch.cat([own_k, key[:, :, None]], dim=2)
            own_v = value[:, :, None] if own_v is None else torch.cat([own_v, value[:, :, None]], dim=2)
        hidden = draft.finish(hidden, attend(draft.queries(mixed, rope), keys, values, allowed, own_k, own_v))

        gate = torch.gather(gates[k], 1, where) & valid  # [B, P]
        label_row = torch.gather(teacher.row, 1, (where + 1 + k).clamp(max=teacher.row.shape[1] - 1))[gate]  # [n]
        in_vocabulary = draft.t2d[answer[label_row]]  # where the target's choice can't be drafted, nothing is taught
        logits = draft.logits(hidden[gate])  # [n, D]
        losses = -(teacher.probs[label_row] * torch.log_softmax(logits.float(), dim=-1)).sum(-1)  # [n]
        result.loss.append((losses * in_vocabulary).sum() / in_vocabulary.sum().clamp(min=1))
        hits = torch.zeros_like(gate)
        hits[gate] = draft.to_target(logits.detach().argmax(-1)) == answer[label_row]
        result.hits.append(hits)
        result.supervised.append(gate)
    return result


def weighted(losses: list[Tensor], decay: float) -> Tensor:
    """Sum over steps of decay**k times the step's mean loss."""
    return torch.stack([decay**k * loss for k, loss in enumerate(losses)]).sum()


def chain_accepted(result: StepResult) -> Tensor:
    """[B, P] drafts that a chain started at each position would have accepted: hits before the first miss.

    On a row of the target's temperature-0 answer this is what decoding accepts, exactly: while every guess so far is
    right, the tokens fed are the draft's own. On a sampled row it counts agreement with the target's argmax along it.
    """
    hits = torch.stack(result.hits, dim=-1).int()
    return hits.cumprod(-1).sum(-1)


@dataclass
class _Teacher:
    probs: Tensor  # [n, D] float32, renormalised over the draft vocabulary
    row: Tensor  # [B, T] which of the n rows belongs to a position


@torch.no_grad()
def _teacher(draft: Draft, last: Tensor, head: Tensor, needed: Tensor) -> tuple[_Teacher, Tensor]:
    """The target's distributions at the positions `needed` [B, T], and its argmax [n] over the full vocabulary."""
    logits = last[needed] @ head.T  # [n, V]
    row = torch.zeros(needed.shape, dtype=torch.int64, device=needed.device)
    row[needed] = torch.arange(int(needed.sum()), device=needed.device)
    return _Teacher(torch.softmax(logits[:, draft.t2d].float(), dim=-1), row), logits.argmax(-1)


def _ahead(x: Tensor, n: int) -> Tensor:
    """x [B, T] shifted so that place p holds x[p + n]; False past the end."""
    return nn.functional.pad(x[:, n:], (0, min(n, x.shape[1])))


def _gather_index(used: Tensor) -> tuple[Tensor, Tensor]:
    """used [B, T] bool -> the used positions of each row [B, P], padded, and valid [B, P]."""
    counts = used.sum(1)
    most = max(int(counts.max()), 1)
    order = torch.sort(used.int(), dim=1, descending=True, stable=True).indices[:, :most]
    valid = torch.arange(most, device=used.device) < counts[:, None]
    return order.masked_fill(~valid, 0), valid


def _ahead_any(where: Tensor, valid: Tensor, shape: torch.Size, steps: int) -> Tensor:
    """[B, T] bool: the positions p+1 .. p+steps whose last hidden state teaches one of the supervised positions."""
    needed = torch.zeros(shape[0], shape[1] + steps + 1, dtype=torch.bool, device=where.device)
    for k in range(steps):
        needed.scatter_(1, where + 1 + k, needed.gather(1, where + 1 + k) | valid)
    return needed[:, : shape[1]]
