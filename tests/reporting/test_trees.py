"""The report's part on replays: the front, the table of expected and accepted drafts, and the points that are drawn."""

import itertools
import random

import pytest

from stages.cells.replay_records import ReplayedTree, TreeBucket
from stages.reporting import trees


def tree(steps: int, topk: int, tokens: int, tau: float) -> ReplayedTree:
    return ReplayedTree.model_construct(
        num_steps=steps, topk=topk, num_draft_tokens=tokens, tau=tau, tau_low=None, tau_high=None
    )


def some_trees(seed: int) -> list[ReplayedTree]:
    rng = random.Random(seed)
    shapes = itertools.product((2, 5, 8), (1, 2, 3), (4, 8, 16))
    return [tree(*shape, round(rng.uniform(1, 3), 1)) for shape in shapes]


def bucket(name: str, what: str, where: str, **counts: float | None) -> TreeBucket:
    known = {"cycles": None, "nodes": None, "expected_accepted": None, "accepted": 0} | counts
    return TreeBucket(checkpoint="e003", tree=name, by=what, bucket=where, **known)


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


def test_the_table_adds_rows_and_siblings_up() -> None:
    inside = [
        bucket("t2_3_6", "row", "q1", cycles=2, nodes=10, expected_accepted=3.0, accepted=1),
        bucket("t2_3_6", "row", "q2", cycles=2, nodes=10, expected_accepted=5.0, accepted=5),
        bucket("t2_3_6", "sibling", "1", nodes=8, accepted=4),
        bucket("t2_3_6", "sibling", "2", nodes=6, accepted=1),
        bucket("t2_3_6", "sibling", "3", nodes=4, accepted=1),
        bucket("t2_3_6", "sibling", "4", nodes=2, accepted=0),
        bucket("t1_1_2", "context", "0-8", cycles=0, nodes=0, expected_accepted=0.0),
    ]  # fmt: skip
    (line,) = trees.build_statistics_table(inside)
    assert (line.tree, line.cycles, line.nodes, line.expected_accepted, line.accepted) == ("t2_3_6", 4, 5, 2, 1.5)
    assert [nodes for nodes, _ in line.siblings] == [0.4, 0.3, 0.3]
    assert [accepted for _, accepted in line.siblings] == [pytest.approx(n / 6) for n in (4, 1, 1)]
