"""The report's part on replays: the front, the table of expected and accepted drafts, and the points that are drawn."""

import itertools
import random

import pytest

from stages.cells.replay_records import ReplayedTree
from stages.reporting import trees


def tree(steps: int, topk: int, tokens: int, tau: float) -> ReplayedTree:
    return ReplayedTree.model_construct(
        num_steps=steps, topk=topk, num_draft_tokens=tokens, tau=tau, tau_low=None, tau_high=None
    )


def some_trees(seed: int) -> list[ReplayedTree]:
    rng = random.Random(seed)
    shapes = itertools.product((2, 5, 8), (1, 2, 3), (4, 8, 16))
    return [tree(*shape, round(rng.uniform(1, 3), 1)) for shape in shapes]


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_what_nothing_as_narrow_equals(seed: int) -> None:
    some = some_trees(seed)
    beaten = [any(o["num_draft_tokens"] <= t["num_draft_tokens"] and o["tau"] > t["tau"] for o in some) for t in some]
    equalled = [any(o["num_draft_tokens"] < t["num_draft_tokens"] and o["tau"] == t["tau"] for o in some) for t in some]
    kept = {
        (t["num_draft_tokens"], t["tau"]) for t, b, e in zip(some, beaten, equalled, strict=True) if not b and not e
    }
    found = trees.find_pareto_front(some)
    assert sorted(kept) == [(t["num_draft_tokens"], t["tau"]) for t in found]
