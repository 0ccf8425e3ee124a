"""What counts as one in an interval: a conversation of the eval split, a question of a set."""

import numpy as np
import pytest

from stages.cells import interval, points
from stages.cells.cell import Acceptance
from stages.cells.request_record import AcceptanceCounts
from tests.torch_cells import answers

ACCEPTED = {"a.0": 4, "b.0": 9, "c.0": 15, "d.0": 20}  # of ten cycles each


@pytest.mark.parametrize(
    ("prompts", "row", "cluster"),
    [
        ("eval", "weather-000017.1", "weather-000017"), ("eval", "a.b.12", "a.b"), ("eval", "line-3", "line-3"),
        ("eval", "mail@home.example", "mail@home.example"), ("random", "random.3", "random.3"),
        ("math500", "test/algebra/2.json", "test/algebra/2.json"), ("mt_bench", "81.1", "81.1"),
    ],
)  # fmt: skip
def test_answers_of_one_conversation_of_the_eval_split_belong_together(prompts: str, row: str, cluster: str) -> None:
    assert interval.get_cluster(prompts, row) == cluster


def test_values_are_added_up_by_cluster_in_the_order_of_first_appearance() -> None:
    found = interval.sum_by_cluster(["b", "a", "b"], np.array([[1, 10], [2, 20], [4, 40]]))
    assert found.tolist() == [[5, 50], [2, 20]]


def pool(repeats: list[dict[str, int]], prompts: str = "gsm8k") -> Acceptance:
    """The acceptance of a point whose every answer takes ten cycles."""
    counted = [answer for accepted in repeats for answer in accepted.items()]
    counts = [AcceptanceCounts(10, accepted, [10, 0, 0, 0]) for _, accepted in counted]
    return points.pool_acceptance(counts, [interval.get_cluster(prompts, name) for name, _ in counted], 3, 4)


def test_repeats_of_the_same_answers_do_not_narrow_the_interval_of_tau() -> None:
    """Bug: requests were resampled, not prompts: nine repeats of the same greedy answers made it a third as wide."""
    once, often = pool([ACCEPTED]), pool([ACCEPTED] * 9)
    assert often.tau == once.tau and (often.tau_low, often.tau_high) == pytest.approx((once.tau_low, once.tau_high))
    assert once.tau_low and once.tau_high and once.tau_low < once.tau < once.tau_high


def test_turns_of_a_conversation_of_the_eval_split_do_not_narrow_an_interval() -> None:
    """Bug: each answer of a conversation counted as a prompt of its own."""
    turns = {name.replace(".0", f".{turn}"): drafts for name, drafts in ACCEPTED.items() for turn in range(4)}
    once, often = pool([ACCEPTED], "eval"), pool([turns], "eval")
    assert (often.tau_low, often.tau_high) == pytest.approx((once.tau_low, once.tau_high))
    fast, plain = ([answers(["q0.0", "q0.1", "q0.2"], seconds, 0.1)] for seconds in (1.0, 2.0))
    assert points.pool_speedup(fast, plain, "eval").speedup_low is None
    assert points.pool_speedup(fast, plain, "mt_bench").speedup_low is not None
