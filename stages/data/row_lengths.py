"""Rows by their length: batches that are padded to the longest, and the ranges by which tau and accuracy are reported."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The tokens before a draft fall into ranges: the first ends at 2**7, and each other is as long as all before it.
SHORTEST_CONTEXT = 7
CONTEXT_EDGES = (0, *(2**e for e in range(SHORTEST_CONTEXT, 22)))


def split_ascending(lengths: Sequence[int], tokens: int, most: int | None = None) -> Iterator[slice]:
    """Yield batches of rows of ascending lengths: at most `most`, and as many as fit into `tokens` with padding, or one."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or stop - start == most or (stop + 1 - start) * lengths[stop] > tokens:
            yield slice(start, stop)
            start = stop


def assign_contexts(lengths: "Tensor") -> "Tensor":
    """Return the index of each length's range of CONTEXT_EDGES; a length on an edge is in the range above it."""
    return (lengths.double().frexp().exponent.long() - SHORTEST_CONTEXT).clamp(0, len(CONTEXT_EDGES) - 1)
