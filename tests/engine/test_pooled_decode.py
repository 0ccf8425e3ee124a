"""Many prompts in slots that are refilled: greedy ones say what transformers says, drawn ones follow the distribution."""

import random
from collections import Counter

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from stages.engine import pooled_decode
from stages.engine.decode_state import DecodeRequest
from stages.engine.pooled_decode import PooledEngine
from stages.engine.sampling import SamplingParams, draw_tokens
from tests.draft.slow_draft import small_target
from tests.engine.test_batch_decode import END, search_greedily

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Qwen2's projections have biases, of which random weights have none; Gemma 3 has sliding windows, here of 16 tokens."""
    torch.manual_seed(4)
    if request.param == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(**SHAPE, sliding_window=16, layer_types=kinds, query_pre_attn_scalar=16)
        return Gemma3ForCausalLM(config).eval()
    made = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(0, 0.3)
    return made


def make_requests(count: int = 14) -> list[DecodeRequest]:
    """Ragged prompts, one past the target's positions; every third is drawn, each at a temperature of its own."""
    draws = random.Random(5)
    lengths = [1, 2, 30, 7, 70, 4, 4, 11, 50, 3, 9, 26, 5, 1]
    found = []
    for number, length in enumerate(lengths[:count]):
        sampling = SamplingParams(0.5 + number / 8, 1.0, None, number) if number % 3 == 2 else None
        prompt = [draws.randrange(90) for _ in range(length)]
        found.append(DecodeRequest(prompt, 1 if number == 6 else 8 + number, sampling=sampling))
    return found


def test_greedy_answers_are_transformers_own_and_drawn_ones_their_numbers_alone(
    execution: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For fewer slots than prompts and more, beside other neighbours, and packed in parts."""
    engine = PooledEngine(model, [END], 1.0)
    assert pooled_decode.explain_unsupported(model) is None
    requests = make_requests()
    together = dict(engine.answer(requests, 4))
    assert sorted(together) == list(range(len(requests)))
    for number, request in enumerate(requests):
        if request.sampling is None:
            assert together[number] == search_greedily(model, request), number
    assert dict(engine.answer(requests[::-1], 20)) == {13 - number: ids for number, ids in together.items()}
    monkeypatch.setattr(pooled_decode, "MAX_PACKED_TOKENS", 16)
    drawn = [number for number, request in enumerate(requests) if request.sampling]
    assert dict(engine.answer([requests[number] for number in drawn], 3)) == {
        place: together[number] for place, number in enumerate(drawn)
    }
    (alone,) = dict(engine.answer([requests[2]], 1)).values()
    assert alone == together[2]


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_drawn_answers_follow_the_targets_distribution(top_p: float) -> None:
    """Two tokens of seven, at two temperatures and greedy in one pass: 1,500 answers of each, within five deviations."""
    model, prompt, count = small_target(7, 1), [3, 1, 4, 1], 1500
    engine = PooledEngine(model, [], top_p)
    temperatures = (0.6, 1.2, 0.0)
    requests = [
        DecodeRequest(prompt, 2, sampling=SamplingParams(t, top_p, None, number) if t else None)
        for number in range(count)
        for t in temperatures
    ]
    answers = dict(engine.answer(requests, 100))

    def next_probabilities(ids: list[int], temperature: float) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        found = (logits / temperature).softmax(-1)
        order = found.argsort(descending=True)
        before = found[order].cumsum(0) - found[order]
        found[order[before >= top_p]] = 0
        return (found / found.sum()).tolist()

    for place, temperature in enumerate(temperatures):
        counts = Counter(tuple(answers[number]) for number in range(place, len(requests), len(temperatures)))
        if temperature == 0:
            assert len(counts) == 1
            continue
        firsts = next_probabilities(prompt, temperature)
        for first, p in enumerate(firsts):
            for second, q in enumerate(next_probabilities([*prompt, first], temperature)):
                expected = count * p * q
                assert abs(counts[first, second] - expected) <= 5 * max(expected, 1) ** 0.5 * (expected > 0)


def test_a_draw_is_the_token_that_the_number_points_at() -> None:
    """Of a vocabulary of several chunks and a part: the one of the whole line's cumulative sum, never one of probability 0.

    Bug: the largest number below 1, times a sum that is not a power of two, was rounded to the line's end: a token past the last.
    """
    torch.manual_seed(0)
    probabilities = (8 * torch.randn(400, 1001)).softmax(-1) * (torch.rand(400, 1001) < 0.3)
    probabilities[:, 500:900] = 0
    numbers = torch.rand(400, dtype=torch.float64)
    numbers[:2] = torch.tensor([0.0, 1 - 2**-53])
    drawn = draw_tokens(probabilities, numbers)
    ends = probabilities.double().cumsum(-1)
    expected = torch.searchsorted(ends, numbers[:, None] * ends[:, -1:], right=True)[:, 0].tolist()
    expected[1] = int(probabilities[1].nonzero()[-1])
    assert drawn.tolist() == expected
    assert (probabilities.gather(1, drawn[:, None]) > 0).all()
