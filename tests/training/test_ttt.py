"""Training-time test against the slow draft: every step of every position, its labels, its mean."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch._inductor
from torch import Tensor
from torch._dynamo.utils import counters

from stages.data.row_lengths import CONTEXT_EDGES
from stages.training import attention_mask, captured_step, chunked_loss, compile_on_cuda, ttt
from stages.training.ttt import TrainingObjective, TrainingPack
from tests.draft.slow_draft import CONFIG, OPTIONS, guess, random_draft

STEPS = 4


def make_row(seed: int, length: int, spans: list[tuple[int, int]]) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return SimpleNamespace(
        ids=torch.randint(0, CONFIG.vocab_size, (length,), generator=generator),
        features=torch.randn(length, 3 * CONFIG.hidden_size, generator=generator),
        last=torch.randn(length, CONFIG.hidden_size, generator=generator),
        mask=mask,
    )


def run(
    rows: list[SimpleNamespace], weights: tuple, mask: str = "aligned", loss: str = "ce", scale: float = 1.0
) -> tuple[TrainingPack, ttt.LossOutput]:
    draft, embedding, head = weights
    pack = TrainingPack.from_rows(rows, STEPS, mask)
    objective = TrainingObjective(STEPS, loss_mask=mask, loss=loss, logits_scale=scale)
    return pack, ttt.compute_loss(draft, pack, embedding, head, objective)


@pytest.mark.parametrize(
    ("mask", "loss", "options", "scale"),
    [
        ("eagle", "ce", "none", 1.0),
        *(("aligned", loss, "none", scale) for loss in chunked_loss.LOSSES for scale in (1.0, 0.3)),
        *(("aligned", "ce", options, 1.0) for options in OPTIONS if options != "none"),
    ],
)
def test_every_step_and_every_gradient_is_what_the_slow_draft_says(
    mask: str, loss: str, options: str, scale: float, monkeypatch
) -> None:
    """Loss, hits and the gradient of every weight, against one position at a time and plain autograd; the target's logits are
    `scale` times its head's.
    """
    monkeypatch.setattr(chunked_loss, "PAIRS_PER_CHUNK", 7)  # several chunks, and labels that lie in two of them
    if options == "none" or scale != 1:
        monkeypatch.setattr(attention_mask, "MAX_ATTENTION_LOGITS", 300)  # as rows of thousands of tokens
    weights = random_draft(1, **OPTIONS[options])
    draft, embedding, head = weights
    draft.requires_grad_(True)
    rows = [make_row(2, 9, [(3, 9)]), make_row(4, 11, [(1, 4), (6, 10)])]
    pack, result = run(rows, weights, mask, loss, scale)
    found = torch.autograd.grad(result.total_loss, list(draft.parameters()))
    total = torch.zeros(())
    for k in range(STEPS):
        losses, hits, supervised = [], 0, 0
        for row in rows:
            ids, tokens, assistant = row.ids.tolist(), len(row.ids), row.mask.tolist()
            for p in range(tokens - 2 - k):
                inside = all(assistant[p + 1 : p + 3 + k]) if mask == "aligned" else assistant[p + k]
                if not inside:
                    continue
                logits = scale * head @ row.last[p + 1 + k]
                probs = guess(draft, embedding, ids, row.features, p, ids[p + 2 : p + 2 + k])
                answer, drafted = int(logits.argmax()), int(draft.to_target(probs.argmax()))
                supervised, hits = supervised + 1, hits + (answer == drafted)
                if bool(draft.t2d[answer]):
                    losses.append(slow_loss(loss, logits, probs, draft.t2d))
        assert pack.supervised_per_step[k] == supervised
        assert k or (int((pack.contexts == 0).sum()) == supervised and pack.contexts.max() in (0, len(CONTEXT_EDGES)))
        assert int(result.argmax_matches[k].sum()) == hits
        assert result.loss_per_step[k].item() == pytest.approx(float(sum(x.detach() for x in losses)), rel=1e-4)
        total = total + 0.8**k * sum(losses) / max(1, supervised)
    assert result.total_loss.item() == pytest.approx(total.item(), rel=1e-4)
    expected = torch.autograd.grad(total, list(draft.parameters()))
    for (name, _), a, b in zip(draft.named_parameters(), found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5 * float(b.abs().max())), name


@pytest.mark.parametrize("window", [None, 5])
def test_flex_attention_equals_plain_attention(window: int | None, monkeypatch) -> None:
    """FlexAttention, as on a GPU but uncompiled, gives the same loss, with one mask or one per step.

    Flex attention has no gradient on a CPU; on a GPU those were compared once (2026-11-21).
    """
    weights = random_draft(11, sliding_window=window)
    rows = [make_row(12, 40, [(3, 30)]), make_row(13, 9, []), make_row(14, 25, [(1, 9), (12, 25)])]
    found = []
    for kind in (attention_mask._PaddedPackAttention, attention_mask._FlexPackAttention):
        monkeypatch.setattr(attention_mask, "FLEX_PAD_MULTIPLE", 128)
        monkeypatch.setattr(attention_mask, "_compile_static", lambda function: function)
        monkeypatch.setattr(attention_mask, "build_pack_attention", kind.build)
        _, result = run(rows, weights)
        found.append(result)
    assert torch.allclose(found[0].loss_per_step, found[1].loss_per_step, rtol=1e-4)
    assert torch.equal(found[0].argmax_matches, found[1].argmax_matches)


def slow_loss(kind: str, logits: Tensor, probs: Tensor, t2d: Tensor) -> Tensor:
    cross_entropy = -(torch.softmax(logits[t2d], 0) * probs.log()).sum()
    alpha = torch.minimum(torch.softmax(logits, 0)[t2d], probs).sum()
    w = torch.exp(-3 * alpha.detach())
    return {"ce": cross_entropy, "lk_alpha": -alpha.log(), "lk_lambda": w * cross_entropy + (1 - w) * (1 - alpha)}[kind]


def test_rows_of_one_pack_have_the_loss_of_each_row_alone() -> None:
    """In SpecForge a row's loss depended on its padding; here the losses of rows only add up."""
    weights = random_draft(5)
    rows = [make_row(6, 10, [(3, 9)]), make_row(7, 14, [(2, 14)]), make_row(8, 6, [])]
    separate = [run([row], weights)[1].loss_per_step for row in rows]
    packed = run(rows, weights)[1].loss_per_step
    assert torch.allclose(sum(separate), packed, rtol=1e-5)


def compute_gradients(pack: TrainingPack, weights: tuple) -> list[Tensor]:
    draft, embedding, head = weights
    draft.requires_grad_(True).zero_grad()
    ttt.compute_loss(draft, pack, embedding, head, TrainingObjective(STEPS)).total_loss.backward()
    return [p.grad for p in draft.parameters() if p.grad is not None]


@pytest.mark.parametrize("window", [None, 6])
def test_a_padded_pack_in_memory_of_another_has_its_own_loss_and_gradients(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's graph reads it: with more queries, labels and pairs than are supervised, and tokens of the pack before."""
    monkeypatch.setattr(ttt, "PADDED_SIZE", 64)
    monkeypatch.setattr(chunked_loss, "PAIRS_PER_CHUNK", 60)
    weights = random_draft(31, sliding_window=window)
    draft = weights[0].requires_grad_(True)
    pack = TrainingPack.from_rows([make_row(32, 40, [(3, 20), (25, 39)]), make_row(33, 9, [(2, 9)])], STEPS, "aligned")
    objective = TrainingObjective(STEPS, reach_floor=0.3, loss="lk_lambda")
    counts = torch.tensor(pack.supervised_per_step)
    trained = [weight for weight in draft.parameters() if weight.requires_grad]

    def compute(pack: TrainingPack) -> ttt.LossOutput:
        found = ttt.compute_loss(draft, pack, *weights[1:], objective, counts)
        assert torch.allclose(found.loss_per_step, expected.loss_per_step, rtol=1e-5)
        queries = expected.argmax_matches.shape[1]
        assert torch.equal(found.argmax_matches[:, :queries], expected.argmax_matches)
        assert not found.argmax_matches[:, queries:].any()
        return found

    expected = ttt.compute_loss(draft, pack, *weights[1:], objective, counts)
    gradients = [torch.autograd.grad(result.total_loss, trained) for result in (expected, compute(pack.pad()))]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)

    before = TrainingPack.from_rows([make_row(34, 55, [(1, 54)])], STEPS, "aligned").pad()
    assert (
        before.without_supervision().padded_size is None
    )  # a process's share of a step may be such a pack: no graph is of it
    static = captured_step.allocate_static(before, 60)
    for each in (before, pack.pad()):
        captured_step.copy_pack(each, static)
    monkeypatch.setattr(attention_mask, "FLEX_PAD_MULTIPLE", 128)
    monkeypatch.setattr(attention_mask, "_compile_static", lambda function: function)
    monkeypatch.setattr(attention_mask, "build_pack_attention", attention_mask._FlexPackAttention.build)
    with torch.no_grad():
        compute(static)


@pytest.mark.parametrize("window", [None, 6])
def test_a_row_longer_than_a_pack_is_computed_again_in_backward_to_the_same_bits(window: int | None) -> None:
    """And keeps less between forward and backward: of a step its state, key and value, not what they were computed from."""
    weights = random_draft(21, sliding_window=window)
    pack = TrainingPack.from_rows([make_row(22, 60, [(3, 50)])], STEPS, "aligned")
    saved_elements: list[int] = []

    def count(x: Tensor) -> Tensor:
        saved_elements[-1] += x.numel()
        return x

    found = []
    for batch_tokens in (60, 59):
        saved_elements.append(0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            found.append(compute_gradients(replace(pack, batch_tokens=batch_tokens), weights))
    assert not replace(pack, batch_tokens=60).is_oversized and replace(pack, batch_tokens=59).is_oversized
    assert saved_elements[1] < saved_elements[0] / 2
    for expected, gradient in zip(*found, strict=True):
        assert torch.equal(expected, gradient)


def test_each_function_is_compiled_once_whatever_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: at step 0 a state has as many rows as the queries, which the compiler took for a rule: at step 1 it compiled again.
    And a norm's eps was a variable at first, for which two functions were traced twice in every process, cache or not.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(compile_on_cuda, "is_on_gpu", lambda args: True)
    monkeypatch.setattr(compile_on_cuda, "BACKEND", "aot_eager")
    weights, compiled, traced = random_draft(23), counters["stats"], counters["aot_autograd"]
    graphs_before, traced_before, found = compiled["unique_graphs"], traced["total"], []
    for index, lengths in enumerate([(40, 30), (70,), (15, 16, 17), (33, 60)]):
        rows = [make_row(24 + n, length, [(2, length)]) for n, length in enumerate(lengths)]
        pack = TrainingPack.from_rows(rows, STEPS, "aligned")
        compute_gradients(replace(pack, batch_tokens=60 if index else 90), weights)  # the second is oversized
        found.append(compiled["unique_graphs"] - graphs_before)
    assert found == [6, 6, 6, 6] and traced["total"] - traced_before == 6
