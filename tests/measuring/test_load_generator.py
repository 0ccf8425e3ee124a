"""The load generator against a server that streams at times we set."""

import asyncio
import math
import time

import numpy as np
import pytest

from stages.cells import request_record
from stages.engines import sse
from stages.engines.sse import ReadMessage
from stages.measuring import load_generator
from stages.measuring.load_generator import Arrivals
from tests.engines.misbehaving_server import Fake, Streamed
from tests.measuring.loads import SCHEDULE, add_sglang_pages, make_requests, run_load, start_load


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_times_and_tokens_are_those_of_the_schedule(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends a chunk a while after the one before it was noted, so that they are no one event, and each must be timed
    between two of the server's times, however late a busy machine is.
    """
    read: list[request_record.RequestRecord] = []

    class Watched(load_generator.AnswerStream):
        def __init__(self, record: request_record.RequestRecord, read_message: ReadMessage) -> None:
            super().__init__(record, read_message)
            read.append(record)

    def noted() -> bool:
        since = time.perf_counter() - 2 * sse.TOGETHER_S
        events = [event for record in read for event in record.events]
        return len(events) == sum(map(len, fake.streams)) and all(time_s < since for time_s, _ in events)

    monkeypatch.setattr(load_generator, "AnswerStream", Watched)
    with add_sglang_pages(Fake(lambda *_: Streamed(SCHEDULE, ready=noted))) as fake:
        found = run_load(fake.url, make_requests(2), Arrivals(math.inf, 1, 0), engine=engine)
    for record, arrived, sent_times in zip(found.records, fake.arrived, fake.streams, strict=True):
        assert record.failure_reason is None
        assert [tokens for _, tokens in record.events] == [1, 3, 1, 4]
        assert (record.output_tokens, record.input_tokens, record.finish_reason) == (9, 7, "length")
        assert record.text == "".join(f"w{i} " for i in range(9))
        order = [record.due, record.sent, arrived]
        for truth, (time_s, _) in zip(sent_times, record.events, strict=True):
            order += [truth, time_s]
        assert [*order, record.ended] == sorted([*order, record.ended])
        assert sent_times[0] - arrived <= record.ttft_s <= sent_times[1] - record.sent
        assert record.e2e_s >= sent_times[3] - arrived >= SCHEDULE[3][0] - SCHEDULE[0][0]
        assert len(record.token_gaps_s()) == 8
    summary = request_record.summarise_load(found.records)
    assert summary.output_tokens == 18
    assert summary.duration_s >= fake.streams[1][3] - fake.arrived[0]


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    due = Arrivals(8.0, None, 7).sample_due_s(20_000)
    gaps = np.diff(due)
    assert due[0] == 0.0 and (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.02)
    # The largest distance to the exponential distribution; by Kolmogorov and Smirnov 1.63 / sqrt(n) at 1%.
    ordered = np.sort(gaps)
    distance = np.abs(np.arange(1, len(gaps) + 1) / len(gaps) - (1 - np.exp(-8 * ordered))).max()
    assert distance < 1.63 / math.sqrt(len(gaps))
    assert np.abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03  # without memory
    assert (due == Arrivals(8.0, 3, 7).sample_due_s(20_000)).all()
    assert (due != Arrivals(8.0, None, 8).sample_due_s(20_000))[1:].all()
    assert not Arrivals(math.inf, 4, 7).sample_due_s(5).any()


@pytest.mark.parametrize("rate", [math.inf, 400.0])
def test_the_concurrency_limit_is_kept_and_used_in_full(rate: float) -> None:
    """The server answers six when six have come: fewer at once would wait for ever."""

    def wait_for_six(index: int) -> Streamed:
        return Streamed([(0.0, 1), (0.01, 2)], ready=lambda: len(fake.arrived) >= 6 * (index // 6 + 1))

    with Fake(lambda _, index: wait_for_six(index)) as fake:
        found = run_load(fake.url, make_requests(60), Arrivals(rate, 6, 1))
    assert all(r.failure_reason is None for r in found.records)
    assert fake.max_at_once == 6
    sent_times, end_times = (sorted(times) for times in zip(*((r.sent, r.ended) for r in found.records), strict=True))
    assert [r.sent for r in found.records] == sent_times  # in their order
    # Waiting is not the server's time: a request's clock starts when one of the six before it has ended.
    assert all(start >= end for start, end in zip(sent_times[6:], end_times, strict=False))
    assert all(r.due <= r.sent for r in found.records)


def test_failures_are_counted_by_reason_and_none_is_lost() -> None:
    half = [(0.01, 1), (0.02, 1)]
    replies = [
        500, 503, 400, "reset", Streamed(half, failure="reset"), Streamed(half, failure="close"), Streamed(half, failure="hang"),
        Streamed(half, failure="out of memory"), Streamed(half, failure="too long"), Streamed(half, finish="abort"),
        Streamed([]), "half", Streamed(half),
    ]  # fmt: skip
    with Fake(lambda _, index: replies[index]) as fake:
        found = run_load(fake.url, make_requests(len(replies)), Arrivals(math.inf, 1, 0), request_timeout_s=1.5)
    reasons = [r.failure_reason for r in found.records]
    assert reasons == [
        "http 500", "http 503", "refused", "connection", "connection", "cut", "timeout", "error", "refused", "aborted",
        "cut", "cut", None,
    ]  # fmt: skip
    assert "400" in found.records[2].failure_message and "too long" in found.records[8].failure_message
    assert [r.output_tokens for r in found.records[4:10]] == [2, 2, 2, 2, 2, 2]  # what had come until then
    summary = request_record.summarise_load(found.records)
    assert summary.completed == 1 and sum(summary.failed.values()) == len(replies) - 1
    assert len(fake.bodies) == len(replies)  # nothing is asked again


def test_a_deadline_is_from_sending_to_the_last_byte() -> None:
    """No single wait is long, and the stream would come to its end."""
    with Fake(lambda *_: Streamed([(0.02 * i, 1) for i in range(1, 100)])) as fake:
        found = run_load(fake.url, make_requests(3), Arrivals(math.inf, 1, 0), request_timeout_s=0.45)
    assert [r.failure_reason for r in found.records] == ["timeout"] * 3
    assert all(r.ended - r.sent >= 0.45 and len(r.events) < 99 for r in found.records)
    assert "within 0.45 s" in found.records[0].failure_message


def test_a_server_that_ends_in_the_warm_up_says_so_itself() -> None:
    """Bug: llama-server aborted at its first request, and all that was told was a payload that is not complete."""
    checks = iter([None, ValueError("the llama.cpp server ended with status 134; its log")])

    def check() -> None:
        if error := next(checks):
            raise error

    with Fake(lambda *_: 500) as fake, pytest.raises(ValueError, match="ended with status 134; its log"):
        run_load(fake.url, make_requests(5), warmup=make_requests(2), check=check)


def test_a_load_that_is_cancelled_leaves_nothing_behind() -> None:
    async def cancelled(fake: Fake) -> int:
        task = asyncio.create_task(start_load(fake.url, make_requests(20), Arrivals(math.inf, 5, 0)))
        while len(fake.streams) < 5:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks()) - 1

    with Fake(lambda *_: Streamed([(0.05 * i, 1) for i in range(2000)])) as fake:
        assert asyncio.run(cancelled(fake)) == 0
        until = time.monotonic() + 60
        while fake.given_up < 5 and time.monotonic() < until:
            time.sleep(0.02)
    assert fake.given_up == 5 and len(fake.bodies) == 5  # its connections are closed, and no more were opened
