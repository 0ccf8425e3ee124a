"""The draft's head, the target's head and the loss between them, a chunk of rows at a time.

Logits of all positions would be the largest tensor of training by far (7 steps x 32,000 x 2 bytes: 448 kB a token,
and the target's 304 kB more at a vocabulary of 152k). So each chunk's logits, loss and gradient are made and let go
before the next, and the gradient by the states and by the head's weight is ready when the forward pass is: the same
three products as ever, none of them twice. Pairs of (step, position) are taken in the order of their labels, so that
the target's side of a label is computed once for all steps that are taught it.

Letters: S states (all steps' positions), N pairs taught, D draft vocabulary, V target vocabulary, R rows of a chunk, U
labels in it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stages.training.compile_on_cuda import compile_on_cuda

LK_LAMBDA_DECAY = 3.0
PAIRS_PER_CHUNK = 16384  # pairs at a time: with a draft vocabulary of 32,000, 1 GB of logits in bfloat16


class OutputHead(NamedTuple):
    """A draft's head, from a step's state to logits over the draft vocabulary."""

    normalise: Callable[[Tensor], Tensor]  # states [..., H] -> the input of the head [..., H]
    weight: Tensor  # [D, H]
    d2t: Tensor  # [D] int64 offsets: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool


def compute_chunked_loss(
    output_head: OutputHead,
    states: Sequence[Tensor],  # L, each [P_k, H], as a step hands them to the next
    pack: Any,  # ttt.Pack
    head: Tensor,  # [V, H]
    weights: Tensor,  # [L] what a position of that step adds to the total
    loss: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> total (scalar, differentiable), loss [L] summed over each step's positions, hits [L, P] bool."""
    normed = output_head.normalise(torch.cat(list(states)))  # [S, H]
    of_state = torch.cat([w.expand(width) for w, width in zip(weights, pack.widths, strict=True)])  # [S]
    total, losses, hits = _ChunkedLoss.apply(
        normed, output_head.weight, of_state, pack, head, output_head.d2t, output_head.t2d, loss
    )
    by_step = torch.stack([x.sum() for x in losses.split(pack.widths)])
    rows = [nn.functional.pad(x, (0, len(pack.asked) - len(x))) for x in hits.split(pack.widths)]
    return total, by_step, torch.stack(rows)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, of_state: Tensor, pack: Any, head: Tensor, d2t: Tensor, t2d: Tensor, loss: str
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        by_both, learning = (
            ctx.needs_input_grad[1],
            any(ctx.needs_input_grad),
        )  # a head that is the target's learns nothing
        kept = torch.arange(len(d2t), device=d2t.device) + d2t if len(d2t) < len(t2d) else None
        losses = states.new_zeros(len(states), dtype=torch.float32)
        hits = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        total = torch.zeros((), device=states.device)
        by_state = torch.zeros_like(states) if learning else None
        by_weight = torch.zeros_like(weight, dtype=torch.float32) if by_both else None
        for first, last, low, high in pack.chunks:
            state, label = pack.pair_state[first:last], pack.pair_label[first:last] - low
            full = pack.last[pack.labels[low:high]].to(head.dtype) @ head.T  # [U, V]
            answer = full.argmax(-1)  # [U]
            probs, mass = compute_teacher_probs(full, kept)
            del full
            rows = states[state]  # [R, H]
            said = answer[label]
            scale = of_state[state] * t2d[said]  # where the target's choice can't be drafted, nothing is taught
            row_loss, gradient, guess = LOSS_FUNCTIONS[loss](rows @ weight.T, probs, mass, label, scale)
            losses[state] = row_loss * t2d[said]
            hits[state] = guess + d2t[guess] == said
            total += (row_loss * scale).sum()
            if by_state is not None:
                by_state[state] = gradient @ weight
            if by_weight is not None:
                by_weight += _multiply_in_float32(gradient.T, rows)
        ctx.save_for_backward(by_state, None if by_weight is None else by_weight.to(weight.dtype))
        ctx.mark_non_differentiable(losses, hits)
        return total, losses, hits

    @staticmethod
    def backward(ctx: Any, total: Tensor, *_: Any) -> tuple[Any, ...]:
        by_state, by_weight = ctx.saved_tensors
        return by_state * total, None if by_weight is None else by_weight * total, None, None, None, None, None, None


def _multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed and given in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


@compile_on_cuda
def compute_teacher_probs(full: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """full [U, V] logits, kept [D] target ids -> probabilities [U, D] renormalised over the draft vocabulary, mass [U] there."""
    whole = torch.logsumexp(full.float(), dim=-1)
    logits = (full if kept is None else full[:, kept]).float()
    mine = torch.logsumexp(logits, dim=-1)
    return (logits - mine[:, None]).exp(), (mine - whole).exp()


# Each of these: logits [R, D], probs [U, D] and mass [U] of the labels, label [R], scale [R]
#                -> loss [R], scale times the gradient by the logits [R, D] in their dtype, argmax [R]


@compile_on_cuda
def _compute_ce_loss(
    logits: Tensor, probs: Tensor, mass: Tensor, label: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Soft cross-entropy."""
    _, loss, gradient = _compute_cross_entropy(logits, probs[label])
    return loss, (gradient * scale[:, None]).to(logits.dtype), logits.argmax(-1)


@compile_on_cuda
def _compute_lk_alpha_loss(
    logits: Tensor, probs: Tensor, mass: Tensor, label: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-log of the acceptance sum_v min(p, q), p the target's over its whole vocabulary (SpecForge core/lk_loss.py)."""
    q, _, _ = _compute_cross_entropy(logits, probs[label])
    alpha, slope = _compute_acceptance(q, probs[label] * mass[label][:, None])
    return -alpha.log(), (-slope * (scale / alpha)[:, None]).to(logits.dtype), logits.argmax(-1)


@compile_on_cuda
def _compute_lk_lambda_loss(
    logits: Tensor, probs: Tensor, mass: Tensor, label: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """w * cross-entropy + (1 - w) * (1 - acceptance), w = exp(-3 * acceptance) held fixed; w is each row's own, where
    SpecForge takes the batch's mean, so that a row's loss does not depend on who is with it."""
    q, loss, gradient = _compute_cross_entropy(logits, probs[label])
    alpha, slope = _compute_acceptance(q, probs[label] * mass[label][:, None])
    w = (-LK_LAMBDA_DECAY * alpha).exp()
    gradient = (w[:, None] * gradient - (1 - w)[:, None] * slope) * scale[:, None]
    return w * loss + (1 - w) * (1 - alpha), gradient.to(logits.dtype), logits.argmax(-1)


def _compute_cross_entropy(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> q [R, D], loss [R], gradient by the logits [R, D], all float32."""
    logits = logits.float()
    whole = torch.logsumexp(logits, dim=-1)
    q = (logits - whole[:, None]).exp()
    return q, whole - (probs * logits).sum(-1), q - probs


def _compute_acceptance(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """-> alpha [R] = sum of min(p, q), and its gradient by the logits [R, D]."""
    below = q < p
    share = torch.where(below, q, 0.0).sum(-1)
    alpha = torch.minimum(q, p).sum(-1).clamp(min=1e-6)
    return alpha, q * (below.float() - share[:, None])


LOSS_FUNCTIONS = {"ce": _compute_ce_loss, "lk_alpha": _compute_lk_alpha_loss, "lk_lambda": _compute_lk_lambda_loss}
