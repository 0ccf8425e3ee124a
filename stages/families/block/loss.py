"""The loss of a block draft: anchors, labels of their blocks, and the weighted loss in chunks.

Anchors (DeepSpec, common.py:109-169; SpecForge, dflash_family_model.py:179-210): a position is a candidate iff it and the next
token are supervised, in one document. Up to a number of them is drawn uniformly without replacement.

Draft d of the block at anchor a has the label y[a + 1 + d] in all methods (families/block/model.py). It is valid iff that token
and all tokens between are supervised tokens of the anchor's document: a block ends at the first hole, as in DeepSpec. SpecForge's
DFlash tests each label alone; such labels after a hole are left out here.

Loss of a valid draft, weight exp(-d / decay) (DeepSpec, loss.py:25-37; SpecForge's exp(-(i - 1) / decay) of slot i = d + 1 is
the same):

    ce          -log q(y)                                          DFlash: 1, decay 7 at block 16
    l1          sum over v of |q(v) - p(v)|                        DSpark: 0.1 ce + 0.9 l1 + 1.0 confidence, decay 4
    confidence  BCE(confidence, alpha), alpha = 1 - l1 / 2 constant in the gradient
    selector    -log q'(y), q' among a slot's candidates            DFlash2: 1, beside ce 1 and decay 7 (speculators, dflash2)

q is the draft's distribution after the teacher-forced token before, of DFlash2 that of the slot alone; q' is its selector's
after that token, where a label that is no candidate takes the place of the last one. p is the target's, both at temperature 1
over the whole vocabulary, in float32 (float64 for weights in float64). speculators' `tv` is half of l1. The sum is divided by
the summed weights of all packs of a step on all ranks, which the caller knows, so that neither packing nor ranks change the
loss.

Logits of all drafts would be [512 anchors x 7, 151,936]: 2.2 GB in float32, several times. So the forward pass computes logits,
loss and gradients of a chunk of drafts and frees the logits before the next; backward only scales the gradients. On a GPU what
follows the products with the heads is compiled, so that nothing of a chunk's size is written in float32. Which drafts are
valid is found on the CPU (`BlockLabels.index`), since to ask the GPU is to wait for it.

Dimensions: S tokens of a pack, R anchors, D drafts of a block, P valid drafts, r rank of the Markov head or of the selector,
H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stages.families.block.model import BlockDraft
from stages.params.families import BlockLossWeights
from stages.training.chunked_loss import compute_target_logits
from stages.training.compile_on_cuda import compile_on_cuda

DRAFTS_PER_CHUNK = 2048  # 1.2 GB of float32 logits at a vocabulary of 152k


class BlockLabels(NamedTuple):
    """The tokens that blocks are to draft."""

    tokens: Tensor  # [R, D] int64; 0 past the pack's end
    previous: Tensor  # [R, D] int64: the token before each: the anchor, then the labels
    rows: Tensor  # [R, D] int64: pack rows whose last hidden state gives the target's distribution of the label
    is_valid: Tensor  # [R, D] bool
    index: Tensor  # [P] int64: the valid drafts' indices into [R * D]


class BlockLoss(NamedTuple):
    """The loss of a pack, and its parts of each draft, 0 where it is not valid or the part has no weight."""

    total_loss: Tensor  # scalar for backward
    ce: Tensor  # [R, D] float
    l1: Tensor  # [R, D]
    confidence: Tensor  # [R, D] BCE of the confidence head
    selector: Tensor  # [R, D]
    matches: Tensor  # [R, D] bool: the draft is the label, after the label before it


def sample_anchors(is_supervised: Tensor, documents: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Return up to `num_anchors` anchors [R], ascending, of a pack, supervised [S] bool and documents [S], on the CPU.

    Each document has its share by its candidates, rounded up or down at random, so all candidates are as likely.
    """
    index = list_anchors(is_supervised, documents)
    if len(index) <= num_anchors:
        return index
    of, counts = documents[index], torch.bincount(documents[index])
    shift = torch.rand((), generator=generator, dtype=torch.float64)
    ends = counts.cumsum(0).double() * num_anchors / len(index) + shift  # the last is num_anchors + shift
    shares = ends.long().diff(prepend=torch.zeros(1, dtype=torch.int64))  # [documents]
    within = torch.rand(len(index), generator=generator, dtype=torch.float64)
    order = torch.argsort(of + within)  # by document, and at random in it
    place = torch.arange(len(index)) - (counts.cumsum(0) - counts)[of]  # in its document
    return index[order[place < shares[of]]].sort().values


def list_anchors(is_supervised: Tensor, documents: Tensor) -> Tensor:
    """Return all candidates [R], ascending."""
    candidates = is_supervised[:-1] & is_supervised[1:] & (documents[:-1] == documents[1:])
    return candidates.nonzero()[:, 0]


def build_block_labels(
    ids: Tensor, is_supervised: Tensor, documents: Tensor, anchors: Tensor, num_drafts: int
) -> BlockLabels:
    """Return the labels of blocks at anchors [R] of a pack: ids, is_supervised and documents [S]."""
    index = anchors[:, None] + 1 + torch.arange(num_drafts, device=ids.device)  # [R, D]
    inside = index < len(ids)
    index = index.clamp(max=len(ids) - 1)
    is_valid = inside & is_supervised[index] & (documents[index] == documents[anchors, None])
    tokens = torch.where(inside, ids[index], 0)
    previous = torch.cat([ids[anchors, None], tokens[:, :-1]], 1)
    is_valid = is_valid.cumprod(1).bool()
    return BlockLabels(tokens, previous, index - 1, is_valid, is_valid.flatten().nonzero()[:, 0])


def compute_draft_weights(is_valid: Tensor, decay: float | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights [R, D] of drafts, 0 where not valid; their sum over a step is the loss's divisor."""
    weights = is_valid.to(dtype)
    if decay is None:
        return weights
    return weights * torch.exp(-torch.arange(is_valid.shape[1], device=is_valid.device, dtype=dtype) / decay)


def compute_block_loss(
    draft: BlockDraft,
    hidden: Tensor,  # [R, B, H] of `BlockDraft.forward_pack`
    labels: BlockLabels,
    last: Tensor,  # [S, H] the target's last hidden state, after its final norm
    head: Tensor,  # [V, H] the target's
    objective: BlockLossWeights,
    divisor: Tensor | float,  # summed weights of all drafts of the step, of all packs and ranks
    drafts_per_chunk: int = DRAFTS_PER_CHUNK,
    logits_scale: float = 1.0,  # of the target's logits over `last` times `head`; a block draft's own have none
) -> BlockLoss:
    """Return the loss of a pack. Raises ValueError for a loss of a head without that head, or the reverse.

    An objective of cross-entropy alone leaves out the target's distribution: a third of the products with the head.
    """
    for name, weight, module in (
        ("confidence head", objective.confidence, draft.confidence_head),
        ("candidate selector", objective.selector, draft.candidate_selector),
    ):
        if bool(weight) != (module is not None):
            raise ValueError(
                f"the weight of the {name}'s loss is {weight}, and the draft has {'no' if module is None else 'a'} {name}: set "
                "the weight, or the head, to match"
            )
    valid, num_drafts = labels.is_valid, labels.is_valid.shape[1]
    anchor_and_slot = labels.index // num_drafts, labels.index % num_drafts  # indexing by a mask would wait for the GPU
    weights = compute_draft_weights(valid, objective.decay, _choose_dtype(hidden))[anchor_and_slot] / divisor
    markov, selector, confidence = draft.markov_head, draft.candidate_selector, draft.confidence_head
    embedded = None  # [P, r] the token before each draft
    if markov is not None:
        embedded = markov.markov_w1(labels.previous[anchor_and_slot])
    elif selector is not None:
        # Not by indexing, whose gradient on a CPU adds up in an order of its own in every run.
        embedded = nn.functional.embedding(labels.previous[anchor_and_slot], selector.predecessor_codebook)
    rows = labels.rows[anchor_and_slot] if objective.l1 or objective.confidence else None
    total, by_part, matches = _ChunkedBlockLoss.apply(
        _DraftInputs(
            weights,
            labels.tokens[anchor_and_slot],
            rows,
            last,
            head,
            logits_scale,
            objective,
            drafts_per_chunk,
            draft.config.selector_top_k,
        ),
        draft.config.confidence_head_with_markov,
        draft.select_drafting_slots(hidden)[anchor_and_slot],
        embedded,
        None if markov is None else markov.markov_w2.weight,
        None if confidence is None else confidence.proj.weight,
        None if confidence is None else confidence.proj.bias,
        None if selector is None else selector.successor_codebook,
        None if selector is None else selector.hidden_projection.weight,
    )
    ce, l1, bce, chosen = (by_part.new_zeros(valid.shape).masked_scatter(valid, part) for part in by_part)
    return BlockLoss(total, ce, l1, bce, chosen, torch.zeros_like(valid).masked_scatter(valid, matches))


class _DraftInputs(NamedTuple):
    """Inputs of the loss of P drafts that have no gradient."""

    weights: Tensor  # [P]
    tokens: Tensor  # [P] labels
    rows: Tensor | None  # [P] rows of `last`; None where the target's distribution is not needed
    last: Tensor  # [S, H]
    head: Tensor  # [V, H]
    logits_scale: float
    objective: BlockLossWeights
    drafts_per_chunk: int
    num_candidates: int  # of the selector; 0 without one


class _ChunkedBlockLoss(torch.autograd.Function):
    """The loss, whose gradients are computed chunk by chunk in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, inputs: _DraftInputs, confidence_reads_markov: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`tensors`: states [P, H], previous tokens [P, r] or None, then weights of the heads or None, which chunks share."""
        states, embedded, *shared = tensors
        assert states is not None
        dtype, needs_grad = _choose_dtype(states), ctx.needs_input_grad[2:]
        gradients = [  # summed over chunks, so in float32 for those that chunks share
            torch.zeros_like(x, dtype=x.dtype if i < 2 else dtype) if x is not None and needs_grad[i] else None
            for i, x in enumerate(tensors)
        ]
        total = torch.zeros((), dtype=dtype, device=states.device)
        by_part = torch.zeros(4, len(states), dtype=dtype, device=states.device)  # as in _compute_chunk_loss
        matches = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        for start in range(0, len(states), inputs.drafts_per_chunk):
            chunk = slice(start, start + inputs.drafts_per_chunk)
            slices = [None if x is None else x[chunk] for x in (states, embedded)]
            leaves = [
                None if x is None else x.detach().requires_grad_(needs_grad[i])
                for i, x in enumerate([*slices, *shared])
            ]
            with torch.enable_grad():
                value, parts, match = _compute_chunk_loss(inputs, chunk, confidence_reads_markov, *leaves)
            learning = [i for i, x in enumerate(leaves) if x is not None and needs_grad[i]]
            if learning:
                chunk_gradients = torch.autograd.grad(value, [leaves[i] for i in learning], allow_unused=True)
                _add_gradients(gradients, learning, chunk_gradients, chunk)
            total += value.detach()
            by_part[:, chunk], matches[chunk] = parts, match
        gradients = [None if g is None or x is None else g.to(x.dtype) for g, x in zip(gradients, tensors, strict=True)]
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(by_part, matches)
        return total, by_part, matches

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, *_: Any) -> tuple[Any, ...]:
        return None, None, *(None if g is None else g * total_grad for g in ctx.saved_tensors)


def _add_gradients(
    gradients: Sequence[Tensor | None], indices: Sequence[int], chunk_gradients: Sequence[Tensor | None], chunk: slice
) -> None:
    """Add the gradients of a chunk in place: the first two tensors belong to its drafts, the others to all."""
    for i, chunk_gradient in zip(indices, chunk_gradients, strict=True):
        gradient = gradients[i]
        if chunk_gradient is not None and gradient is not None:
            (gradient[chunk] if i < 2 else gradient).add_(chunk_gradient)


def _compute_chunk_loss(
    inputs: _DraftInputs,
    chunk: slice,
    confidence_reads_markov: bool,
    states: Tensor,  # [C, H]
    embedded: Tensor | None,  # [C, r]
    markov_weight: Tensor | None,  # [V, r]
    confidence_weight: Tensor | None,  # [1, H] or [1, H + r]
    confidence_bias: Tensor | None,  # [1]
    successors: Tensor | None,  # [V, r] of the selector
    projection: Tensor | None,  # [r, H]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted loss of a chunk of C drafts, its parts [4, C] detached (ce, l1, confidence, selector), and matches."""
    dtype, weights, labels = _choose_dtype(states), inputs.weights[chunk], inputs.tokens[chunk]
    logits, bias, target_logits = states @ inputs.head.to(states.dtype).T, None, None
    if embedded is not None and markov_weight is not None:
        bias = embedded @ markov_weight.T
    if inputs.rows is not None:
        with torch.no_grad():
            target_logits = compute_target_logits(inputs.last[inputs.rows[chunk]], inputs.head, inputs.logits_scale)
    ce, l1, matches = _compute_vocabulary_loss(logits, bias, target_logits, labels, bool(inputs.objective.l1))
    loss = inputs.objective.ce * ce + inputs.objective.l1 * l1
    bce, chosen = torch.zeros_like(ce), torch.zeros_like(ce)
    if confidence_weight is not None and confidence_bias is not None:
        features = torch.cat([states, embedded], -1) if confidence_reads_markov and embedded is not None else states
        estimate = (features @ confidence_weight[0] + confidence_bias).to(dtype)
        alpha = (1 - l1.detach() / 2).clamp(0, 1)
        bce = nn.functional.binary_cross_entropy_with_logits(estimate, alpha, reduction="none")
        loss = loss + inputs.objective.confidence * bce
    if embedded is not None and successors is not None and projection is not None:
        context = embedded * (states @ projection.T)  # [C, r]
        chosen, matches = _compute_selector_loss(logits, context, successors, labels, inputs.num_candidates)
        loss = loss + inputs.objective.selector * chosen
    parts = torch.stack([x.detach() for x in (ce, l1, bce, chosen)])
    return (loss * weights).sum(), parts, matches


def _compute_selector_loss(
    logits: Tensor, context: Tensor, successors: Tensor, labels: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy [C] among candidates of logits [C, V], and whether the selector's draft is the label [C].

    `context` [C, r] times a successor of `successors` [V, r] is what the token before adds to a candidate's logit.
    """
    candidates = logits.detach().topk(num_candidates, -1).indices
    is_missing = (candidates != labels[:, None]).all(-1)
    candidates[:, -1] = torch.where(is_missing, labels, candidates[:, -1])
    rows = nn.functional.embedding(candidates, successors)  # [C, candidates, r]
    scores = logits.gather(-1, candidates) + (context[:, None] * rows).sum(-1)
    scores = scores.to(_choose_dtype(scores))
    label_index = (candidates == labels[:, None]).int().argmax(-1)
    best = scores.detach().argmax(-1) == label_index
    return nn.functional.cross_entropy(scores, label_index, reduction="none"), best & ~is_missing


@compile_on_cuda
def _compute_vocabulary_loss(
    logits: Tensor, bias: Tensor | None, target_logits: Tensor | None, labels: Tensor, learns_l1: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ce [C], l1 [C], 0 without the target's logits, and argmax matches [C], of logits and their bias [C, V]."""
    dtype = _choose_dtype(logits)
    if bias is not None:
        logits = logits + bias
    log_q = torch.log_softmax(logits.to(dtype), -1)  # [C, V]
    ce = nn.functional.nll_loss(log_q, labels, reduction="none")
    matches = logits.detach().argmax(-1) == labels
    if target_logits is None:
        return ce, torch.zeros_like(ce), matches
    p = torch.softmax(target_logits.to(dtype), -1)
    with torch.set_grad_enabled(learns_l1):
        l1 = (log_q.exp() - p).abs().sum(-1)
    return ce, l1, matches


def _choose_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of losses: float32, or float64 for weights in float64."""
    return torch.promote_types(x.dtype, torch.float32)
