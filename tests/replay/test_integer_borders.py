"""Replay's counts against Python's integers, which never overflow, on both sides of each border of a narrow integer type."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.params.tree_shape import TreeShape
from stages.replay import oracle_bounds
from stages.replay.replay import PositionTables
from stages.trees.draft_tree import Candidates

STEPS = [126, 127, 128, 129]


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
