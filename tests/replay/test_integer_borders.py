"""Replay's counts against Python's integers, which never overflow, on both sides of each border of a narrow integer type."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.params.tree_shape import TreeShape, count_candidates
from stages.replay import oracle_bounds
from stages.replay.replay import PositionTables
from stages.trees.draft_tree import Candidates, get_step_range

STEPS = [126, 127, 128, 129]
TOPKS = [180, 181, 255, 256]  # with two steps 180 records 32,580 candidates, 181 records 32,942


def chain(steps: int) -> Candidates:
    """A draft that is nearly sure of every token: step s drafts token s."""
    scores = 0.999 ** torch.arange(1, steps + 1, dtype=torch.float32)[None]
    return Candidates(scores, torch.arange(steps)[None], torch.arange(-1, steps - 1)[None])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(STEPS), st.integers(0, 129))
@example(127, 127)
@example(128, 128)
@example(129, 129)
def test_deep_chains_are_counted(steps: int, matching: int) -> None:
    """Bug: drafts accepted, the trees' depth (mean_depth) and the adaptive trees' drafts were counted in int8: a chain of
    128 steps accepted -128 drafts and was -128 deep.
    """
    matching = min(steps, matching)
    tables = PositionTables([TreeShape(steps, 1, steps + 1)], 1, "sglang", torch.device("cpu"))
    following = torch.where(torch.arange(steps) < matching, torch.arange(steps), -1)[None]
    tables.fill_positions(slice(0, 1), 1, chain(steps), following)
    found = tables.walk(torch.tensor([1]), torch.tensor([9]))
    assert (found.accepted.item(), found.summed_tree_depth.item(), found.cycles.item()) == (matching, steps, 1)
    assert tables.oracle_drafts[0, 0].item() == matching
    assert found.cycles_reaching_depth[0, 0].tolist() == [1] * matching + [0] * (steps - matching)
    everything = found.adaptive.accepted.view(len(oracle_bounds.PATH_PROBABILITY_THRESHOLDS), steps)[-1]
    assert everything.tolist() == [min(matching, step + 1) for step in range(steps)]


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(TOPKS), st.integers(0, 1000))
@example(180, 0)
@example(181, 0)
@example(256, 0)
def test_the_nodes_of_wide_trees_are_counted(topk: int, seed: int) -> None:
    """Bug: an adaptive tree's nodes were counted in int16: at topk 181 the tree of all candidates had fewer than none."""
    steps, count = 2, count_candidates(2, topk)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(1, count, generator=generator)
    parents = torch.cat([torch.full((topk,), -1), torch.arange(topk).repeat_interleave(topk)])[None]
    tables = PositionTables([TreeShape(steps, topk, 4)], 1, "sglang", torch.device("cpu"))
    tables.fill_positions(
        slice(0, 1), topk, Candidates(scores, torch.arange(count)[None], parents), torch.full((1, steps), -1)
    )
    found = (
        tables.walk(torch.tensor([1]), torch.tensor([9]))
        .adaptive.summed_tree_depth.view(len(oracle_bounds.PATH_PROBABILITY_THRESHOLDS), steps)
        .tolist()
    )
    listed = scores[0].tolist()
    for index, threshold in enumerate(tables.thresholds.tolist()):
        node_counts = [
            sum(score >= threshold for score in listed[: get_step_range(step, topk)[1]]) for step in range(steps)
        ]
        assert found[index] == node_counts
    assert found[-1][-1] == count
