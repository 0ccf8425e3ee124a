"""Training-time test against the slow draft: every step of every position, its labels, its mean."""

import pytest
import torch

from stages.drafting import ttt
from tests.drafting.plain import CONFIG, guess, random_draft

STEPS = 4


def make_row(seed: int, length: int, spans: list[tuple[int, int]]) -> ttt.Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(1, length, dtype=torch.bool)
    for start, end in spans:
        mask[0, start:end] = True
    return ttt.Batch(
        torch.randint(0, CONFIG.vocab_size, (1, length), generator=generator),
        torch.randn(1, length, 3 * CONFIG.hidden_size, generator=generator),
        torch.randn(1, length, CONFIG.hidden_size, generator=generator),
        mask,
        torch.tensor([length]),
    )


def padded_batch(rows: list[ttt.Batch], extra: int = 0) -> ttt.Batch:
    """Several one-row batches as one, right-padded, and `extra` more padding."""
    names = ("ids", "features", "last", "mask")
    longest = max(r.ids.shape[1] for r in rows) + extra
    stacked = [
        torch.cat(
            [torch.cat([x := getattr(r, n), x.new_zeros(1, longest - x.shape[1], *x.shape[2:])], 1) for r in rows]
        )
        for n in names
    ]
    return ttt.Batch(*stacked, torch.cat([r.lengths for r in rows]))


def learned(mask: list[int], steps: int, kind: str) -> list[list[int]]:
    """The label tokens that each step is taught."""
    gates = ttt.supervision(torch.tensor([mask]).bool(), torch.tensor([len(mask)]), steps, kind)
    return [[p + 2 + k for p in gate[0].nonzero().flatten().tolist()] for k, gate in enumerate(gates)]


def test_the_gate_is_as_drawn() -> None:
    """One span of tokens 3..6 in a row of 9; step k of position p learns token p + 2 + k."""
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 0]
    # Token 3 is the prefill's; the deeper the step, the later it starts.
    assert learned(mask, 4, "aligned") == [[4, 5, 6], [5, 6], [6], []]
    # The papers' gate: late at the start, and two past the end.
    assert learned(mask, 2, "eagle") == [[5, 6, 7, 8], [5, 6, 7, 8]]


def test_two_spans_never_teach_across_the_gap() -> None:
    assert learned([0, 1, 1, 0, 1, 1, 1], 3, "aligned") == [[2, 5, 6], [6], []]


@pytest.mark.parametrize("mask", ["aligned", "eagle"])
def test_every_step_is_what_the_slow_draft_says(mask: str) -> None:
    draft, embedding, head = random_draft(1)
    rows = [make_row(2, 13, [(4, 11)]), make_row(3, 9, [(3, 9)]), make_row(4, 12, [(2, 5), (7, 12)])]
    result = ttt.forward(draft, padded_batch(rows), embedding, head, STEPS, mask)
    for k in range(STEPS):
        losses, hits, taught = [], 0, 0
        for row in rows:
            ids, tokens = row.ids[0].tolist(), row.ids.shape[1]
            assistant = row.mask[0].tolist()
            for p in range(tokens - 2 - k):
                inside = all(assistant[p + 1 : p + 3 + k]) if mask == "aligned" else assistant[p + k]
                if not inside:
                    continue
                logits = head @ row.last[0, p + 1 + k]
                probs = guess(draft, embedding, ids, row.features[0], p, ids[p + 2 : p + 2 + k])
                answer, said = int(logits.argmax()), int(draft.to_target(probs.argmax()))
                taught, hits = taught + 1, hits + (answer == said)
                if bool(draft.t2d[answer]):
                    teacher = torch.softmax(logits[draft.t2d], 0)
                    losses.append(float(-(teacher * probs.log()).sum()))
        assert int(result.supervised[k].sum()) == taught
        assert int(result.hits[k].sum()) == hits
        assert result.loss[k].item() == pytest.approx(sum(losses) / max(1, len(losses)), rel=1e-4)


def test_padding_changes_nothing() -> None:
    """A rival's loss depended on what a row was padded with (research/specforge.md W2); ours is the mean over what counts."""
    draft, embedding, head = random_draft(5)
    row = make_row(6, 10, [(3, 9)])
    alone = ttt.forward(draft, row, embedding, head, STEPS, "aligned")
    padded = padded_batch([row], extra=7)
    for a, b in zip(alone.loss, ttt.forward(draft, padded, embedding, head, STEPS, "aligned").loss, strict=True):
        assert a.item() == pytest.approx(b.item(), rel=1e-5)


def test_a_batch_without_supervision_costs_nothing_and_breaks_nothing() -> None:
    draft, embedding, head = random_draft(7)
    result = ttt.forward(draft, make_row(8, 6, []), embedding, head, STEPS, "aligned")
    assert [x.item() for x in result.loss] == [0.0] * STEPS


def test_weights_decay_by_step() -> None:
    assert ttt.weighted([torch.tensor(1.0), torch.tensor(10.0), torch.tensor(100.0)], 0.5).item() == 1 + 5 + 25


def test_training_makes_the_loss_fall() -> None:
    draft, embedding, head = random_draft(9, scale=0.1)
    draft.requires_grad_(True)
    batch = make_row(10, 14, [(3, 14)])
    optimizer = torch.optim.AdamW(draft.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        loss = ttt.weighted(ttt.forward(draft, batch, embedding, head, STEPS, "aligned").loss, 0.8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
