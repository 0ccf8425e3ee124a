"""Sampled block drafts and their ratio rule: the target's distribution, a slow cycle by the same numbers, and what is refused.

The target is that of test_sampling, whose answers have probabilities that are known exactly.
"""

from functools import cache

import pytest
import torch
from torch import Tensor

from stages.engine import sampling
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.engine.sampling import SamplingParams
from stages.families.block.model import BlockDraft
from stages.params.tree_shape import TreeShape
from stages.target.hooks import capture_residual_streams
from tests.built_engines import build_engine
from tests.draft.slow_block_draft import METHOD_OPTIONS, block_states, draft_logits, random_block_draft
from tests.draft.slow_draft import small_target
from tests.engine import fake_cuda_graphs
from tests.engine.test_sampling import FEATURES, HOW, PROMPT, V, is_rejected, warp_logits

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_DRAFTS = 3
RUNS = 1500
CHAIN, SHORT = TreeShape(NUM_DRAFTS, 1, NUM_DRAFTS + 1), TreeShape(1, 1, 2)
every_method = pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])


@cache
def make_draft(method: str) -> BlockDraft:
    """A random draft, whose distributions differ from the target's, and at each slot after each token."""
    sizes = {"vocab_size": V, "mask_token_id": 6, "block_size": NUM_DRAFTS + (method != "dspark")}
    return random_block_draft(3, 0.3, torch.float32, **METHOD_OPTIONS[method], **sizes, feature_layers=tuple(FEATURES))[
        0
    ]


@cache
def make_engine(method: str) -> Engine:
    return build_engine(small_target(V, 1), [], FEATURES, make_draft(method))


def make_sampling(how: str, seed: int) -> SamplingParams:
    return SamplingParams(*HOW[how], seed, samples_drafts=True)


def decode(engine: Engine, how: SamplingParams, count: int = 20, tree: TreeShape = CHAIN) -> list[DecodeStep]:
    return list(engine.decode_speculative(PROMPT, count, tree, sampling=how))


# The rule


def test_the_rule_keeps_the_targets_distribution_exactly() -> None:
    """Summed over all drafts and coins: q(x) min(1, p/q) + the mass of rejection times the residual is p."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        p, q = (torch.randn(V, generator=generator).mul(2).softmax(0) for _ in "pq")
        p[torch.randint(V, (2,), generator=generator)] = 0  # cut by top-p
        p /= p.sum()
        coins = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
        x = torch.arange(V)[:, None].expand(-1, 1000)
        accepted = sampling.accept_drafts(p.expand(V, 1000, V), q.expand(V, 1000, V), x, coins.expand(V, -1))
        shares = accepted.double().mean(1)  # of each draft
        torch.testing.assert_close(shares, (p / q).clamp(max=1).double(), atol=1e-3, rtol=0)
        residual = sampling.compute_residual(p, q).double()
        exact = (p / q).clamp(max=1).double()
        committed = q * exact + (q * (1 - exact)).sum() * residual / residual.sum()
        torch.testing.assert_close(committed, p.double(), atol=1e-6, rtol=0)


# The engine against a slow cycle


def run_target(engine: Engine, ids: list[int]) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(), capture_residual_streams(engine.model, FEATURES) as caught:
        logits = engine.model(torch.tensor([ids])).logits[0]
    return torch.cat(caught, -1)[0], logits


def pick_token(probabilities: Tensor, number: float) -> int:
    """The token that a number points at."""
    ends = probabilities.double().cumsum(0)
    return next(token for token, end in enumerate((ends / ends[-1]).tolist()) if number < end)


def run_cycles_slowly(
    engine: Engine, prompt: list[int], count: int, how: SamplingParams, width: int
) -> list[tuple[list[int], int]]:
    """Cycles (tokens, accepted) by one anchor, slot and token at a time, from the answer's own numbers."""
    draft, embedding, head = engine.drafter.draft, engine.embedding, engine.lm_head
    numbers = sampling.draw_uniforms(how.seed, count + width).tolist()
    drawing, coins = sampling.draw_draft_uniforms(how.seed, count + width).T.tolist()
    shape = how.temperature, how.top_p, how.top_k
    answer = [pick_token(warp_logits(run_target(engine, prompt)[1][-1:], *shape)[0], numbers[0])]
    cycles = [(list(answer), 0)]
    while len(answer) < count:
        row, at = [*prompt, *answer], len(answer)
        states = block_states(draft, embedding, row, run_target(engine, row)[0], len(row) - 1)
        drafts, laws, previous = [], [], [row[-1]]
        for slot in range(width):
            padded = [*previous, *[0] * (draft.config.num_drafts - len(previous))]
            laws.append((draft_logits(draft, states, head, padded)[slot] / how.temperature).softmax(0))
            drafts.append(pick_token(laws[-1], drawing[at + slot]))
            previous.append(drafts[-1])
        target = warp_logits(run_target(engine, [*row, *drafts])[1][len(row) - 1 :], *shape)
        taken = 0
        while taken < width and coins[at + taken] < target[taken, drafts[taken]] / laws[taken][drafts[taken]]:
            taken += 1
        left = target[taken] if taken == width else (target[taken] - laws[taken]).clamp(min=0)
        tokens = [*drafts[:taken], pick_token(left, numbers[at + taken])][: count - len(answer)]
        answer += tokens
        cycles.append((tokens, min(taken, len(tokens))))
    return cycles


@pytest.fixture(params=["called", "played"])
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU, and as a GPU plays what it recorded."""
    if request.param == "played":
        fake_cuda_graphs.install(monkeypatch)
    return request.param


def ragged_requests(how: str) -> list[DecodeRequest]:
    return [
        DecodeRequest(PROMPT[: 1 + seed % 4], 5 + 2 * (seed % 5), None, make_sampling(how, seed)) for seed in range(5)
    ]


@cache
def slow_cycles(method: str, how: str, tree: TreeShape) -> list[list[tuple[list[int], int]]]:
    """The slow cycles of `ragged_requests`, which are the same whichever way the engine runs."""
    engine = make_engine(method)
    return [run_cycles_slowly(engine, *ask[:2], ask.sampling, tree.num_steps) for ask in ragged_requests(how)]


@every_method
@pytest.mark.parametrize("how", ["both"])
def test_every_cycle_is_that_of_a_slow_one_by_the_same_numbers(execution: str, method: str, how: str) -> None:
    """Alone, and several prompts of their own lengths and limits at once, in slots that are used again."""
    engine = make_engine.__wrapped__(method)
    requests = ragged_requests(how)
    for tree in (CHAIN, SHORT):
        expected = slow_cycles(method, how, tree)
        alone = [
            list(engine.decode_speculative(ask.prompt, ask.max_new_tokens, tree, None, ask.sampling))
            for ask in requests
        ]
        assert [[tuple(step) for step in steps] for steps in alone] == expected
        found: list[list[DecodeStep]] = [[] for _ in requests]
        for updates in engine.decode_batch(requests, 3, tree):
            for number, step in updates:
                found[number] += [step] if step else []
        assert found == alone
        drafts = sum(step.num_accepted for steps in alone for step in steps)
        assert 5 < drafts < tree.num_steps * sum(len(steps) - 1 for steps in alone) - 5, "both kinds are tested"


# The distribution


@every_method
@pytest.mark.parametrize(("how", "tree"), [("cool", (3, 1, 4)), ("both", (1, 1, 2))])
def test_answers_have_the_targets_own_probabilities(method: str, how: str, tree) -> None:
    assert not is_rejected(make_engine(method), HOW[how], tree, RUNS, samples_drafts=True)


# What is refused
