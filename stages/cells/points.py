"""The points of a cell, from the records of its requests, for any engine; docs/metrics.md defines the metrics.

A point is one answer length at one concurrency. Its records are nested lists: of each repeat, of each turn, of each request.
tau is pooled over verify cycles, its interval over clusters (cells/interval.py). numpy is imported where figures are pooled.

Letters: N requests, C clusters, R repeats, S num_steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from stages.cells import interval, request_record
from stages.cells.cell import Acceptance, GradeSummary, LoadPoint, RequestRow, Speedup
from stages.cells.request_record import AcceptanceCounts, LoadSummary, RequestRecord
from stages.params.tree_shape import Load

if TYPE_CHECKING:
    import numpy as np

MIN_JUDGED_CYCLES = 100  # of a draft that has one in twenty accepted, 100 cycles without any are one load in 170
RepeatRecords = list[list[list[RequestRecord]]]  # repeat -> turn -> requests


def summarise_repeats(repeats: RepeatRecords) -> list[LoadSummary]:
    """Return the figures of each repeat; the times of later turns are shifted."""
    return [request_record.summarise_load(request_record.join_turns(turns)) for turns in repeats]


def average_speedup(loads: Sequence[LoadSummary], plain: Sequence[LoadSummary]) -> Speedup | None:
    """Return the mean speedup over the repeats of a load, of one or more; None where one of them answered nothing."""
    throughputs = [(one.output_throughput, other.output_throughput) for one, other in zip(loads, plain, strict=True)]
    if not all(map(all, throughputs)):
        return None
    speedups = [speculative / plain for speculative, plain in throughputs]
    low, high = interval.compute_mean_interval(speedups) or (None, None)
    return Speedup(speedup=fmean(speedups), speedup_low=low, speedup_high=high)


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
    loads = summarise_repeats(repeats)
    rows, marks = list[RequestRow](), list[bool | None]()
    for repeat, turns in enumerate(repeats):
        for turn, records in enumerate(turns):
            for r in records:
                marks.append(grade_answer(r) if grade_answer and not turn and not r.failure_reason else None)
                rows.append(_make_request_row(r, repeat=repeat, turn=turn, correct=marks[-1]))
    known = [correct for correct in marks if correct is not None]
    return LoadPoint(
        max_new_tokens=load.max_new_tokens,
        concurrency=load.concurrency,
        request_rate=request_rate,
        loads=loads,
        acceptance=acceptance,
        quality=GradeSummary.of_marks(known, grading) if known else None,
        requests=rows,
        warnings=warnings,
        **more,
    )


def _make_request_row(r: RequestRecord, repeat: int, turn: int, correct: bool | None) -> RequestRow:
    answer, done = json.dumps(r.ids) if r.ids else r.text, not r.failure_reason
    return RequestRow(
        repeat=repeat,
        id=r.question_id,
        turn=turn,
        prompt_tokens=r.input_tokens,
        output_tokens=r.output_tokens,
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
        divergence_margin=r.divergence_margin,
    )


# Pooled over requests


def pool_acceptance(
    counts: Sequence[AcceptanceCounts], cluster_names: Sequence[str], num_steps: int, num_draft_tokens: int
) -> Acceptance:
    """Pool the counts of requests [N]. The node accept rate is a share of the drafts verified, without the root."""
    import numpy as np

    from stages.trees import accept_length

    accepted, cycles = (np.array([count[i] for count in counts], dtype=np.int64) for i in (1, 0))
    tau = accept_length.compute_tau(accepted, cycles)
    by_cluster = [interval.sum_by_cluster(cluster_names, values[:, None]) for values in (accepted, cycles)]
    low, high = interval.compute_tau_intervals(by_cluster[0], by_cluster[1], [num_steps])[0] or (None, None)
    passes, drafts = int(cycles.sum()), int(accepted.sum())
    histogram = np.zeros(num_steps + 1, dtype=np.int64)
    for count in counts:  # of at most S + 1 numbers each
        histogram[: len(count.histogram)] += np.asarray(count.histogram, dtype=np.int64)
    return Acceptance(
        tau=tau,
        tau_low=low,
        tau_high=high,
        accept_rate=(tau - 1) / num_steps,
        node_accept_rate=drafts / max(1, passes * (num_draft_tokens - 1)),
        cycles=passes,
        accepted=drafts,
        histogram=histogram.tolist(),
        engine={},
    )


def pool_speedup(
    repeats: Sequence[Sequence[RequestRecord]], plain_repeats: Sequence[Sequence[RequestRecord]], prompt_set: str
) -> Speedup:
    """Return the speedup of answers over plain ones of the same prompts, pooled; the records of each repeat.

    Its interval is over prompts and repeats. `prompt_set` is the workload's, by which prompts are clustered.
    """
    columns = [*_sum_speed_columns(repeats, prompt_set), *_sum_speed_columns(plain_repeats, prompt_set)]
    tokens, seconds, plain_tokens, plain_seconds = (float(column.sum()) for column in columns)
    low, high = interval.compute_speedup_interval(*columns) or (None, None)
    return Speedup(speedup=tokens / seconds / (plain_tokens / plain_seconds), speedup_low=low, speedup_high=high)


def _sum_speed_columns(repeats: Sequence[Sequence[RequestRecord]], prompt_set: str) -> tuple[np.ndarray, np.ndarray]:
    """Return output tokens and seconds [C, R] each, summed over the answers of a cluster in a repeat."""
    import numpy as np

    rows = [(repeat, record) for repeat, records in enumerate(repeats) for record in records]
    tokens, seconds = np.zeros((2, len(rows), len(repeats)))
    for number, (repeat, record) in enumerate(rows):
        tokens[number, repeat], seconds[number, repeat] = record.output_tokens, record.e2e_s
    names = [interval.get_cluster(prompt_set, record.question_id) for _, record in rows]
    return interval.sum_by_cluster(names, tokens), interval.sum_by_cluster(names, seconds)
