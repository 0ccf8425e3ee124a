"""Replay's counts against Python's integers, which never overflow, on both sides of each border of a narrow integer type."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.params.tree_shape import TreeShape, count_candidates
from stages.replay import oracle_bounds
from stages.replay.replay import PositionTables
from stages.trees.draft_tree import Candidates, get_step_range

POSITION_COUNTS = [63, 64, 4_096, 4_097, 4_098, 16_383, 16_384, 32_767, 32_768]
STEPS = [126, 127, 128, 129]
TOPKS = [180, 181, 255, 256]  # with two steps 180 records 32,580 candidates, 181 records 32,942


def count_fewest_cycles(reach: list[int]) -> tuple[int, int]:
    """Return the fewest cycles over an answer's positions, and the most accepted drafts of such ways, from its end on."""
    ahead = [(0, 0)]  # of each position: cycles, and accepted drafts negated; the answer's end first
    for max_accepted in reversed(reach):
        ways = [(ahead[-1 - step], step) for step in range(min(max_accepted, len(ahead) - 1) + 1)]
        ahead.append(min((cycles + 1, accepted - step) for (cycles, accepted), step in ways))
    return ahead[-1][0], -ahead[-1][1]


def clip_at_end(reach: list[int]) -> list[int]:
    """No more drafts than the answer has tokens left."""
    return [min(max_accepted, len(reach) - position - 1) for position, max_accepted in enumerate(reach)]


@settings(max_examples=4, deadline=None)  # beside the borders that the bug passed, which are examples
@given(st.sampled_from(POSITION_COUNTS), st.lists(st.integers(0, 2), min_size=1, max_size=5))
@example(4_097, [0])
@example(4_098, [0])
@example(16_384, [0])
@example(32_768, [0])
def test_the_oracle_counts_every_cycle_of_a_long_answer(num_positions: int, pattern: list[int]) -> None:
    """Bug: beyond 4,096 cycles an answer, the oracle's twice the cycles passed the number that meant "never" (8,192), then
    int16: tau_oracle was wrong, above 16,383 positions negative. A short answer beside it must count as before.
    """
    rows = [clip_at_end((pattern * num_positions)[:num_positions]), clip_at_end((pattern * 9)[:9])]
    reach = torch.tensor([[*rows[0], *rows[1], 0]], dtype=torch.int8)
    accepted, cycles = oracle_bounds.find_fewest_cycles(reach, torch.tensor([len(row) for row in rows]), 2)
    found = list(zip(cycles[:, 0].tolist(), accepted[:, 0].tolist(), strict=True))
    assert found == [count_fewest_cycles(row) for row in rows]


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
    found = tables.walk(torch.tensor([1]))
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
        tables.walk(torch.tensor([1]))
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
