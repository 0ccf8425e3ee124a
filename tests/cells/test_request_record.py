"""Latency and throughput from hand-made events, against slow and obvious counting."""

import random
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from stages.cells import request_record
from stages.cells.request_record import RequestRecord


def make_record(sent_s: float, events: list[tuple[float, int]], **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "id": "a", "due": sent_s, "sent": sent_s, "ended": events[-1][0] if events else sent_s, "events": events,
        "input_tokens": 10, "output_tokens": sum(n for _, n in events), "finish_reason": "length",
        "failure_reason": None,
    }  # fmt: skip
    return RequestRecord(**fields | changes)


def test_a_request_by_hand() -> None:
    """The first token after 0.1 s; 0.2 s later three at once, 0.05 s later the last of five."""
    r = make_record(0.9, [(1.0, 1), (1.2, 3), (1.25, 1)])
    assert r.ttft_s == pytest.approx(0.1)
    assert r.e2e_s == pytest.approx(0.35)
    assert r.tpot_s == pytest.approx(0.25 / 4)
    assert r.chunk_gaps_s() == pytest.approx([0.2, 0.05])
    assert r.token_gaps_s() == pytest.approx([0.2 / 3, 0.2 / 3, 0.2 / 3, 0.05])


def make_records(seed: int) -> list[RequestRecord]:
    rng = random.Random(seed)
    records = []
    for index in range(40):
        due = rng.uniform(0, 5)
        sent = due + rng.expovariate(3)
        times = np.cumsum([rng.expovariate(8) for _ in range(rng.randint(1, 30))]) + sent
        failed = "timeout" if rng.random() < 0.2 else None
        events = [(float(t), rng.randint(1, 5)) for t in times]
        records.append(
            make_record(sent, events, id=str(index), due=due, failure_reason=failed, input_tokens=rng.randint(1, 900))
        )
    return records


def compute_percentile(values: list[float], percent: float) -> float:
    """A percentile by the book: the sorted values at equal distances from 0 to 100%, straight lines between."""
    values = sorted(values)
    position = percent / 100 * (len(values) - 1)
    low = int(position)
    return values[low] + (position - low) * (values[min(low + 1, len(values) - 1)] - values[low])


@pytest.mark.parametrize("seed", range(5))
def test_a_summary_is_what_counting_token_by_token_gives(seed: int) -> None:
    records = make_records(seed)
    begun = min(r.due for r in records)
    answered = [r for r in records if not r.failure_reason]
    truth: dict[str, list[float]] = {
        name: [] for name in ("ttft_s", "tpot_s", "itl_s", "chunk_gap_s", "e2e_s", "wait_s")
    }
    for r in answered:
        truth["wait_s"].append(r.sent - r.due)
        previous_s = None
        for time_s, output_tokens in r.events:
            if previous_s is None:
                truth["ttft_s"].append(time_s - r.sent)
            else:
                truth["chunk_gap_s"].append(time_s - previous_s)
                for _ in range(output_tokens):
                    truth["itl_s"].append((time_s - previous_s) / output_tokens)
            previous_s = time_s
        truth["e2e_s"].append(r.events[-1][0] - r.sent)
        if r.output_tokens > 1:
            truth["tpot_s"].append((r.events[-1][0] - r.events[0][0]) / (r.output_tokens - 1))
    found = asdict(request_record.summarise_load(records))
    for name, values in truth.items():
        assert found[name]["mean"] == pytest.approx(sum(values) / len(values)), name
        for percent in (50, 90, 99):
            assert found[name][f"p{percent}"] == pytest.approx(compute_percentile(values, percent)), name
    duration = max(r.ended for r in records) - begun
    output_tokens = sum(n for r in answered for _, n in r.events)
    input_tokens = sum(r.input_tokens for r in answered)
    assert found["duration_s"] == pytest.approx(duration)
    assert found["output_throughput"] == pytest.approx(output_tokens / duration)
    assert found["total_throughput"] == pytest.approx((output_tokens + input_tokens) / duration)
    assert found["request_throughput"] == pytest.approx(len(answered) / duration)
    assert (found["requests"], found["completed"], found["failed"]) == (
        40,
        len(answered),
        {"timeout": 40 - len(answered)},
    )
    clock = np.linspace(begun, begun + duration, 200_001)
    in_flight = sum(((clock >= r.sent) & (clock < r.events[-1][0])).astype(int) for r in answered)
    assert found["mean_at_once"] == pytest.approx(np.mean(in_flight), rel=1e-3)
