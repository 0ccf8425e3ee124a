"""Bounds against brute force: every tree, every landing position, every choice of nodes, on small pools."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.replay import oracle_bounds
from stages.trees import draft_tree
from tests.trees.test_draft_tree import tensors


def list_trees(parents: list[int], nodes: int) -> list[tuple[int, ...]]:
    """Every set of so many candidates that holds each one's parent; parents as candidate numbers, -1 the root."""
    subsets = itertools.combinations(range(len(parents)), nodes)
    return [chosen for chosen in subsets if all(parents[c] in (-1, *chosen) for c in chosen)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["plain", "ties", "saturated"]), st.integers(0, 1000), st.sampled_from([(1, 3), (2, 2), (3, 2), (2, 3)]),
    st.integers(1, 4),
)  # fmt: skip
def test_no_tree_of_as_many_nodes_expects_more_than_the_static_rule(kind: str, seed: int, shape, nodes: int) -> None:
    """Expected by the draft's own probabilities: the sum of the nodes' scores, over every connected choice."""
    pool = tensors(kind, seed, *shape, "sglang")
    scores, nodes = pool.scores[0].double(), min(nodes, pool.scores.shape[1])
    best = max(scores[list(chosen)].sum().item() for chosen in list_trees(pool.parents[0].tolist(), nodes))
    tree = draft_tree.build_tree(pool, nodes + 1)
    assert scores[tree.candidate_numbers[0]].sum().item() == pytest.approx(best, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=4))
def test_the_oracle_takes_the_fewest_cycles(max_accepted: list[list[int]]) -> None:
    """Each answer's positions, with how many drafts may be accepted there; every choice is tried."""
    rows = [
        [min(reach, len(row) - position) for position, reach in enumerate(row)] for row in max_accepted
    ]  # the answer's end

    def tries(row: list[int]) -> tuple[int, int]:
        """Fewest cycles, and of those ways the most accepted drafts, negated."""

        @functools.cache
        def ahead(position: int) -> tuple[int, int]:
            if position >= len(row):
                return 0, 0
            ways = [(ahead(position + num_accepted + 1), num_accepted) for num_accepted in range(row[position] + 1)]
            return min((cycles + 1, accepted - num_accepted) for (cycles, accepted), num_accepted in ways)

        return ahead(0)

    reach = torch.tensor([[*itertools.chain(*rows), 0]], dtype=torch.int8)
    accepted, cycles = oracle_bounds.find_fewest_cycles(reach, torch.tensor([len(row) for row in rows]), 4)
    expected = [tries(row) for row in rows]
    assert list(zip(cycles[:, 0].tolist(), accepted[:, 0].tolist(), strict=True)) == [(c, -a) for c, a in expected]


@pytest.mark.parametrize("tree_scoring", list(draft_tree.TREE_SCORINGS))
@pytest.mark.parametrize("kind", ["plain", "ties", "saturated"])
def test_threshold_trees_hold_the_candidates_that_reach_the_threshold(kind: str, tree_scoring: str) -> None:
    """Accepted drafts and nodes of each threshold and depth, counted one by one; the lowest holds everything."""
    steps, topk = 4, 3
    pool = tensors(kind, 5, steps, topk, tree_scoring)
    numbers = torch.tensor([[1, *[-2] * 3]])
    child = pool.parents[0].tolist().index(1)
    numbers[0, 1] = child
    thresholds = draft_tree.TREE_SCORINGS[tree_scoring].score_probability(
        torch.tensor(oracle_bounds.PATH_PROBABILITY_THRESHOLDS)
    )
    accepted, nodes = oracle_bounds.evaluate_threshold_trees(pool.scores, numbers, topk, thresholds)
    scores = pool.scores[0].tolist()
    for q, threshold in enumerate(thresholds.tolist()):
        for step in range(steps):
            end = topk + step * topk * topk
            assert nodes[q, step, 0].item() == sum(score >= threshold for score in scores[:end])
            on_path = [scores[n] for n in [1, child][: step + 1]]
            assert accepted[q, step, 0].item() == sum(score >= threshold for score in on_path)
    assert nodes[-1, -1].item() == len(scores) and nodes[0, -1].item() == 0
