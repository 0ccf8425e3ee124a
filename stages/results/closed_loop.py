"""Replay of a closed loop of requests: how often the prompts of some are read between two steps of others."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class Interruptions(NamedTuple):
    """Sums over all requests of a load."""

    steps: int  # cycles, or plain steps
    prompts: int  # of others, read between the first and the last step of a request
    passes: int  # that read these prompts


def count_interruptions(steps: Sequence[int], at_once: int) -> Interruptions:
    """Return the interruptions of requests with so many steps each, of which `at_once` run at any time.

    Requests begin in order, each when an earlier one ends. All that wait are read in one pass (SGLang's prefill batch), before
    the next step of all. Requests that end in one step are followed by one pass, so answers of few different lengths, or
    whose drafts are accepted alike, have fewer passes than prompts that arrive at random.
    """
    ends: list[int] = []  # a heap: after how many steps of the load each running request ends
    now = begun = prompts = passes = 0
    while begun < len(steps):
        beginning = steps[begun : begun + at_once - len(ends)]
        prompts += len(ends) * len(beginning)
        passes += len(ends)
        begun += len(beginning)
        for count in beginning:
            heapq.heappush(ends, now + count)
        now = ends[0]
        while ends and ends[0] == now:
            heapq.heappop(ends)
    return Interruptions(sum(steps), prompts, passes)
