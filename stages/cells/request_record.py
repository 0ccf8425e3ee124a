"""The record of a request, and of a load: latency, throughput and accepted drafts, as docs/metrics.md defines them.

Times are seconds of one clock, the client's. Letters: N requests, E token events of a request.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class AcceptanceCounts(NamedTuple):
    """Counts of a request, or of a load; tau is (accepted + cycles) / cycles."""

    cycles: int
    accepted: int  # drafts, without those beyond the end
    histogram: list[int]  # the engine's: cycles that accepted i drafts, those beyond the end too


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
    itl_s: LatencyDistribution | None
    chunk_gap_s: LatencyDistribution | None
    e2e_s: LatencyDistribution | None
    wait_s: LatencyDistribution | None


@dataclass
class RequestRecord:
    """One request, as the client saw it."""

    id: str
    due: float = 0.0  # when it arrived; it may have waited before it was sent
    sent: float = 0.0
    ended: float = 0.0  # the last byte, or the failure
    events: list[tuple[float, int]] = field(default_factory=list)  # [E]: when tokens came, and how many at once
    input_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    failure_reason: str | None = None  # a short reason to count by; None: answered
    failure_message: str = ""
    text: str = ""
    ids: list[int] = field(default_factory=list)  # of the answer, if the server sends them
    engine_meta: dict[str, Any] = field(default_factory=dict)  # the engine's own figures of this request
    counts: AcceptanceCounts | None = None  # by our definition
    process_s: float | None = None  # CPU time of the torch engine's process meanwhile, of all threads; None on a GPU
    divergence_margin: float | None = None  # between the target's two best logits where it parts from plain decoding's

    @property
    def question_id(self) -> str:
        """Return the question's id; a record's id is `id#turn`."""
        return self.id.rpartition("#")[0]

    @property
    def ttft_s(self) -> float:
        return self.events[0][0] - self.sent

    @property
    def e2e_s(self) -> float:
        return self.events[-1][0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first; None for one token."""
        if self.output_tokens < 2:
            return None
        return (self.events[-1][0] - self.events[0][0]) / (self.output_tokens - 1)

    def chunk_gaps_s(self) -> list[float]:
        """Return the times [E - 1] from event to event."""
        return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(self.events)]

    def token_gaps_s(self) -> list[float]:
        """Return the times between tokens [tokens after the first event]; the tokens of an event share the gap before it."""
        gaps = zip(self.chunk_gaps_s(), self.events[1:], strict=True)
        return [gap / tokens for gap, (_, tokens) in gaps for _ in range(tokens)]


def summarise_load(records: list[RequestRecord]) -> LoadSummary:
    """Return the figures of N >= 1 records."""
    answered = [r for r in records if not r.failure_reason]
    duration_s = max(r.ended for r in records) - min(r.due for r in records)
    input_tokens, output_tokens = sum(r.input_tokens for r in answered), sum(r.output_tokens for r in answered)
    return LoadSummary(
        requests=len(records),
        completed=len(answered),
        failed=dict(Counter(r.failure_reason for r in records if r.failure_reason)),
        duration_s=duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_throughput=len(answered) / duration_s,
        output_throughput=output_tokens / duration_s,
        total_throughput=(input_tokens + output_tokens) / duration_s,
        mean_at_once=sum(r.e2e_s for r in answered) / duration_s,
        ttft_s=summarise_distribution([r.ttft_s for r in answered]),
        tpot_s=summarise_distribution([s for r in answered if (s := r.tpot_s) is not None]),
        itl_s=summarise_distribution([s for r in answered for s in r.token_gaps_s()]),
        chunk_gap_s=summarise_distribution([s for r in answered for s in r.chunk_gaps_s()]),
        e2e_s=summarise_distribution([r.e2e_s for r in answered]),
        wait_s=summarise_distribution([r.sent - r.due for r in answered]),
    )


def summarise_distribution(values: list[float]) -> LatencyDistribution | None:
    """Return mean and percentiles, interpolated linearly as in numpy, SGLang and vLLM; None without values."""
    import numpy as np  # only where a load is measured

    if not values:
        return None
    return LatencyDistribution(float(np.mean(values)), *np.percentile(values, (50, 90, 99)).tolist())


def join_turns(turns: list[list[RequestRecord]]) -> list[RequestRecord]:
    """Return the records of all turns, shifted in time so that each turn follows the one before without a gap.

    In the gap the prompts of the next turn are rendered. The records are changed in place.
    """
    joined: list[RequestRecord] = []
    for records in turns:
        if joined:
            gap_s = min(r.due for r in records) - max(r.ended for r in joined)
            for r in records:
                r.due, r.sent, r.ended = r.due - gap_s, r.sent - gap_s, r.ended - gap_s
                r.events = [(time_s - gap_s, tokens) for time_s, tokens in r.events]
        joined += records
    return joined
