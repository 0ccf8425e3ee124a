"""The points of a cell of loads (results/served_records.py), from the records of its requests, for any engine.

A point is one answer length at one concurrency. Its records are nested lists: of each repeat, of each turn, of each request.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stages.grading import grade
from stages.results import clusters, metrics
from stages.serving import latency
from stages.serving.latency import RequestRecord
from stages.serving.spec_counters import AcceptanceCounts

RepeatRecords = list[list[list[RequestRecord]]]  # repeat -> turn -> requests


class PointLoad(NamedTuple):
    """The load of a point."""

    max_new_tokens: int
    concurrency: int | None  # None: no limit
    request_rate: float | str  # requests/s, or "inf"


class PointRequest(NamedTuple):
    """A request of a point, with its place in the nested lists."""

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


def grade_first_turns(
    requests: Sequence[PointRequest],
    references: Mapping[str, str],
    decode_text: Callable[[RequestRecord], str],
    allow_unsandboxed_code: bool,
) -> list[bool | None]:
    """Return whether each answer is right; None for later turns and for failed requests."""
    return [
        None
        if turn or record.failure_reason
        else grade.grade_answer(references[record.question_id], decode_text(record), allow_unsandboxed_code)
        for _, turn, record in requests
    ]


def build_point(
    load: PointLoad,
    repeats: RepeatRecords,
    grades: list[bool | None],
    references: Mapping[str, str],
    acceptance: dict[str, Any] | None,
    warnings: list[str],
) -> dict[str, Any]:
    """Return a point (served_records.LoadPoint). `grades` has one entry for each of `list_requests`."""
    requests = list_requests(repeats)
    return {
        "max_new_tokens": load.max_new_tokens,
        "concurrency": load.concurrency,
        "request_rate": load.request_rate,
        "loads": [latency.summarise_load(latency.join_turns(turns)) for turns in repeats],
        "acceptance": acceptance,
        "quality": _summarise_quality(requests, grades, references),
        "requests": [
            latency.make_request_row(*request, correct) for request, correct in zip(requests, grades, strict=True)
        ],
        "warnings": warnings,
    }


def describe_point(point: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """Return a point's tau and speeds in words."""
    speed, plain = (float(np.mean([load["output_throughput"] for load in p["loads"]])) for p in (point, baseline))
    load = f"{point['max_new_tokens']} tokens, {point['concurrency'] or 'all'} at once"
    return f"{load}: tau {point['acceptance']['tau']:.3f}, {speed:.1f} tokens/s, plain {plain:.1f}"


def _summarise_quality(
    requests: Sequence[PointRequest], grades: list[bool | None], references: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return None if no answer was graded."""
    graded = [
        (references[request.record.question_id], correct)
        for request, correct in zip(requests, grades, strict=True)
        if correct is not None
    ]
    return grade.summarise_grades([text for text, _ in graded], [correct for _, correct in graded]) if graded else None


def pool_counts(
    counts: list[AcceptanceCounts],
    records: list[RequestRecord] | None,
    prompt_set: str,
    num_steps: int,
    num_draft_tokens: int,
    engine_figures: dict[str, Any],
) -> dict[str, Any]:
    """Return a point's acceptance (served_records.PointAcceptance). `records` are those of `counts`; None: no interval."""
    names = None
    if records is not None:
        names = [clusters.get_cluster(prompt_set, r.question_id) for r in records]
    pooled = metrics.pool_acceptance([c.accepted for c in counts], [c.cycles for c in counts], num_steps, names)
    return pooled.list_rates(num_draft_tokens) | {
        "cycles": pooled.cycles,
        "accepted": pooled.accepted,
        "histogram": metrics.add_histograms([c.histogram for c in counts], num_steps),
        "clipped": all(c.clipped for c in counts),
        "engine": engine_figures,
    }
