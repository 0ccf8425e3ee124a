"""Seconds from step to step of the engine: cycles of trees, and steps of plain decoding, in rounds.

A round times each decoding once, forwards and backwards in alternation, so that a drifting machine affects all alike.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import cast

from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, RequestUpdate
from stages.params.tree_shape import TreeShape


def count_asked_tokens(tree: TreeShape | None, steps: int) -> int:
    """Return one token more than prefill and so many cycles (without a tree plain steps) commit at most.

    So no answer ends while it is timed: freeing its slot takes a GPU several kernels, for 32 slots longer than a plain step.
    """
    return 1 + steps * (tree.num_steps + 1 if tree else 1) + 1


def time_rounds(
    engine: Engine,
    prompts: list[list[int]],
    trees: list[TreeShape],
    warmup: int,
    cycles: int,
    most_rounds: int,
    is_precise: Callable[[list[list[float]]], bool],
) -> list[list[float]]:
    """Return the seconds of the timed steps over all rounds: of plain decoding, then of each tree.

    Plain decoding has as many steps as the deepest tree commits tokens at most, since the first few after a prefill are slower.
    Rounds end, in pairs, where the seconds of the trees' cycles are precise.
    """
    deepest = 1 + max(tree.num_steps for tree in trees)
    decodings = [(None, warmup * deepest, cycles * deepest), *((tree, warmup, cycles) for tree in trees)]
    seconds: list[list[float]] = [[] for _ in decodings]
    for number in range(most_rounds):
        order = range(len(decodings))
        for index in order if number % 2 == 0 else reversed(order):
            seconds[index] += list(_time_steps(engine, prompts, *decodings[index]))
        if number % 2 and is_precise(seconds[1:]):
            break
    return seconds


def _time_steps(
    engine: Engine, prompts: list[list[int]], tree: TreeShape | None, warmup: int, count: int
) -> Iterator[float]:
    """Yield the seconds from step to step of all prompts at once; a step is a cycle, or one of plain decoding without a tree.

    A step ends when its tokens are read, while the next may already run.
    """
    requests = [DecodeRequest(prompt, count_asked_tokens(tree, warmup + count)) for prompt in prompts]
    updates = cast(Generator[list[RequestUpdate], None, None], engine.decode_batch(requests, len(requests), tree))
    with closing(updates):  # at once, so that the next decoding reuses its caches
        # That they begin, their prefills, then first steps, which may allocate and pick kernels.
        for _ in range(1 + len(requests) + warmup):
            next(updates)
        last = time.perf_counter()
        for _ in range(count):
            next(updates)
            previous, last = last, time.perf_counter()
            yield last - previous
