"""Engines' figures to our counts, against answers cut token by token."""

import random
from typing import Any

import pytest

from stages.engines import registry


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


@pytest.mark.parametrize("seed", range(40))
def test_drafts_beyond_the_end_are_left_out(seed: int) -> None:
    rng = random.Random(seed)
    figures, tokens, accepted, cycles = engine(rng, rng.randint(1, 10), rng.randint(2, 60), rng.randint(0, 1))
    found = registry.get("sglang").count_request(figures, tokens, 3)
    assert found and (found.cycles, found.accepted) == (cycles, accepted)
    assert found.histogram == figures["spec_correct_drafts_histogram"]


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
        registry.get("llama.cpp" if "predicted_n" in figures else "sglang").count_request(figures, tokens, 3)
