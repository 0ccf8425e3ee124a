"""The load generator against a server that streams at times we set."""

import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import load_overhead
from stages.serving import latency, load, server
from stages.serving.load import Arrivals, Ask, Load
from tests.serving.fake import Fake, Streamed

ROOT = Path(__file__).parents[2]
AT_ONCE = Arrivals(math.inf, None, 0)
LATE_S = 0.06  # a busy machine's


def asks(count: int, prompt: Any = None, **changes: Any) -> list[Ask]:
    known = {"prompt": [{"role": "user", "content": "hello"}] if prompt is None else prompt}
    known |= {"max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "ignore_eos": False} | changes
    return [Ask(id=str(number), **known) for number in range(count)]


def run(url: str, wanted: list[Ask], arrivals: Arrivals = AT_ONCE, **how: Any) -> Load:
    settings = {"deadline_s": 5.0, "warmup": [], "section": "benchmark_served.server", "engine": "openai"} | how
    return asyncio.run(load.run(url, "tiny", wanted, arrivals, **settings))


def sglang(fake: Fake) -> Fake:
    fake.pages |= {
        "/flush_cache": b"Cache flushed.",
        "/server_info": {"internal_states": [{"avg_spec_accept_length": 2.5}]},
    }
    return fake


SCHEDULE = [(0.10, 1), (0.20, 3), (0.30, 1), (0.45, 4)]  # s after the request came, tokens


@pytest.mark.parametrize(
    ("engine", "prompt"),
    [("sglang", [1, 2, 3]), ("vllm", [1, 2, 3]), ("sglang", None), ("vllm", None), ("openai", None)],
    ids=["generate", "completions", "chat of sglang", "chat of vllm", "chat"],
)
def test_times_and_tokens_are_those_of_the_schedule(engine: str, prompt: Any) -> None:
    """A busy machine sends late as well, so that the truth is when it did."""
    with sglang(Fake(lambda *_: Streamed(SCHEDULE))) as fake:
        found = run(fake.url, asks(2, prompt), Arrivals(math.inf, 1, 0), engine=engine)
    for record, arrived, sent in zip(found.records, fake.arrived, fake.streams, strict=True):
        assert record.failed is None and record.counted
        assert [tokens for _, tokens in record.events] == [1, 3, 1, 4]
        assert (record.output_tokens, record.input_tokens, record.finish_reason) == (9, 7, "length")
        assert record.text == "".join(f"w{i} " for i in range(9))
        late = [when - truth for (when, _), truth in zip(record.events, sent, strict=True)]
        assert all(0 <= s < LATE_S for s in late)
        assert record.sent <= arrived < record.sent + LATE_S
        assert record.ttft_s >= 0.10 and record.ttft_s == pytest.approx(sent[0] - arrived, abs=LATE_S)
        assert record.e2e_s >= 0.45 and record.e2e_s == pytest.approx(sent[3] - arrived, abs=LATE_S)
        assert record.tpot_s == pytest.approx((sent[3] - sent[0]) / 8, abs=LATE_S / 8)
        assert record.chunk_gaps_s() == pytest.approx(np.diff(sent).tolist(), abs=LATE_S)
        assert len(record.token_gaps_s()) == 8
    told = latency.summary(found.records)
    assert told["output_tokens"] == 18
    assert told["duration_s"] == pytest.approx(fake.streams[1][3] - fake.arrived[0], abs=2 * LATE_S)


def test_a_server_that_does_not_count_is_not_believed_to_send_tokens() -> None:
    with Fake(lambda *_: Streamed(SCHEDULE, counts=False)) as fake:
        found = run(fake.url, asks(2))
    assert all(r.output_tokens == 9 and not r.counted and len(r.events) == 4 for r in found.records)
    assert latency.summary(found.records)["itl_s"] is None


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    due = Arrivals(8.0, None, 7).due_s(20_000)
    gaps = np.diff(due)
    assert due[0] == 0.0 and (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(1 / 8, rel=0.02)
    # The largest distance to the exponential distribution; by Kolmogorov and Smirnov 1.63 / sqrt(n) at 1%.
    ordered = np.sort(gaps)
    distance = np.abs(np.arange(1, len(gaps) + 1) / len(gaps) - (1 - np.exp(-8 * ordered))).max()
    assert distance < 1.63 / math.sqrt(len(gaps))
    assert np.abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03  # without memory
    assert (due == Arrivals(8.0, 3, 7).due_s(20_000)).all()
    assert (due != Arrivals(8.0, None, 8).due_s(20_000))[1:].all()
    assert not Arrivals(math.inf, 4, 7).due_s(5).any()


def test_requests_reach_the_server_when_they_are_due() -> None:
    arrivals = Arrivals(60.0, None, 3)
    with Fake(lambda *_: Streamed([(0.5, 1)])) as fake:  # an open loop waits for nobody
        found = run(fake.url, asks(40), arrivals)
    came = np.array(fake.arrived) - fake.arrived[0]
    assert np.abs(came - arrivals.due_s(40)).max() < LATE_S
    assert max(r.sent - r.due for r in found.records) < LATE_S
    assert found.most_at_once > 20


@pytest.mark.parametrize("rate", [math.inf, 400.0])
def test_never_more_at_once_than_said_and_never_fewer_while_others_wait(rate: float) -> None:
    with Fake(lambda *_: Streamed([(0.02, 1), (0.05, 2)])) as fake:
        found = run(fake.url, asks(60), Arrivals(rate, 6, 1))
    assert found.most_at_once == 6 and fake.most_at_once == 6
    told = latency.summary(found.records)
    assert told["mean_at_once"] > 5  # of 6, to the end of the last ten rounds
    assert [r.sent for r in found.records] == sorted(r.sent for r in found.records)  # in their order
    assert told["wait_s"]["p99"] > 0.3 and told["ttft_s"]["p50"] < 0.02 + LATE_S  # waiting is not the server's


def test_failures_are_counted_by_reason_and_none_is_lost() -> None:
    half = [(0.01, 1), (0.02, 1)]
    said = [
        500, 503, 400, "reset", Streamed(half, wrong="reset"), Streamed(half, wrong="close"), Streamed(half, wrong="hang"),
        Streamed(half, wrong="out of memory"), Streamed(half, wrong="too long"), Streamed(half, finish="abort"),
        Streamed([]), "half", Streamed(half),
    ]  # fmt: skip
    with Fake(lambda _, number: said[number]) as fake:
        found = run(fake.url, asks(len(said)), Arrivals(math.inf, 1, 0), deadline_s=0.5)
    reasons = [r.failed for r in found.records]
    assert reasons == [
        "http 500", "http 503", "refused", "connection", "connection", "cut", "timeout", "error", "refused", "aborted",
        "cut", "cut", None,
    ]  # fmt: skip
    assert "400" in found.records[2].why and "too long" in found.records[8].why
    assert [r.output_tokens for r in found.records[4:10]] == [2, 2, 2, 2, 2, 2]  # what had come until then
    told = latency.summary(found.records)
    assert told["completed"] == 1 and sum(told["failed"].values()) == len(said) - 1
    assert len(fake.bodies) == len(said)  # nothing is asked again


def test_a_deadline_is_from_sending_to_the_last_byte() -> None:
    with Fake(lambda *_: Streamed([(0.1 * i, 1) for i in range(1, 100)])) as fake:  # no single wait is long
        begun = time.monotonic()
        found = run(fake.url, asks(3), Arrivals(math.inf, 1, 0), deadline_s=0.45)
    assert [r.failed for r in found.records] == ["timeout"] * 3 and time.monotonic() - begun < 3
    assert [len(r.events) for r in found.records] == [4] * 3
    assert "within 0.45 s" in found.records[0].why


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_concerns_every_request_ends_the_load(status: int) -> None:
    with Fake(lambda *_: status) as fake, pytest.raises(ValueError, match=f"HTTP {status}") as failed:
        run(fake.url, asks(50), Arrivals(math.inf, 2, 0))
    assert status == 404 or "benchmark_served.server.api_key_env" in str(failed.value)
    assert len(fake.bodies) <= 3


def test_a_server_that_is_gone_is_looked_after() -> None:
    def check() -> None:
        raise ValueError("the sglang server ended with status 7")

    with Fake() as gone:
        pass
    with pytest.raises(ValueError, match="ended with status 7"):
        run(gone.url, asks(5), check=check)
    with pytest.raises(
        ValueError, match=r"can't be asked: .*; is it running\? Correct benchmark_served.server.base_urls"
    ):
        run(gone.url, asks(5), engine=None)


def test_another_model_is_refused_before_anything_is_asked() -> None:
    with Fake(models={"data": [{"id": "other", "owned_by": "sglang"}]}) as fake:
        with pytest.raises(ValueError, match=r"serves other, expected tiny; correct benchmark_served.server.base_urls"):
            run(fake.url, asks(3), engine=None)
        assert not fake.bodies


def test_the_warm_up_counts_nowhere() -> None:
    """Its first request takes long and one fails; the cache is flushed between it and the load."""
    said = {0: Streamed([(0.4, 1)]), 1: 500}
    with sglang(Fake(lambda _, number: said.get(number, Streamed([(0.02, 1)])))) as fake:
        found = run(fake.url, asks(5, [1]), Arrivals(math.inf, 4, 0), warmup=asks(3, [2]), engine="sglang")
    assert len(found.records) == 5 and all(r.ttft_s < 0.3 for r in found.records)
    assert found.warmup_failed == {"http 500": 1} and found.most_at_once == 4
    assert fake.paths == ["/generate"] * 3 + ["/flush_cache?timeout=30"] + ["/generate"] * 5 + ["/server_info"]
    assert [b["input_ids"] for b in fake.bodies] == [[2]] * 3 + [[1]] * 5


def test_a_warm_up_that_fails_whole_stops_it() -> None:
    with (
        Fake(lambda *_: 500) as fake,
        pytest.raises(ValueError, match=r"failed all 2 requests of the warm-up, the first: HTTP 500 .*status 500"),
    ):
        run(fake.url, asks(5), warmup=asks(2))
    with Fake() as fake, pytest.raises(ValueError, match="did not flush its cache: HTTP 404"):  # not an SGLang at all
        run(fake.url, asks(5, [1]), engine="sglang")


def test_a_server_may_come_to_rest_for_longer_than_a_request_may_take() -> None:
    with sglang(Fake(lambda *_: Streamed([(0.02, 1)]))) as fake:
        fake.pages["/flush_cache"] = lambda: time.sleep(0.8) or b""
        found = run(fake.url, asks(1, [1]), deadline_s=0.4, engine="sglang")
    assert found.records[0].failed is None


def test_sglangs_histogram_becomes_our_counts() -> None:
    """9 tokens: the prefill's, cycles of 3, 1 and 4, of which a bonus is cut: so the last accepted 4."""
    said = {
        "spec_accept_histogram": [1, 0, 1, 0, 1],
        "spec_verify_ct": 3,
        "spec_accept_length": 3.0,
        "num_retractions": 0,
    }
    with sglang(Fake(lambda *_: Streamed(SCHEDULE, meta=said))) as fake:
        found = run(fake.url, asks(2, [1]), engine="sglang")
        chat = run(fake.url, asks(1), engine="sglang")
    assert [r.counts for r in found.records] == [(3, 6, 1, True, [1, 0, 1, 0, 1])] * 2
    assert found.records[0].said["spec_accept_length"] == 3.0 and found.figures == {"avg_spec_accept_length": 2.5}
    assert not found.uncounted and chat.records[0].counts is None  # in chat SGLang 0.5.17 is silent


def test_sglangs_details_in_chat_are_read_where_it_says_them() -> None:
    said = {"spec_tokens_details": {"spec_correct_drafts_histogram": [1, 0, 1, 0, 1], "spec_verify_ct": 3}}
    with sglang(Fake(lambda *_: Streamed(SCHEDULE, meta=said))) as fake:
        found = run(fake.url, asks(1), engine="sglang")
    assert fake.bodies[0]["return_spec_tokens_details"] is True
    assert found.records[0].counts == (3, 6, 1, True, [1, 0, 1, 0, 1])


def test_figures_that_do_not_add_up_are_told_and_cost_no_answer() -> None:
    with sglang(Fake(lambda *_: Streamed(SCHEDULE, meta={"spec_accept_histogram": [9, 9]}))) as fake:
        found = run(fake.url, asks(1, [1]), engine="sglang")
    assert found.records[0].failed is None and found.records[0].counts is None
    assert len(found.uncounted) == 1 and found.uncounted[0].startswith("0: the engine's figures don't add up")
    with sglang(Fake(lambda *_: Streamed(SCHEDULE, finish="abort", meta={"spec_accept_histogram": [9, 9]}))) as fake:
        found = run(fake.url, asks(1, [1]), engine="sglang")
    assert found.records[0].failed == "aborted" and not found.uncounted  # half an answer needn't add up


def counters(drafts: int, accepted: int, reached: list[int]) -> bytes:
    """What vLLM's /metrics says."""
    known = {"drafts": drafts, "draft_tokens": 4 * drafts, "accepted_tokens": accepted}
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0' for name, value in known.items()]
    for place, times in enumerate(reached):
        labels = f'engine="0",position="{place}"'
        lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {times}.0")
    return "\n".join(lines).encode()


def test_vllms_counters_are_those_of_the_load_alone() -> None:
    """The warm-up's 10 cycles are not of it. The last step's come a moment after its answers, as vLLM's do."""
    late = iter([counters(14, 14, [6, 4, 2, 2])])
    with Fake(lambda *_: Streamed(SCHEDULE)) as fake:

        def metrics() -> bytes:
            if len(fake.bodies) == 1:
                return counters(10, 7, [3, 2, 1, 1])
            return next(late, counters(16, 20, [8, 6, 4, 2]))

        fake.pages["/metrics"] = metrics
        found = run(fake.url, asks(2, [1]), warmup=asks(1, [1]), engine="vllm")
    assert found.counters == (6, 13, 2 + 13 + 6 - 18, False, [1, 1, 1, 2, 1])
    assert found.figures == {"mean_acceptance_length": 1 + 13 / 6}
    assert fake.bodies[0]["stream_options"]["continuous_usage_stats"] is True
    assert fake.bodies[0]["return_token_ids"] is True


def test_counters_that_are_read_only_once_are_told() -> None:
    with Fake(lambda *_: Streamed(SCHEDULE)) as fake:
        fake.pages["/metrics"] = lambda: b"" if fake.bodies else counters(1, 1, [1])
        found = run(fake.url, asks(1, [1]), engine="vllm")
    assert found.counters is None and "not both times" in found.uncounted[0]


def test_requests_in_each_dialect() -> None:
    def body(ask: Ask, engine: str) -> tuple[str, dict[str, Any]]:
        path, data = load.request(ask, engine, "tiny")
        return path, json.loads(data)

    (ids,) = asks(1, [1, 2], ignore_eos=True, max_tokens=5, more={"image_data": ["x"]})
    assert body(ids, "sglang") == ("/generate", {
        "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5, "temperature": 0.0, "top_p": 1.0, "ignore_eos": True},
        "stream": True, "image_data": ["x"],
    })  # fmt: skip
    path, said = body(ids, "vllm")
    assert path == "/v1/completions" and said["prompt"] == [1, 2] and said["ignore_eos"] is True
    (words,) = asks(1, max_tokens=5)
    path, said = body(words, "openai")
    assert path == "/v1/chat/completions" and said["messages"] == words.prompt and "ignore_eos" not in said
    with pytest.raises(ValueError, match="0: expected an engine that takes ignore_eos, found openai"):
        load.request(ids, "openai", "tiny")
    with pytest.raises(ValueError, match="takes token ids as prompts, found transformers"):
        load.request(asks(1, [1])[0], "transformers", "tiny")


def test_a_load_that_is_cancelled_leaves_nothing_behind() -> None:
    async def cancelled(fake: Fake) -> int:
        task = asyncio.create_task(
            load.run(
                fake.url,
                "tiny",
                asks(20),
                Arrivals(math.inf, 5, 0),
                60.0,
                [],
                "benchmark_served.server",
                engine="openai",
            )
        )
        while len(fake.streams) < 5:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks()) - 1

    with Fake(lambda *_: Streamed([(0.05 * i, 1) for i in range(200)])) as fake:
        assert asyncio.run(cancelled(fake)) == 0
        until = time.monotonic() + 5
        while fake.given_up < 5 and time.monotonic() < until:
            time.sleep(0.02)
    assert fake.given_up == 5 and len(fake.bodies) == 5  # its connections are closed, and no more were opened


def test_ctrl_c_ends_it_at_once_without_complaints() -> None:
    program = (
        "import asyncio, math, sys\n"
        "from stages.serving import load\n"
        "ask = load.Ask('0', [{'role': 'user', 'content': 'x'}], 8, 0.0, 1.0, False)\n"
        "print('ready', flush=True)\n"
        "asyncio.run(load.run(sys.argv[1], 'tiny', [ask] * 9, load.Arrivals(math.inf, 3, 0), 60.0, [], 's', engine='openai'))"
    )
    with Fake(lambda *_: Streamed([(0.05 * i, 1) for i in range(400)])) as fake:
        stage = subprocess.Popen(
            [sys.executable, "-X", "dev", "-c", program, fake.url], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until = time.monotonic() + 20
        while len(fake.bodies) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        begun = time.monotonic()
        os.kill(stage.pid, signal.SIGINT)
        _, complaints = stage.communicate(timeout=20)
    assert time.monotonic() - begun < 5 and stage.returncode != 0
    assert complaints.rstrip().endswith("KeyboardInterrupt") and "nclosed" not in complaints


def test_records_come_in_the_order_of_the_asks() -> None:
    with Fake(lambda body, _: Streamed([(0.001 * body["seed"], 1)])) as fake:
        wanted = [
            Ask(str(n), [{"role": "user", "content": "x"}], 8, 0.0, 1.0, False, {"seed": 600 - 120 * n})
            for n in range(5)
        ]
        found = run(fake.url, wanted)
    assert [r.id for r in found.records] == ["0", "1", "2", "3", "4"]
    assert all(a.ended > b.ended for a, b in itertools.pairwise(found.records))


def test_its_own_cost_is_small() -> None:
    """The aim is 0.2 ms of CPU for a token event, 64 streams at once; docs/LOG.md has the figure of a quiet machine."""
    port = server.free_port()
    null = subprocess.Popen([sys.executable, "-m", "tests.serving.fake", str(port), "0.02", "stream"], cwd=ROOT)
    try:
        load_overhead.wait_for(port)
        found = load_overhead.measured(port, "generate", "sglang", at_once=64, tokens=60, rounds=1)
    finally:
        null.terminate()
        null.wait()
    assert found["events"] == 64 * 63 and found["cpu_ms_per_event"] < 0.2
