"""The figures of a load in a cell (docs/metrics.md), apart from measuring: who reads them depends on no client."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatencyDistribution:
    """Mean and percentiles of times in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class LoadSummary:
    """One load, from when its first request was due to when the last ended. A distribution without values is None, not 0."""

    requests: int
    completed: int
    failed: dict[str, int]  # requests by reason
    duration_s: float
    input_tokens: int  # of completed requests, as what follows
    output_tokens: int
    request_throughput: float  # each second
    output_throughput: float
    total_throughput: float
    mean_at_once: float
    ttft_s: LatencyDistribution | None
    tpot_s: LatencyDistribution | None
    itl_s: LatencyDistribution | None  # None too if the server doesn't count tokens
    chunk_gap_s: LatencyDistribution | None
    e2e_s: LatencyDistribution | None
    wait_s: LatencyDistribution | None
