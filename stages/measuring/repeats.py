"""The loop of every measurement: repeats, turns of conversations, servers and kinds of decoding in turns, and when it ends.

What ends it: docs/workloads.md, "until".
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from stages.cells import points, request_record
from stages.cells.cell import PLAIN, SPECULATIVE, Speedup, StoppingRecord
from stages.cells.points import RepeatRecords
from stages.engines.cell_engine import CellEngine, LoadResult, RepeatResults, ResultsByKind, Subject
from stages.params.tree_shape import Load

# An interval over two repeats is 12.7 standard errors to either side; of prompts that are decoded both ways it is over prompts.
FEWEST_COMPARED_REPEATS = 3

T = TypeVar("T")
S = TypeVar("S", bound=Subject)


def measure_repeats(cell: CellEngine) -> dict[Load, StoppingRecord]:
    """Measure all loads of a cell until they were repeated often enough; return why each has no more repeats.

    Subjects that can't be open at once are opened for each repeat, in alternating order.
    """
    ended = dict[Load, StoppingRecord]()
    with cell.open(cell.subjects) if cell.fits_together else contextlib.nullcontext():
        for loads in cell.group_loads():
            repeat, found = 0, None
            while found is None:
                _measure_repeat(cell, loads, repeat)
                repeat += 1
                half_width, seconds = _measure_widest_half(cell, loads), _sum_seconds(cell, loads)
                found = judge_repeats(cell, repeat, half_width, seconds)
            ended |= dict.fromkeys(loads, found)
    return ended


def judge_repeats(cell: CellEngine, repeats: int, half_width: float | None, seconds: float) -> StoppingRecord | None:
    """Return why a measurement ends after so many repeats and seconds; None while it goes on.

    `half_width` is half of the speedup's interval as a share of it, None without an interval; a line says how far it is. Cells
    of plain or of speculative decoding alone have a fixed number of repeats.
    """
    workload = cell.context.workload
    ended = partial(StoppingRecord, repeats=repeats, half_width=half_width)
    until = workload.until if len(join_results(cell)) == 2 else None
    if until and workload.repeats > 1 and cell.is_first:
        known = "no interval yet" if half_width is None else f"speedup known to ±{half_width:.1%}"
        wanted = f"wanted ±{until.half_width:.1%}; {seconds:.0f} s of {until.most_seconds:g}"
        print(f"repeat {repeats} of at most {workload.repeats}: {known}, {wanted}", flush=True)
    if repeats >= workload.repeats:
        return ended(rule="repeats")
    if until and repeats >= (1 if cell.in_turns else FEWEST_COMPARED_REPEATS):
        if half_width is not None and half_width <= until.half_width:
            return ended(rule="half_width")
        if seconds >= until.most_seconds:
            return ended(rule="most_seconds")
    return None


def _sum_seconds(cell: CellEngine, loads: list[Load]) -> float:
    """Return the seconds of all repeats of the loads so far; those of all processes, so that all end after the same repeat."""
    repeats = [of_load for found in join_results(cell).values() for load in loads for of_load in found.get(load, ())]
    turns = [result.records for results in repeats for result in results]
    return sum(request_record.summarise_load(records).duration_s for records in turns)


def _measure_repeat(cell: CellEngine, loads: list[Load], repeat: int) -> None:
    if cell.fits_together:
        for subject, load in order_loads(cell.subjects, loads, repeat):
            run_load(subject, load, repeat)
        return
    for subject in _order_turns(cell.subjects, repeat):
        with cell.open([subject]):
            for load in loads:
                run_load(subject, load, repeat)


def order_loads(subjects: Sequence[S], loads: Iterable[Load], repeat: int) -> Iterator[tuple[S, Load]]:
    """Yield what a repeat measures on subjects that are open together: each load on all that have it, then the next load.

    So one load of all subjects is measured within seconds, and a machine that is slower for a minute slows all of them alike.
    Every second load goes backwards.
    """
    for index, load in enumerate(loads):
        for subject in _order_turns(subjects, repeat + index):
            if load in subject.context.workload.list_loads():
                yield subject, load


def _order_turns(subjects: Sequence[T], repeat: int) -> Iterable[T]:
    """Return the subjects as a repeat measures them: backwards in every second one, so that none is always the first."""
    return subjects if repeat % 2 == 0 else reversed(subjects)


def run_load(subject: Subject, load: Load, repeat: int) -> None:
    """Measure one repeat of one load, and add it to the subject's results.

    All first turns are answered, then the second turns of questions that have one and were answered, and so on. A later turn
    follows the subject's own earlier answers, those of its first kind of decoding.
    """
    context, found = subject.context, dict[str, list[LoadResult]]()
    limit = context.workload.limit_prompts(load.concurrency) or len(context.prompts)
    turns = context.list_first_turns(context.prompts.head(limit))
    while turns:
        results = subject.run_turn(turns, load, repeat)
        for kind, result in results.items():
            found.setdefault(kind, []).append(result)
        first = next(iter(results.values()))
        answers = {record.question_id: record for record in first.records if not record.failure_reason}
        answered = [turn for turn in turns if turn.question.id in answers]
        following = [context.build_next_turn(turn, answers[turn.question.id]) for turn in answered]
        turns = [turn for turn in following if turn]
    for kind, turn_results in found.items():
        subject.results.setdefault(kind, {}).setdefault(load, []).append(turn_results)
        if subject.is_first:
            most = context.workload.repeats
            of_most = f" ({repeat + 1} of {'at most ' if context.workload.until else ''}{most})" if most > 1 else ""
            found_words = _describe_turns(turn_results, subject.simulates)
            print(f"{subject.name}, {kind}, {load}{of_most}: {found_words}", flush=True)


def _describe_turns(turns: list[LoadResult], simulates: bool) -> str:
    summary = request_record.summarise_load([record for result in turns for record in result.records])
    cycles, accepted = sum_counts(turns)
    tau = "acceptance simulated, " if simulates else f"tau {1 + accepted / cycles:.3f}, " if cycles else ""
    answered = f"{summary.completed} of {summary.requests} answered"
    return f"{tau}{summary.output_throughput:.1f} output tokens/s, {answered}, {summary.duration_s:.1f} s"


def sum_counts(results: list[LoadResult]) -> tuple[int, int]:
    """Return (verify cycles, accepted draft tokens)."""
    counts = [record.counts for result in results for record in result.records if record.counts]
    return sum(c.cycles for c in counts), sum(c.accepted for c in counts)


def list_records(repeats: RepeatResults) -> RepeatRecords:
    return [[result.records for result in turns] for turns in repeats]


def join_results(cell: CellEngine) -> ResultsByKind:
    return {kind: loads for subject in cell.subjects for kind, loads in subject.results.items()}


def pool_speedup(cell: CellEngine, load: Load) -> Speedup:
    """Return the speedup of answers that were decoded both ways in turns."""
    results = join_results(cell)
    answers, plain = (
        [[record for result in turns for record in result.records] for turns in results[kind][load]]
        for kind in (SPECULATIVE, PLAIN)
    )
    return points.pool_speedup(answers, plain, cell.context.workload.prompts)


def _measure_widest_half(cell: CellEngine, loads: list[Load]) -> float | None:
    """Return the widest of the loads' speedup intervals, as half of it and a share; None where a load has none."""
    results = join_results(cell)
    if len(results) < 2:
        return None
    halves = []
    for load in loads:
        if cell.in_turns:
            found: Speedup | None = pool_speedup(cell, load)
        else:
            both = (points.summarise_repeats(list_records(results[kind][load])) for kind in (SPECULATIVE, PLAIN))
            found = points.average_speedup(*both)
        halves.append(found.half_width if found else None)
    known = [half for half in halves if half is not None]
    return max(known) if len(known) == len(halves) else None
