"""What the stage adds to stages.drafting.replay: rows taken together, as memory allows. Whole runs: test_smoke.py."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stages.drafting.replay import room
from stages.replay_trees import _batches
from tests.drafting.plain import random_draft


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 200))
def test_every_row_is_in_one_batch_that_fits_or_is_alone(lengths: list[int], tokens: int) -> None:
    lengths.sort()
    batches = [lengths[here] for here in _batches(lengths, tokens)]
    assert [length for batch in batches for length in batch] == lengths
    assert all(len(batch) == 1 or len(batch) * batch[-1] <= tokens for batch in batches)
    for batch, following in pairwise(batches):  # none is smaller than it need be
        assert (len(batch) + 1) * following[0] > tokens


def test_more_memory_and_fewer_topks_make_more_room_and_none_is_never_enough() -> None:
    draft, *_ = random_draft(1)
    some, more, fewer = (room(draft, trees, memory) for trees, memory in (
        ([(4, 2, 8), (4, 3, 8)], 1 << 20), ([(4, 2, 8), (4, 3, 8)], 1 << 24), ([(4, 2, 8)], 1 << 20),
    ))  # fmt: skip
    assert some.places < more.places and some.tokens < more.tokens and some.places < fewer.places
    assert room(draft, [(16, 10, 64)], 1) == (1, 1)
