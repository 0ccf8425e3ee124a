"""Warnings of measured loads."""

import pytest

from stages.measuring import load_checks


@pytest.mark.parametrize(
    ("warmup", "concurrency", "warned"), [(1, 1, False), (0, None, False), (8, 8, False), (7, 8, True), (5, 8, False)]
)
def test_a_warm_up_smaller_than_the_load_is_warned_of(warmup: int, concurrency: int | None, warned: bool) -> None:
    """Bug: 16 requests warmed up a server for 128 at once; the first repeat held the compiling of kernels, unsaid."""
    prompts = [3] * (5 if warmup == 5 else 20)  # no more at once than there are prompts
    found = load_checks.list_warnings([], prompts, concurrency, 10, None, warmup)
    assert [f"expected warmup: {concurrency} or more" in line for line in found] == [True] * warned
