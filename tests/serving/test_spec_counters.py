"""Engines' figures to our counts, against answers cut token by token."""

import random
from typing import Any

import pytest

from stages.serving import spec_counters
from stages.serving.spec_counters import VllmCounters


def engine(rng: random.Random, depth: int, limit: int, retractions: int) -> tuple[dict[str, Any], int, int, int]:
    """A speculative engine that counts before it cuts: its words, its tokens, and the drafts and cycles that are really there.

    Each token knows whether it was drafted; the answer is the first `limit` of them.
    """
    drafted = [False]  # the prefill's
    histogram, retracted = [0] * (depth + 1), 0
    restarts = sorted(rng.sample(range(1, limit), retractions))
    while len(drafted) < limit:
        if restarts and len(drafted) >= restarts[0]:  # put back and prefilled again
            restarts.pop(0)
            drafted.append(False)
            retracted += 1
            continue
        accepted = rng.randint(0, depth)
        drafted += [True] * accepted + [False]
        histogram[accepted] += 1
    cycles = sum(histogram)
    figures = {"spec_correct_drafts_histogram": histogram, "spec_verify_ct": cycles, "num_retractions": retracted}
    return figures, limit, sum(drafted[:limit]), cycles


@pytest.mark.parametrize("seed", range(200))
def test_drafts_beyond_the_end_are_left_out(seed: int) -> None:
    rng = random.Random(seed)
    figures, tokens, accepted, cycles = engine(rng, rng.randint(1, 10), rng.randint(2, 60), rng.randint(0, 1))
    found = spec_counters.count_request(figures, tokens)
    assert found and (found.cycles, found.accepted) == (cycles, accepted)
    assert found.clipped and found.histogram == figures["spec_correct_drafts_histogram"]


@pytest.mark.parametrize(
    ("figures", "tokens"),
    [
        ({"spec_accept_histogram": [0, 2]}, 6),  # 5 at the most
        ({"spec_accept_histogram": [0, 2]}, 3),  # the last cycle would have said nothing
        ({"spec_accept_histogram": [0, 2], "spec_verify_ct": 3}, 5),
        ({"predicted_n": 5, "draft_n": 3, "draft_n_accepted": 4}, 5),
    ],
)
def test_figures_that_do_not_add_up_are_refused(figures: dict[str, Any], tokens: int) -> None:
    with pytest.raises(ValueError, match="don't add up"):
        spec_counters.count_request(figures, tokens)


METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny num_drafts_total"}} {0}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="tiny"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="tiny"}} {1}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="tiny"}} {2}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="0"}} {3}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="1"}} {4}.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{{engine="0",model_name="tiny",position="1"}} 1.7e+09
vllm:num_requests_running{{engine="0",model_name="tiny"}} 0.0
"""


def test_vllms_counters_are_read_and_summed_over_engines() -> None:
    text = METRICS.format(10, 20, 9, 6, 3)
    assert spec_counters.parse_vllm_counters(text) == (10, 9, [6, 3])
    assert spec_counters.parse_vllm_counters(text + text.replace('engine="0"', 'engine="1"')) == (20, 18, [12, 6])
    assert spec_counters.parse_vllm_counters("vllm:num_requests_running 0.0\n") is None
    assert spec_counters.parse_vllm_counters("vllm:spec_decode_num_drafts_total 2.123456e+06\n") == (2123456, 0, [])


def test_vllms_counters_give_a_histogram() -> None:
    """10 cycles: 4 accept nothing, 3 one, 3 both; counted from readings around them."""
    before, after = VllmCounters(100, 60, [40, 20]), VllmCounters(110, 69, [46, 23])
    found = spec_counters.subtract_counters(before, after)
    assert found == (10, 9, False, [4, 3, 3])
    assert sum(i * n for i, n in enumerate(found.histogram)) == found.accepted
    # Before, no position was known.
    first = spec_counters.subtract_counters(VllmCounters(0, 0, []), VllmCounters(10, 9, [6, 3]))
    assert first.histogram == [4, 3, 3]


@pytest.mark.parametrize(
    "after",
    [VllmCounters(5, 3, [2, 1]), VllmCounters(110, 70, [46, 23]), VllmCounters(101, 69, [46, 23])],
    ids=["restarted", "not their sum", "more accepted than drafted"],
)
def test_counters_of_another_server_are_refused(after: VllmCounters) -> None:
    with pytest.raises(ValueError, match="vLLM's counters don't add up"):
        spec_counters.subtract_counters(VllmCounters(100, 60, [40, 20]), after)
