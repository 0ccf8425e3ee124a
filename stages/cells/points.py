"""The points of a cell, from the records of its requests, for any engine.

A point is one answer length at one concurrency. Its records are nested lists: of each repeat, of each turn, of each request.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from stages.cells import interval, metrics, request_record
from stages.cells.cell import Acceptance, GradeSummary, LoadPoint, RequestRow
from stages.cells.request_record import RequestRecord
from stages.params.tree_shape import Load

MIN_JUDGED_CYCLES = 100  # of a draft that has one in twenty accepted, 100 cycles without any are one load in 170
RepeatRecords = list[list[list[RequestRecord]]]  # repeat -> turn -> requests


class PointRequest(NamedTuple):
    """A request of a point, with its indices into the nested lists."""

    repeat: int
    turn: int
    record: RequestRecord


def list_requests(repeats: RepeatRecords) -> list[PointRequest]:
    """Return the requests of all repeats and turns, in order."""
    return [
        PointRequest(number, turn, record)
        for number, turns in enumerate(repeats)
        for turn, records in enumerate(turns)
        for record in records
    ]


def list_throughputs(repeats: RepeatRecords) -> list[float | None]:
    """Return the output tokens/s of each repeat; None where tokens are not counted."""
    return [request_record.summarise_load(request_record.join_turns(turns)).output_throughput for turns in repeats]


def build_point(
    load: Load,
    request_rate: float | str,
    repeats: RepeatRecords,
    acceptance: Acceptance | None,
    warnings: list[str],
    grade_answer: Callable[[RequestRecord], bool] | None = None,
    grading: str = "",
    **more: Any,
) -> LoadPoint:
    """Return a point. `request_rate` is in requests/s, or "inf".

    With `grade_answer` the answers of first turns are graded; `grading` is how, in words.
    """
    requests = list_requests(repeats)
    marks = [grade_answer(r) if grade_answer and not turn and not r.failure_reason else None for _, turn, r in requests]
    known = [correct for correct in marks if correct is not None]
    return LoadPoint(
        max_new_tokens=load.max_new_tokens,
        concurrency=load.concurrency,
        request_rate=request_rate,
        loads=[request_record.summarise_load(request_record.join_turns(turns)) for turns in repeats],
        acceptance=acceptance,
        quality=GradeSummary.of_marks(known, grading) if known else None,
        requests=[_make_request_row(request, correct) for request, correct in zip(requests, marks, strict=True)],
        warnings=warnings,
        **more,
    )


def _make_request_row(request: PointRequest, correct: bool | None) -> RequestRow:
    r = request.record
    answer, done = json.dumps(r.ids) if r.ids else r.text, not r.failure_reason
    return RequestRow(
        repeat=request.repeat,
        id=r.question_id,
        turn=request.turn,
        prompt_tokens=r.input_tokens,
        output_tokens=r.output_tokens if r.is_counted else None,
        cycles=r.counts.cycles if r.counts else None,
        accepted=r.counts.accepted if r.counts else None,
        finish_reason=r.finish_reason,
        failed=r.failure_reason,
        ttft_s=r.ttft_s if done else None,
        tpot_s=r.tpot_s if done else None,
        e2e_s=r.e2e_s if done else None,
        wait_s=r.sent - r.due,
        answer=hashlib.sha256(answer.encode()).hexdigest()[:16] if done else None,
        correct=correct,
        process_s=r.process_s,
        divergence_margin=r.divergence_margin,
    )


def pool_counts(records: Iterable[RequestRecord], prompt_set: str, num_steps: int, num_draft_tokens: int) -> Acceptance:
    """Return the acceptance of a point whose engine counts each request; it has an interval."""
    counted = [(record, record.counts) for record in records if record.counts]
    names = [interval.get_cluster(prompt_set, record.question_id) for record, _ in counted]
    return metrics.pool_acceptance([counts for _, counts in counted], names, num_steps, num_draft_tokens)


def describe_point(point: LoadPoint | None, baseline: LoadPoint | None) -> str:
    """Return the tau and speeds of a load in words; one of the two may not have been measured."""
    some = point or baseline
    assert some is not None, "a load has a point"
    told: list[str] = []
    if point is not None:
        told += [f"tau {point.acceptance.tau:.3f}"] if point.acceptance else []
        told.append(format_throughput(point.mean_throughput))
    if baseline is not None:
        told.append(f"plain {format_throughput(baseline.mean_throughput)}")
    return f"{some.load}: {', '.join(told)}"


def format_throughput(throughput: float | None) -> str:
    return "tokens not counted" if throughput is None else f"{throughput:.1f} output tokens/s"
