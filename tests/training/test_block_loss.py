"""Anchors, labels and loss of block drafts against loops over anchors and drafts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stages.families.block.loss import build_block_labels, compute_block_loss, sample_anchors
from stages.params.families import DFLASH2, DSPARK, BlockLossWeights
from tests.draft.slow_block_draft import METHOD_OPTIONS, Document, block_losses, random_block_draft

LENGTHS = (9, 7)
SUPERVISED = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]).bool()  # a hole, and both ends
DOCUMENTS = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS))
CANDIDATES = [2, 3, 6, 7, 9, 10, 11, 12, 13]  # not 8: its next token belongs to the other document


def test_anchors_are_candidates_without_repeats() -> None:
    found = [sample_anchors(SUPERVISED, DOCUMENTS, 4, torch.Generator().manual_seed(s)).tolist() for s in range(200)]
    assert all(len(x) == 4 and x == sorted(set(x)) for x in found)
    assert {sum(a < LENGTHS[0] for a in x) for x in found} == {1, 2}  # 4 of 9 candidates are in the first document: 1.8
    counts = [sum(c in x for x in found) for c in CANDIDATES]
    assert {a for x in found for a in x} == set(CANDIDATES)
    assert min(counts) > 50 and max(counts) < 130  # 200 * 4 / 9 = 89, standard deviation 7
    assert sample_anchors(SUPERVISED, DOCUMENTS, 99, torch.Generator().manual_seed(0)).tolist() == CANDIDATES
    same_seed = sample_anchors(SUPERVISED, DOCUMENTS, 4, torch.Generator().manual_seed(7)).tolist()
    assert same_seed == found[7]


CASES: dict[str, tuple[dict[str, Any], BlockLossWeights]] = {
    "dflash": (METHOD_OPTIONS["dflash"], BlockLossWeights(decay=7.0)),
    "dflash2": (METHOD_OPTIONS["dflash2"], DFLASH2.loss),
    "dflash_flat": (METHOD_OPTIONS["dflash_windows"], BlockLossWeights(decay=None)),
    "dflash_l1": (METHOD_OPTIONS["dflash"], BlockLossWeights(ce=0.5, l1=0.7)),
    "dspark": (METHOD_OPTIONS["dspark"], DSPARK.loss),
    "dspark_plain": (METHOD_OPTIONS["dspark_plain"], DSPARK.loss),
    "dspark_no_confidence": ({"method": "dspark", "markov_rank": 3}, BlockLossWeights(0.1, 0.9, 0.0, 4.0)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("chunk", "scale"), [(5, 1.0), (1000, 1.0), (5, 0.3)])
def test_loss_and_every_gradient_equal_slow_ones(case: str, chunk: int, scale: float) -> None:
    """`scale`: of the target's logits, which the draft's own don't have."""
    options, objective = CASES[case]
    draft, embedding, head = random_block_draft(1, **options)
    draft.requires_grad_(True)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(22, (16,), generator=generator)
    features = torch.randn(16, draft.fc.in_features, generator=generator, dtype=torch.float64)
    last = 0.5 * torch.randn(16, draft.config.hidden_size, generator=generator, dtype=torch.float64)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    anchors, divisor = torch.tensor([2, 6, 9, 12]), 17.0

    context = draft.project_context(features[None], positions[None])
    hidden = draft.forward_pack(embedding, ids, positions, DOCUMENTS, anchors, context)
    labels = build_block_labels(ids, SUPERVISED, DOCUMENTS, anchors, draft.config.num_drafts)
    inputs = draft, hidden, labels, last, head, objective, divisor
    found = compute_block_loss(*inputs, drafts_per_chunk=chunk, logits_scale=scale)
    found.total_loss.backward()
    gradients = {name: x.grad for name, x in draft.named_parameters()}
    draft.zero_grad()

    inputs = ids, features, scale * last, anchors.tolist(), objective, divisor
    slow = _slow_loss(draft, embedding, head, *inputs)
    slow.backward()
    torch.testing.assert_close(found.total_loss, slow, rtol=1e-9, atol=1e-9)
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_gradients_of_the_selector_are_the_same_in_every_run() -> None:
    """Bug: on two threads indexing added up the gradients of its codebooks in an order of its own, so no run was another's."""
    options = METHOD_OPTIONS["dflash2"] | {"selector_rank": 32, "selector_top_k": 16, "block_size": 16}
    draft, _, head = random_block_draft(1, dtype=torch.float32, **options)
    draft.requires_grad_(True)
    generator = torch.Generator().manual_seed(2)
    length = 300
    ids = torch.randint(22, (length,), generator=generator)
    supervised, documents = torch.ones(length).bool(), torch.zeros(length, dtype=torch.int64)
    labels = build_block_labels(ids, supervised, documents, torch.arange(length - 1), draft.config.num_drafts)
    hidden = torch.randn(length - 1, 16, draft.config.hidden_size, generator=generator)
    last, threads = torch.randn(length, draft.config.hidden_size, generator=generator), torch.get_num_threads()
    torch.set_num_threads(2)
    found = []
    for _ in range(8):
        compute_block_loss(draft, hidden, labels, last, head, DFLASH2.loss, 1.0).total_loss.backward()
        found.append([x.grad for x in draft.candidate_selector.parameters()])
        draft.zero_grad()
    torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for gradients in found[1:] for x, y in zip(found[0], gradients, strict=True))


def _slow_loss(
    draft: Any, embedding: Tensor, head: Tensor, ids: Tensor, features: Tensor, last: Tensor,
    anchors: list[int], objective: BlockLossWeights, divisor: float,
) -> Tensor:  # fmt: skip
    total = torch.zeros((), dtype=torch.float64)
    for a in anchors:
        document = slice(0, LENGTHS[0]) if a < LENGTHS[0] else slice(LENGTHS[0], 16)
        row = Document(*(x[document] for x in (ids, SUPERVISED, features, last)))
        for found in block_losses(draft, embedding, head, row, a - document.start, objective):
            total = total + found.weight * found.loss / divisor
    return total
