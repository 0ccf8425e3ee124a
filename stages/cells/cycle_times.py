"""Times of a server's cycles and plain steps, from the requests of a load (time_cycles, and cells beside predictions).

A request decodes from its first token to its last, so at one concurrency

    cycle = sum of (e2e - ttft) over requests / sum of their cycles        with a draft
    step  = sum of (e2e - ttft) over requests / sum of (tokens - 1)        of the same server without one

Both include what the load adds: waiting for the batch, and while prompts of other requests are read. So a cost belongs to one
workload and answer length, and its batch is the load's concurrency.

In a closed loop of N requests at once and R in all, R - N begin while N - 1 others decode, so an answer is interrupted by
(N - 1)(R - N) / R prompts on average, whatever its length. Divided by its steps, they are the arrivals of a step. Those of a
load that was timed, and the passes that read them, are counted from the cycles of each request.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from stages.cells.cell import LoadPoint, RequestRow
from stages.cells.cost_model import PromptArrivals
from stages.cells.interval import estimate_repeats
from stages.cells.timing_grid import CycleTime, PlainStepTime
from stages.params.tree_shape import TreeShape

CountSteps = Callable[[RequestRow], int | None]  # cycles or plain steps of a request; None if they are unknown
count_cycles: CountSteps = attrgetter("cycles")


def build_cycle_time(tree: TreeShape, point: LoadPoint) -> CycleTime:
    """Return the time of a cycle at a point. Raises ValueError if the engine reported no cycles."""
    cycles = compute_cycle_seconds(point)
    if not cycles:
        raise ValueError(
            f"{tree.name}, concurrency {point.concurrency}: expected the cycles of each request, found none"
        )
    return CycleTime.build(tree, point.concurrency or 0, estimate_repeats(cycles), len(cycles), count_arrivals(point))


def build_plain_steps(points: Iterable[LoadPoint]) -> list[PlainStepTime]:
    """Return the plain step of each concurrency, over all points of servers without a draft."""
    steps: dict[int, list[float]] = {}
    arrivals: dict[int, list[PromptArrivals]] = {}
    for point in points:
        batch, seconds = point.concurrency or 0, compute_step_seconds(point)
        steps.setdefault(batch, []).extend(seconds)
        if seconds:
            arrivals.setdefault(batch, []).append(estimate_arrivals(point, count_plain_steps))
    found = []
    for batch in sorted(steps):
        each = arrivals.get(batch, [PromptArrivals()])
        mean = PromptArrivals(per_step=fmean(a.per_step for a in each), followed=fmean(a.followed for a in each))
        found.append(PlainStepTime.build(batch, estimate_repeats(steps[batch]), len(steps[batch]), mean))
    return found


def count_arrivals(point: LoadPoint) -> PromptArrivals:
    """Return the prompts of other requests that arrive in a cycle, and the passes that read them, as they were in this load."""
    if any(r.failed or r.cycles is None for r in point.requests):
        return estimate_arrivals(point, count_cycles)
    found = [
        count_interruptions([r.cycles or 0 for r in load], point.concurrency or 1) for load in _group_by_load(point)
    ]
    cycles = sum(load.steps for load in found)
    return PromptArrivals(
        per_step=sum(load.prompts for load in found) / cycles,
        followed=_compute_followed_share(point),
        counted_passes=sum(load.passes for load in found) / cycles,
    )


def estimate_arrivals(point: LoadPoint, count_steps: CountSteps) -> PromptArrivals:
    """Return the prompts of other requests that arrive in a step on average, whichever requests end together.

    Those of plain steps are what predictions start from: drafts that are accepted differently bring answers out of step, also
    where all have one length.
    """
    answered, followed = [r for r in point.requests if not r.failed], _compute_followed_share(point)
    steps = sum(count_steps(r) or 0 for r in answered)
    return PromptArrivals(per_step=((point.concurrency or 1) - 1) * followed * len(answered) / steps, followed=followed)


def _group_by_load(point: LoadPoint) -> list[list[RequestRow]]:
    """Return the requests of each repeat and turn, in the order of sending."""
    loads: dict[tuple[int, int], list[RequestRow]] = {}
    for r in point.requests:
        loads.setdefault((r.repeat, r.turn), []).append(r)
    return list(loads.values())


def _compute_followed_share(point: LoadPoint) -> float:
    """Return the share of requests that another one follows."""
    requests = len(point.requests) / len(_group_by_load(point))
    return max(0.0, requests - (point.concurrency or 1)) / requests


def count_plain_steps(request: RequestRow) -> int:
    """Return the steps of plain decoding: the first token is prefill's."""
    return request.output_tokens - 1


def compute_cycle_seconds(point: LoadPoint) -> list[float]:
    """Return the seconds of a cycle in each repeat."""
    return _time_by_repeat(point, count_cycles)


def compute_step_seconds(point: LoadPoint) -> list[float]:
    """Return the seconds of a plain step in each repeat."""
    return _time_by_repeat(point, count_plain_steps)


def _time_by_repeat(point: LoadPoint, count_steps: CountSteps) -> list[float]:
    """Return, for each repeat, seconds of decoding divided by steps, over answered requests with a step or more."""
    sums: dict[int, tuple[float, int]] = {}
    for r in point.requests:
        if not r.failed and (counted := count_steps(r)):
            seconds, total = sums.get(r.repeat, (0, 0))
            sums[r.repeat] = seconds + r.decoding_s, total + counted
    return [sums[repeat][0] / sums[repeat][1] for repeat in sorted(sums)]


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
