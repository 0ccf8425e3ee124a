"""Logits of the draft and the target and the loss between them, computed in chunks.

Logits of all positions would be by far the largest tensor of training (7 steps x 32,000 x 2 bytes: 448 kB a token, and 304 kB
more of the target at a vocabulary of 152k). So the forward pass computes logits, loss and gradient of a chunk and frees the
logits before the next; backward only scales the gradients. Pairs of (step, position) are sorted by label, so that the target's
logits of a label are computed once for all steps that have it.

Dimensions: S states (positions of all steps), N supervised pairs, D draft vocabulary, V target vocabulary, R pairs of a
chunk, U labels of a chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stages.training.compile_on_cuda import compile_on_cuda
from stages.training.packed_rows import LossOutput

LOSSES = ("ce", "lk_alpha", "lk_lambda")
LK_LAMBDA_DECAY = 3.0
PAIRS_PER_CHUNK = 16384  # 1 GB of bfloat16 logits at a draft vocabulary of 32,000


class OutputHead(NamedTuple):
    """A draft's head, from a step's state to logits over the draft vocabulary."""

    normalise: Callable[[Tensor], Tensor]  # states [..., H] -> the input of the head [..., H]
    weight: Tensor  # [D, H]
    d2t: Tensor  # [D] int64 offsets: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool


def compute_chunked_loss(
    output_head: OutputHead,
    states: Sequence[Tensor],  # L recurrent states, each [P_k, H]
    pack: Any,  # ttt.TrainingPack
    head: Tensor,  # [V, H]
    weights: Tensor,  # [L] weight of a position of each step in the total
    objective: Any,  # ttt.TrainingObjective
) -> LossOutput:
    """Return the loss of a pack that has supervised positions; argmax matches are [L, P].

    Pairs of state S, one past the last, are those of no supervised position in a padded pack: a row of zeros without weight.
    """
    spare = int(pack.padded_size is not None)
    normed = output_head.normalise(torch.cat([*states, torch.zeros_like(states[0][:spare])]))  # [S + spare, H]
    state_weights = torch.cat([w.expand(count) for w, count in zip(weights, pack.queries_per_step, strict=True)])  # [S]
    state_weights = nn.functional.pad(state_weights, (0, spare))
    total, losses, matches = _ChunkedLoss.apply(
        normed, output_head.weight, state_weights, pack, head, output_head.d2t, output_head.t2d, objective
    )
    count = sum(pack.queries_per_step)  # S
    loss_per_step = torch.stack([x.sum() for x in losses[:count].split(pack.queries_per_step)])
    num_queries = len(pack.query_tokens)
    padded = [nn.functional.pad(x, (0, num_queries - len(x))) for x in matches[:count].split(pack.queries_per_step)]
    return LossOutput(total, loss_per_step, torch.stack(padded))


class _ChunkedLoss(torch.autograd.Function):
    """The loss, whose gradients by states and head weight are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        state_weights: Tensor,
        pack: Any,
        head: Tensor,
        d2t: Tensor,
        t2d: Tensor,
        objective: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_any, needs_weight = any(ctx.needs_input_grad), ctx.needs_input_grad[1]  # a head may be frozen
        draft_vocab = torch.arange(len(d2t), device=d2t.device) + d2t if len(d2t) < len(t2d) else None
        losses = states.new_zeros(len(states), dtype=torch.float32)
        matches = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        scaled = losses.clone()  # [S] with their weights
        states_grad = torch.zeros_like(states) if needs_any else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start, stop, label_start, label_stop in pack.chunks:
            state, label = pack.pair_state[start:stop], pack.pair_label[start:stop] - label_start
            last = pack.last[pack.label_tokens[label_start:label_stop]]  # [U, H]
            target_logits = compute_target_logits(last, head, objective.logits_scale)  # [U, V]
            target_argmax = target_logits.argmax(-1)  # [U]
            probs, mass = compute_teacher_probs(target_logits, draft_vocab)
            del target_logits
            chunk_states = states[state]  # [R, H]
            target_token = target_argmax[label]
            # 0 where the target's token is not in the draft vocabulary.
            scale = state_weights[state] * t2d[target_token]
            pair_loss, gradient, draft_id = _compute_pair_loss(
                chunk_states @ weight.T, probs, mass, label, scale, objective.loss
            )
            losses[state] = pair_loss * t2d[target_token]
            matches[state] = draft_id + d2t[draft_id] == target_token
            scaled[state] = pair_loss * scale
            if states_grad is not None:
                states_grad[state] = gradient @ weight
            if weight_grad is not None:
                weight_grad += _multiply_in_float32(gradient.T, chunk_states)
        if objective.reach_floor < 1:  # a gradient by states is proportional to its weight, which is known only now
            count = sum(pack.queries_per_step)
            reach = _weigh_by_reach(matches[:count], pack.queries_per_step, objective.reach_floor)
            scaled[:count] *= reach
            if states_grad is not None:
                states_grad[:count] *= reach[:, None]
        ctx.save_for_backward(states_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        ctx.mark_non_differentiable(losses, matches)
        return scaled.sum(), losses, matches

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, *_: Any) -> tuple[Any, ...]:
        states_grad, weight_grad = ctx.saved_tensors
        weight_grad = None if weight_grad is None else weight_grad * total_grad
        # In place: a second copy of them is 7.5 GB for a row of 131,072 tokens at 8B shape, when memory is fullest.
        return states_grad.mul_(total_grad), weight_grad, *([None] * 6)


def _weigh_by_reach(matches: Tensor, queries_per_step: Sequence[int], floor: float) -> Tensor:
    """Return the weight [S] of each state: 1 where all earlier steps of its position match the label, else `floor`.

    Decoding comes to step k of a position only where the k drafts before it were accepted. A missed step itself counts whole.
    """
    reached = torch.ones_like(matches[: queries_per_step[0]])
    weights = []
    for count, right in zip(queries_per_step, matches.split(list(queries_per_step)), strict=True):
        reached = reached[:count]
        weights.append(torch.where(reached, 1.0, floor))
        reached = reached & right
    return torch.cat(weights)


def _multiply_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b accumulated in float32, in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def compute_target_logits(last: Tensor, head: Tensor, logits_scale: float) -> Tensor:
    """Return the target's logits [U, V] after last hidden states [U, H].

    The scale is multiplied into hidden states in float32, so it rounds no more than the product does, and takes no pass over
    logits. It is not an argument of compiled functions, for which a number is a tensor on the CPU.
    """
    if logits_scale != 1:
        last = last.to(torch.promote_types(last.dtype, torch.float32)) * logits_scale
    return last.to(head.dtype) @ head.T


@compile_on_cuda
def compute_teacher_probs(logits: Tensor, draft_vocab: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return probabilities [U, D] renormalised over the draft vocabulary, and their mass [U], of the target's logits [U, V].

    draft_vocab [D] are target ids; None: the whole vocabulary.
    """
    normaliser = torch.logsumexp(logits.float(), dim=-1)
    draft_logits = (logits if draft_vocab is None else logits[:, draft_vocab]).float()
    draft_normaliser = torch.logsumexp(draft_logits, dim=-1)
    return (draft_logits - draft_normaliser[:, None]).exp(), (draft_normaliser - normaliser).exp()


@compile_on_cuda
def _compute_pair_loss(
    logits: Tensor, probs: Tensor, mass: Tensor, label: Tensor, scale: Tensor, loss: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss [R], `scale` times its gradient by the logits [R, D] in their dtype, and the draft's argmax [R].

    Takes draft logits [R, D], teacher probs [U, D] and mass [U] by label, label [R] and scale [R]. With alpha the acceptance
    sum_v min(p, q), p over the target's whole vocabulary, the loss is:

        ce         soft cross-entropy
        lk_alpha   -log alpha (SpecForge, core/lk_loss.py)
        lk_lambda  w * cross-entropy + (1 - w) * (1 - alpha), with w = exp(-3 alpha) constant in the gradient, per position;
                   SpecForge takes the mean of the batch, which makes a row's loss depend on the others
    """
    q, value, gradient = _compute_cross_entropy(logits, probs[label])
    if loss == "ce":
        gradient = gradient * scale[:, None]
    else:
        alpha, slope = _compute_acceptance(q, probs[label] * mass[label][:, None])
        if loss == "lk_alpha":
            value, gradient = -alpha.log(), -slope * (scale / alpha)[:, None]
        else:
            w = (-LK_LAMBDA_DECAY * alpha).exp()
            value = w * value + (1 - w) * (1 - alpha)
            gradient = (w[:, None] * gradient - (1 - w)[:, None] * slope) * scale[:, None]
    return value, gradient.to(logits.dtype), logits.argmax(-1)


def _compute_cross_entropy(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [R, D], loss [R] and its gradient by the logits [R, D], all float32."""
    logits = logits.float()
    normaliser = torch.logsumexp(logits, dim=-1)
    q = (logits - normaliser[:, None]).exp()
    return q, normaliser - (probs * logits).sum(-1), q - probs


def _compute_acceptance(q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return alpha [R], the sum of min(p, q), and its gradient by the logits [R, D]."""
    is_below = q < p
    share = torch.where(is_below, q, 0.0).sum(-1)
    alpha = torch.minimum(q, p).sum(-1).clamp(min=1e-6)
    return alpha, q * (is_below.float() - share[:, None])
