"""Loads a server with requests as a workload says, and records when every token came.

Arrivals are those of SGLang's bench_serving: requests come at a rate (Poisson, or all at once), and a cap on how many are
under way at once makes those beyond it wait for their turn, in order. An endless rate with a cap is a closed loop, a rate
without one an open loop. A request's clock starts when it is sent, as theirs; how long it waited before is kept as well.

What fails is recorded by reason, never asked again: a load that sends a request twice is another load.
"""

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from stages.serving import http_session, spec_counters
from stages.serving.latency import RequestRecord
from stages.serving.spec_counters import AcceptanceCounts, VllmCounters
from stages.serving.sse import AnswerStream

FLUSH_TIMEOUT_S = 30  # for a server to come to rest, so that it may drop its cache
READING_PAUSE_S = 0.2  # vLLM's counters follow the answers by a step
MAX_READINGS = 20


@dataclass(frozen=True)
class LoadRequest:
    """A request to come."""

    id: str
    prompt: list[int] | list[dict[str, Any]]  # token ids, or messages
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    ignore_eos: bool  # answers of max_tokens, whatever they say
    engine_fields: dict[str, Any] = field(default_factory=dict)  # of the body, what only this engine knows: image_data


@dataclass(frozen=True)
class Arrivals:
    rate: float  # requests/s; inf: all at once
    concurrency: int | None
    seed: int

    def sample_due_s(self, requests: int) -> np.ndarray:
        """[N] from the first, which comes at 0: exponential gaps, so a Poisson process."""
        if math.isinf(self.rate):
            return np.zeros(requests)
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, requests)
        return np.cumsum(gaps) - gaps[0]


@dataclass
class LoadResult:
    engine: str
    records: list[RequestRecord]  # one for each request, in their order
    max_in_flight: int
    warmup_failed: dict[str, int]  # by reason
    counting_errors: list[str]  # why an engine's figures are of no use
    counters: AcceptanceCounts | None  # vLLM's, of all records together
    engine_figures: dict[str, Any]  # the engine's own, as it says them


async def run_load(
    url: str,
    model: str,
    requests: list[LoadRequest],
    arrivals: Arrivals,
    request_timeout_s: float,
    warmup: list[LoadRequest],
    section: str,
    key: str | None = None,
    engine: str | None = None,
    check: Callable[[], None] = lambda: None,
    on_request_end: Callable[[], object] = lambda: None,
) -> LoadResult:
    """All of `requests`, one or more, sent to the server at `url` (without /v1), after `warmup`, which counts nowhere.

    A request may take `request_timeout_s` from being sent to its last byte. `check` looks after the server when a connection
    fails, and may raise ValueError; `ended` is called as each of `requests` ends; `section` is the one of params.yaml that
    messages point to.

    Raises:
        ValueError: where the server is another one, refuses whoever requests, or fails all of the warm-up.
    """
    async with http_session.HttpSession(model, request_timeout_s, section, key) as http:
        try:
            engine = engine or await http.identify_engine(url)
        except http_session.ExchangeFailedError as error:
            raise ValueError(f"{url} can't be asked: {error}; is it running? Correct {section}.base_urls") from None
        warmed = await LoadGenerator(http, url, engine, check).send(warmup, Arrivals(math.inf, arrivals.concurrency, 0))
        failed = [r for r in warmed if r.failure_reason]
        if failed and len(failed) == len(warmed):
            raise ValueError(
                f"{url} failed all {len(failed)} requests of the warm-up, the first: {failed[0].failure_message}"
            )
        if engine == "sglang":
            await _flush_cache(http, url)
        before = await _read_settled_counters(http, url) if engine == "vllm" else None
        generator = LoadGenerator(http, url, engine, check, on_request_end)
        records = await generator.send(requests, arrivals)
        after = await _read_settled_counters(http, url) if engine == "vllm" else None
        found = LoadResult(
            engine, records, generator.max_in_flight, _count_by_reason(failed), generator.counting_errors, None, {}
        )
        if before and after:
            _add_counters(found, before, after)
        elif before or after:
            found.counting_errors.append("vLLM's /metrics could be read before the load or after it, not both times")
        if engine == "sglang":
            found.engine_figures = await _fetch_server_info(http, url)
    return found


class LoadGenerator:
    """Sends to one server."""

    def __init__(
        self,
        http: http_session.HttpSession,
        url: str,
        engine: str,
        check: Callable[[], None],
        on_request_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.http, self.url, self.engine, self.check = http, url, engine, check
        self.on_request_end = on_request_end
        self.max_in_flight = self._in_flight = 0
        self.counting_errors: list[str] = []

    async def send(self, requests: list[LoadRequest], arrivals: Arrivals) -> list[RequestRecord]:
        """A record for each; those still under way are given up when this is cancelled."""
        ready = [
            (request, *build_request(request, self.engine, self.http.model)) for request in requests
        ]  # no JSON while the clock runs
        gate = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency else contextlib.nullcontext()
        with _suspend_garbage_collection():
            due = time.perf_counter() + arrivals.sample_due_s(len(requests))
            with http_session.raise_first_error():
                async with asyncio.TaskGroup() as group:
                    tasks = []
                    for (request, path, body), when in zip(ready, due.tolist(), strict=True):
                        if (rest_s := when - time.perf_counter()) > 0:
                            await asyncio.sleep(rest_s)
                        tasks.append(group.create_task(self._send_in_turn(gate, request, path, body, when)))
        return [task.result() for task in tasks]

    async def _send_in_turn(self, gate: Any, request: LoadRequest, path: str, body: bytes, due: float) -> RequestRecord:
        async with gate:
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            try:
                return await self._send_one(request, path, body, due)
            finally:
                self._in_flight -= 1
                self.on_request_end()

    async def _send_one(self, request: LoadRequest, path: str, body: bytes, due: float) -> RequestRecord:
        stream, failed, why = AnswerStream(path == "/generate"), None, ""
        sent = time.perf_counter()
        try:
            async with self.http.open(
                self.url, "POST", path, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    self.http.check(self.url, await http_session.read_reply(response))
                async for data in response.content.iter_any():
                    stream.feed(data, time.perf_counter())
            stream.end(time.perf_counter())
        except http_session.RequestRefusedError as error:
            failed, why = "refused", str(error)
        except http_session.ExchangeFailedError as error:
            failed, why = error.reason, str(error)
        ended = time.perf_counter()
        if failed == "connection":
            self.check()
        record = RequestRecord(
            request.id, due, sent, ended, stream.events, stream.has_token_counts, stream.input_tokens, stream.output_tokens,
            stream.finish_reason, failed, why, stream.text, stream.ids, stream.engine_meta,
        )  # fmt: skip
        if not failed:
            self._count_acceptance(record)
        return record

    def _count_acceptance(self, record: RequestRecord) -> None:
        try:
            record.counts = spec_counters.count_request(record.engine_meta, record.output_tokens)
        except ValueError as error:
            self.counting_errors.append(f"{record.id}: {error}")


def build_request(request: LoadRequest, engine: str, model: str) -> tuple[str, bytes]:
    """Path and body. SGLang is asked in its own dialect where it can be: only there it speaks of accepted drafts.

    Raises:
        ValueError: where the engine doesn't take such a request.
    """
    ids = bool(request.prompt) and isinstance(request.prompt[0], int)
    likeliest = {} if request.top_k is None else {"top_k": request.top_k}
    if ids and engine == "sglang":
        sampling = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "ignore_eos": request.ignore_eos,
            **likeliest,
        }
        body = {"input_ids": request.prompt, "sampling_params": sampling, "stream": True, **request.engine_fields}
        return "/generate", orjson.dumps(body)
    own: dict[str, Any] = {"ignore_eos": request.ignore_eos, **likeliest}
    if engine == "sglang":
        own["return_spec_tokens_details"] = True  # SGLang of before it (0.5.17) passes it over
    elif engine == "vllm":
        own["return_token_ids"] = True
    else:
        if request.ignore_eos or likeliest or (ids and engine == "transformers"):
            what = "ignore_eos" if request.ignore_eos else "top_k" if likeliest else "token ids as prompts"
            raise ValueError(
                f"{request.id}: expected an engine that takes {what}, found {engine}; ask without, or use sglang or vllm"
            )
        own = {}
    body = {
        "model": model,
        "prompt" if ids else "messages": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **own,
        **request.engine_fields,
    }
    return "/v1/completions" if ids else "/v1/chat/completions", orjson.dumps(body)


@contextlib.contextmanager
def _suspend_garbage_collection() -> Iterator[None]:
    """A full collection of a stage's objects takes longer than a token."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _flush_cache(http: http_session.HttpSession, url: str) -> None:
    """So that no prompt finds its beginning in the cache, and SGLang's own averages are of this load."""
    try:
        reply = await http.send(url, "POST", f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", within_s=FLUSH_TIMEOUT_S + 10)
    except http_session.ExchangeFailedError as error:
        raise ValueError(f"{url} did not flush its cache: {error}; see to the server and run again") from None
    if reply.status != 200:
        raise ValueError(
            f"{url} did not flush its cache: HTTP {reply.status} {reply.excerpt()}; expected it at rest after the warm-up. "
            "Does somebody else use it?"
        )


async def _read_settled_counters(http: http_session.HttpSession, url: str) -> VllmCounters | None:
    """vLLM's, once they stand still."""
    found = None
    for _ in range(MAX_READINGS):
        try:
            reply = await http.send(url, "GET", "/metrics")
        except http_session.ExchangeFailedError:
            return None
        last, found = found, spec_counters.parse_vllm_counters(reply.body.decode()) if reply.status == 200 else None
        if found == last:
            break
        await asyncio.sleep(READING_PAUSE_S)
    return found


def _add_counters(load: LoadResult, before: VllmCounters, after: VllmCounters) -> None:
    whole = not any(
        r.failure_reason for r in load.records
    )  # what failed has drafts in the counters, and no tokens with us
    tokens = sum(r.output_tokens for r in load.records) if whole else None
    try:
        load.counters = spec_counters.subtract_counters(before, after, len(load.records), tokens)
    except ValueError as error:
        load.counting_errors.append(str(error))
    drafts = after.drafts - before.drafts
    if drafts:
        load.engine_figures["mean_acceptance_length"] = 1 + (after.accepted - before.accepted) / drafts


async def _fetch_server_info(http: http_session.HttpSession, url: str) -> dict[str, Any]:
    """SGLang's average since the flush, where it speculates. It lags, unless --decode-log-interval is 1."""
    try:
        reply = await http.send(url, "GET", "/server_info")
        state = orjson.loads(reply.body)["internal_states"][0] if reply.status == 200 else {}
    except (http_session.ExchangeFailedError, ValueError, KeyError, IndexError, TypeError):
        return {}
    return {name: state[name] for name in ("avg_spec_accept_length",) if state.get(name) is not None}


def _count_by_reason(failed: list[RequestRecord]) -> dict[str, int]:
    return {
        str(reason): sum(r.failure_reason == reason for r in failed)
        for reason in sorted({r.failure_reason for r in failed if r.failure_reason})
    }
