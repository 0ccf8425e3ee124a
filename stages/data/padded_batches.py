"""Batches of rows that are padded to the longest of them."""

from collections.abc import Iterator, Sequence


def split_ascending(lengths: Sequence[int], tokens: int, most: int | None = None) -> Iterator[slice]:
    """Yield batches of rows of ascending lengths: at most `most`, and as many as fit into `tokens` with padding, or one."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or stop - start == most or (stop + 1 - start) * lengths[stop] > tokens:
            yield slice(start, stop)
            start = stop
