"""Sampling: what tokens are drawn from, against transformers; and that speculative decoding draws from nothing else.

The target is random and tiny, seven tokens wide, so that every answer's probability is known exactly.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process

from stages.draft.eagle3 import Eagle3Draft
from stages.engine import sampling
from stages.engine.decode import Engine
from stages.engine.decode_state import CacheSlots, DecodeRequest, DecodeStep, PrefillOutput
from stages.engine.sampling import SamplingParams, compute_probabilities
from stages.params.tree_shape import TreeShape
from tests.built_engines import build_engine
from tests.draft.slow_draft import CONFIG, scatter, small_target

V, FEATURES = 7, [1, 2, 3]
PROMPT = [3, 1, 4, 1]
HOW = {
    "hot": (1.0, 1.0, None), "cool": (0.6, 1.0, None), "top_p": (0.8, 0.7, None), "top_k": (1.3, 1.0, 3),
    "both": (0.9, 0.8, 4),
}  # fmt: skip
SLOTS = 100  # of answers that are decoded together where there are hundreds

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The target, which never ends, and a draft that guesses at random."""
    model = small_target(V, 1)
    draft = Eagle3Draft(replace(CONFIG, vocab_size=V, draft_vocab_size=5))
    scatter(draft, 0.3, 2)
    draft.d2t.copy_(torch.tensor([0, 1, 1, 2, 2]))  # tokens 0, 2, 3, 5, 6
    return build_engine(model, [], FEATURES, draft.requires_grad_(False))


def warp_logits(logits: Tensor, temperature: float, top_p: float, top_k: int | None) -> Tensor:
    """transformers' own way from logits to probabilities."""
    steps: list[Any] = [logits_process.TemperatureLogitsWarper(temperature)]
    steps += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
    steps += [logits_process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for step in steps:
        logits = step(None, logits)
    return logits.softmax(-1)


def join_tokens(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


# What tokens are drawn from


@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 1e-6])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 2.5])
def test_probabilities_are_transformers(temperature: float, top_p: float, top_k: int | None) -> None:
    logits = 3 * torch.randn(40, 200, generator=torch.Generator().manual_seed(5))
    ours = compute_probabilities(logits, temperature, top_p, top_k)
    torch.testing.assert_close(ours, warp_logits(logits, temperature, top_p, top_k), atol=1e-6, rtol=1e-5)
    assert ours.dtype == torch.float32 and torch.all(ours.sum(-1) - 1 < 1e-5)


# What is said


def sample_slowly(engine: Engine, prompt: list[int], count: int, how: SamplingParams) -> list[int]:
    """Token by token: transformers' forward over the whole text, its warpers, and the token a number falls to."""
    ids = list(prompt)
    for number in sampling.draw_uniforms(how.seed, count).tolist():
        logits = engine.model(torch.tensor([ids])).logits[:, -1]
        probabilities = warp_logits(logits, how.temperature, how.top_p, how.top_k)[0].double()
        reached = itertools.accumulate((probabilities / probabilities.sum()).tolist())
        ids.append(next(token for token, end in enumerate(reached) if number < end))
    return ids[len(prompt) :]


@pytest.mark.parametrize("how", HOW)
def test_plain_decoding_draws_what_the_numbers_say(engine: Engine, how: str) -> None:
    for seed in range(3):
        drawn = SamplingParams(*HOW[how], seed)
        assert join_tokens(engine.decode_plain(PROMPT, 20, sampling=drawn)) == sample_slowly(engine, PROMPT, 20, drawn)
    assert join_tokens(engine.decode_plain(PROMPT, 20, sampling=SamplingParams(1.0, 1.0, 1, 0))) == join_tokens(
        engine.decode_plain(PROMPT, 20)
    )


def decode_together(engine: Engine, requests: list[DecodeRequest], tree: TreeShape | None) -> list[list[DecodeStep]]:
    """The steps of each answer; tests/engine/test_batch_decode.py holds them against those of each alone."""
    found: list[list[DecodeStep]] = [[] for _ in requests]
    for updates in engine.decode_batch(requests, SLOTS, tree):
        for number, step in updates:
            if step is not None:
                found[number].append(step)
    return found


# Each tree, and each way to sample: what is sampled from does not depend on the tree.
# Lossless in distribution: over many seeds, answers have the target's own probabilities

FALSE_ALARM = 1e-6  # of all choices of seeds, fewer than one in a million would fail what is right
RUNS, LENGTH = 400, 3


def compute_exact_probabilities(engine: Engine, how: tuple[float, float, int | None]) -> dict[tuple[int, ...], float]:
    """The probability of every beginning of an answer, up to LENGTH tokens, by transformers."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(LENGTH):
        before = list(itertools.product(range(V), repeat=length))
        logits = engine.model(torch.tensor([[*PROMPT, *b] for b in before])).logits[:, -1]
        for path, probabilities in zip(before, warp_logits(logits, *how).double().tolist(), strict=True):
            known |= {(*path, token): known[path] * probability for token, probability in enumerate(probabilities)}
    return known


def compute_tail_probability(count: int, runs: int, probability: float) -> float:
    """How likely a binomial count is at least as far out, to its own side: exact, since it is summed."""
    if probability <= 0 or probability >= 1:
        return 1.0 if count == round(probability * runs) else 0.0
    side = range(count + 1) if count <= runs * probability else range(count, runs + 1)
    whole = math.lgamma(runs + 1)
    logs = (
        whole
        - math.lgamma(k + 1)
        - math.lgamma(runs - k + 1)
        + k * math.log(probability)
        + (runs - k) * math.log1p(-probability)
        for k in side
    )
    return math.fsum(math.exp(x) for x in logs)


@contextmanager
def prefill_once(engine: Engine) -> Iterator[None]:
    """Let a prompt that comes again take the rows and the output of its first prefill: of short answers most of the time."""
    real, kept = engine.target.prefill, {}

    def prefill(slot: CacheSlots, prompt: list[int], images: None, layers: list[int]) -> PrefillOutput:
        cached = slot.target_cache.tensors
        if (key := (tuple(prompt), tuple(layers))) not in kept:
            output = real(slot, prompt, images, layers)
            kept[key] = output, {shape: rows[:, :, : len(prompt)].clone() for shape, rows in cached.items()}
        output, written = kept[key]
        for shape, rows in written.items():
            cached[shape][:, :, : len(prompt)] = rows
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.target, "prefill", prefill)
        yield


def is_rejected(
    engine: Engine, how: tuple[float, float, int | None], tree, runs: int, samples_drafts: bool = False
) -> bool:
    """Whether the first LENGTH tokens can't be the target's: some beginning came too often or too seldom.

    Each beginning's count is binomial, two sides of each are looked at, and the bound is shared out among them all: so it
    refuses what is right with a probability below FALSE_ALARM (union bound), however the counts hang together.
    """
    known = compute_exact_probabilities(engine, how)
    counts: Counter[tuple[int, ...]] = Counter()
    requests = [DecodeRequest(PROMPT, LENGTH, None, SamplingParams(*how, seed, samples_drafts)) for seed in range(runs)]
    with prefill_once(engine):
        answers = [join_tokens(steps) for steps in decode_together(engine, requests, TreeShape(*tree))]
    for answer in answers:
        counts.update(tuple(answer[:length]) for length in range(1, LENGTH + 1))
    least = FALSE_ALARM / (2 * (len(known) - 1))
    return any(
        compute_tail_probability(counts[path], runs, probability) < least for path, probability in known.items() if path
    )


@pytest.mark.parametrize(("how", "tree"), [("hot", (2, 2, 7)), ("both", (3, 3, 12))])
def test_speculative_answers_have_the_targets_own_probabilities(engine: Engine, how: str, tree) -> None:
    assert not is_rejected(engine, HOW[how], tree, RUNS)


def verify_greedily(self: sampling.TokenSampler, logits: Tensor, indices: Tensor) -> Tensor:
    """Verifies as at temperature 0."""
    return logits.argmax(-1) if len(logits) > 1 else CHOOSE(self, logits, indices)


def sample_without_temperature(self: sampling.TokenSampler, logits: Tensor, indices: Tensor) -> Tensor:
    """Forgets the temperature."""
    return sampling.draw_tokens(logits.softmax(-1), self._uniforms[indices])


def resample_from_target(self: sampling.TokenSampler, logits: Tensor, indices: Tensor) -> Tensor:
    """What is rejected is drawn from the whole distribution again, not from the residual: drafts come too often.

    The children's tokens aren't known here, so: tokens 0, 2, 3, which the draft guesses most, are tried twice.
    """
    first = CHOOSE(self, logits, indices)
    again = sampling.draw_tokens(logits.softmax(-1), torch.rand(len(logits), dtype=torch.float64))
    drafted = torch.isin(first, torch.tensor([0, 2, 3]))
    return torch.where(drafted, first, again)


CHOOSE = sampling.TokenSampler.sample


# Three times as many of the least biased: with RUNS it was refused or not by the last bits of a CPU's sums.
@pytest.mark.parametrize(
    ("spoiled", "runs"), [(verify_greedily, RUNS), (sample_without_temperature, RUNS), (resample_from_target, 3 * RUNS)]
)
def test_a_spoiled_verification_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch, spoiled, runs: int) -> None:
    """Bug: its power was near a half, so it failed on machines that add in another order."""
    monkeypatch.setattr(sampling.TokenSampler, "sample", spoiled)
    assert is_rejected(engine, HOW["cool"], (2, 2, 7), runs)


def test_a_large_vocabularys_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """Bug to be: summed in float32, the last of 150,000 tokens would be reached by no number, or by too many."""
    probabilities = torch.full((1, 150_000), 1 / 150_000)
    for token in (0, 77_777, 149_999):
        number = (token + torch.tensor([0.02, 0.98], dtype=torch.float64)) / 150_000
        assert sampling.draw_tokens(probabilities.expand(2, -1), number).tolist() == [token, token]
