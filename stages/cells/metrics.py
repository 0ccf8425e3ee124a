"""Metrics of benchmark cells, computed once for all three benchmark stages; docs/metrics.md defines them.

tau is pooled over verify cycles, its interval over clusters (cells/interval.py).

Letters: N rows (answers or requests), C clusters, R repeats, S num_steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.cells import interval
from stages.cells.torch_records import CellMetrics, PromptRow, RepeatSpeeds, TreeAcceptanceRates
from stages.trees import accept_length

AnswerRows = Sequence[PromptRow]

SPEED_COLUMNS = ("output_tokens", "e2e_latency_s", "baseline_output_tokens", "baseline_e2e_latency_s")


@dataclass(frozen=True)
class AcceptanceMetrics:
    """How many draft tokens the verify cycles accepted."""

    tau: float
    tau_low: float | None  # None with one cluster, or without clusters
    tau_high: float | None
    accept_rate: float
    cycles: int
    accepted: int

    def build_rates(self, num_draft_tokens: int) -> TreeAcceptanceRates:
        """Return the figures as cells hold them; the node accept rate is a share of the drafts verified, without the root."""
        return TreeAcceptanceRates(
            tau=self.tau,
            tau_low=self.tau_low,
            tau_high=self.tau_high,
            accept_rate=self.accept_rate,
            node_accept_rate=self.accepted / max(1, self.cycles * (num_draft_tokens - 1)),
        )


def pool_acceptance(
    accepted: Sequence[int] | np.ndarray,
    cycles: Sequence[int] | np.ndarray,
    num_steps: int,
    cluster_names: Sequence[str] | None,
) -> AcceptanceMetrics:
    """Pool accepted draft tokens [N] and verify cycles [N]. Without `cluster_names` [N] there is no interval of tau."""
    drafts, passes = np.asarray(accepted, dtype=np.int64), np.asarray(cycles, dtype=np.int64)
    tau, ends = accept_length.compute_tau(drafts, passes), None
    if cluster_names is not None:
        ends = interval.compute_tau_interval(
            interval.sum_by_cluster(cluster_names, drafts), interval.sum_by_cluster(cluster_names, passes), num_steps
        )
    low, high = ends or (None, None)
    return AcceptanceMetrics(tau, low, high, (tau - 1) / num_steps, int(passes.sum()), int(drafts.sum()))


def count_accepted_lengths(accepted: Iterable[Sequence[int]], num_steps: int) -> list[int]:
    """Return how many cycles accepted 0, 1, ... S draft tokens, from the accepted counts of each answer's cycles."""
    histogram = np.zeros(num_steps + 1, dtype=np.int64)
    for counts in accepted:
        histogram += np.bincount(np.asarray(counts, dtype=np.int64), minlength=num_steps + 1)
    return histogram.tolist()


def add_histograms(histograms: Iterable[Sequence[int]], num_steps: int) -> list[int]:
    """Add up histograms of at most S + 1 counts."""
    total = np.zeros(num_steps + 1, dtype=np.int64)
    for histogram in histograms:
        total[: len(histogram)] += np.asarray(histogram, dtype=np.int64)
    return total.tolist()


# Of a torch cell, whose rows hold plain and speculative decoding of the same prompt


def compute_cell_metrics(rows: AnswerRows, num_steps: int, num_draft_tokens: int, prompt_set: str) -> CellMetrics:
    """Return the metrics of a shape; `prompt_set` is the workload's."""
    pooled = pool_acceptance(
        [row.accepted for row in rows], [row.cycles for row in rows], num_steps, name_clusters(rows, prompt_set)
    )
    tokens, seconds, plain_tokens, plain_seconds = (sum(row[column] for row in rows) for column in SPEED_COLUMNS)
    output_tok_s, baseline_tok_s = tokens / seconds, plain_tokens / plain_seconds
    low, high = interval.compute_speedup_interval(*collect_speed_columns(rows, prompt_set)) or (None, None)
    identical = [row.identical for row in rows if row.identical is not None]
    return CellMetrics(
        **dict(pooled.build_rates(num_draft_tokens)),
        prefill_latency_s=float(np.mean([row.prefill_latency_s for row in rows])),
        e2e_latency_s=seconds / len(rows),
        output_tok_s=output_tok_s,
        baseline_output_tok_s=baseline_tok_s,
        speedup=output_tok_s / baseline_tok_s,
        speedup_low=low,
        speedup_high=high,
        identical_share=float(np.mean(identical)) if identical else None,
    )


def measure_answers_half_width(rows: AnswerRows, prompt_set: str) -> float | None:
    """Return half of the speedup's interval as a share of the speedup; None without an interval."""
    columns = collect_speed_columns(rows, prompt_set)
    tokens, seconds, plain_tokens, plain_seconds = (float(column.sum()) for column in columns)
    speedup = tokens / seconds / (plain_tokens / plain_seconds)
    return interval.compute_relative_half(interval.compute_speedup_interval(*columns), speedup)


def summarise_repeats(rows: AnswerRows, prompt_set: str) -> list[RepeatSpeeds]:
    """Return the speeds and the speedup of each repeat alone; they show how far the machine drifts."""
    tokens, seconds, plain_tokens, plain_seconds = (
        column.sum(0) for column in collect_speed_columns(rows, prompt_set)
    )  # [R] each
    speed, plain = tokens / seconds, plain_tokens / plain_seconds
    return [
        RepeatSpeeds(output_tok_s=float(a), baseline_output_tok_s=float(b), speedup=float(a / b))
        for a, b in zip(speed, plain, strict=True)
    ]


def collect_speed_columns(rows: AnswerRows, prompt_set: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return SPEED_COLUMNS as [C, R] each, summed over the answers of a cluster in a repeat."""
    tokens, seconds, plain_tokens, plain_seconds = (sum_by_cluster(rows, name, prompt_set) for name in SPEED_COLUMNS)
    return tokens, seconds, plain_tokens, plain_seconds


def sum_by_cluster(rows: AnswerRows, column: str, prompt_set: str) -> np.ndarray:
    """Return a column's sums [C, R]."""
    values = np.zeros((len(rows), 1 + max(row.repeat for row in rows)), dtype=type(rows[0][column]))
    for number, row in enumerate(rows):
        values[number, row.repeat] = row[column]
    return interval.sum_by_cluster(name_clusters(rows, prompt_set), values)


def name_clusters(rows: AnswerRows, prompt_set: str) -> list[str]:
    """Return the cluster of each row [N]."""
    return [interval.get_cluster(prompt_set, row.id) for row in rows]
