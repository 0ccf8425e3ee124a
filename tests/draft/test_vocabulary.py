"""Draft vocabularies against Python's own sort and dictionary."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages import init_draft


@given(st.lists(st.integers(0, 5), min_size=6, max_size=30), st.integers(2, 6))
def test_the_vocabulary_holds_the_most_frequent_tokens_and_of_ties_the_lower_id(counts: list[int], size: int) -> None:
    end = len(counts) - 1
    chosen = init_draft.choose_vocabulary(torch.tensor(counts), size, always=[end]).tolist()
    by_count = sorted((i for i in range(len(counts)) if i != end), key=lambda i: (-counts[i], i))
    assert chosen == sorted([end, *by_count[: size - 1]])


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(41, 50))
def test_vocabulary_maps_are_inverse(chosen: set[int], vocab_size: int) -> None:
    ids = torch.tensor(sorted(chosen))
    d2t, t2d = init_draft.build_vocabulary_maps(ids, vocab_size)
    assert [i + d for i, d in enumerate(d2t.tolist())] == sorted(chosen)
    assert {i for i, used in enumerate(t2d.tolist()) if used} == chosen
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
