"""Metrics of a point, from the records of its requests; docs/metrics.md defines them.

tau is pooled over verify cycles, its interval over clusters (cells/interval.py).

Letters: N requests, C clusters, R repeats, S num_steps.
"""

from collections.abc import Sequence

import numpy as np

from stages.cells import interval
from stages.cells.cell import Acceptance, Speedup
from stages.cells.request_record import AcceptanceCounts, RequestRecord
from stages.trees import accept_length


def pool_acceptance(
    counts: Sequence[AcceptanceCounts], cluster_names: Sequence[str], num_steps: int, num_draft_tokens: int
) -> Acceptance:
    """Pool the counts of requests [N]. The node accept rate is a share of the drafts verified, without the root."""
    accepted, cycles = (np.array([count[i] for count in counts], dtype=np.int64) for i in (1, 0))
    tau = accept_length.compute_tau(accepted, cycles)
    by_cluster = [interval.sum_by_cluster(cluster_names, values) for values in (accepted, cycles)]
    low, high = interval.compute_tau_interval(by_cluster[0], by_cluster[1], num_steps) or (None, None)
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
    rows = [(repeat, record) for repeat, records in enumerate(repeats) for record in records]
    tokens, seconds = np.zeros((2, len(rows), len(repeats)))
    for number, (repeat, record) in enumerate(rows):
        tokens[number, repeat], seconds[number, repeat] = record.output_tokens, record.e2e_s
    names = [interval.get_cluster(prompt_set, record.question_id) for _, record in rows]
    return interval.sum_by_cluster(names, tokens), interval.sum_by_cluster(names, seconds)
