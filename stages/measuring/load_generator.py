"""Load generator: send a workload's requests to a server, and record when each token came.

Arrivals follow SGLang's bench_serving: requests arrive at a rate (a Poisson process, or all at once), and those beyond a cap
on requests in flight wait in order. An infinite rate with a cap is a closed loop, a rate without a cap an open loop. A
request's clock starts when it is sent, as there; its wait before is recorded too.

Failures are recorded by reason and never retried: a retry would change the load.
"""

import asyncio
import contextlib
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import orjson

from stages.cells.request_record import RequestRecord
from stages.engines import http_session, spec_counters
from stages.engines.sse import AnswerStream

FLUSH_TIMEOUT_S = 30  # until a server is idle, so that it may drop its cache
ENDING_CHECKS, ENDING_PAUSE_S = 6, 0.5  # of a server that fails the whole warm-up


@dataclass(frozen=True)
class LoadRequest:
    """A request to send."""

    id: str
    prompt: list[int] | list[dict[str, Any]]  # token ids, or messages
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    ignore_eos: bool  # generate max_tokens, past end tokens
    engine_fields: dict[str, Any] = field(default_factory=dict)  # of the body, known to this engine only: image_data


@dataclass(frozen=True)
class Arrivals:
    """When requests arrive, and how many may be in flight."""

    rate: float  # requests/s; inf: all at once
    concurrency: int | None
    seed: int

    def sample_due_s(self, requests: int) -> np.ndarray:
        """Return the arrival times [N] of a Poisson process; the first is 0."""
        if math.isinf(self.rate):
            return np.zeros(requests)
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, requests)
        return np.cumsum(gaps) - gaps[0]


@dataclass
class LoadResult:
    """The measurements of a load."""

    engine: str
    records: list[RequestRecord]  # in the order of the requests
    max_in_flight: int
    warmup_failed: dict[str, int]  # by reason
    counting_errors: list[str]  # why accepted drafts could not be counted
    engine_figures: dict[str, Any] = field(default_factory=dict)  # the engine's own, by its names


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
    """Send `warmup`, which is not counted, then all `requests` (one or more) to the server at `url` (without /v1).

    Args:
        request_timeout_s: from sending a request to its last byte.
        section: of params.yaml, for messages.
        check: called after a failed connection; may raise ValueError.

    Raises:
        ValueError: if the server is another one, refuses the key, or fails the whole warm-up.
    """
    async with http_session.HttpSession(model, request_timeout_s, section, key) as http:
        try:
            engine = engine or await http.identify_engine(url)
        except http_session.ExchangeFailedError as error:
            raise ValueError(f"{url} can't be asked: {error}; is it running? Correct {section}.base_urls") from None
        warmed = await LoadGenerator(http, url, engine, check).send(warmup, Arrivals(math.inf, arrivals.concurrency, 0))
        failed = [r for r in warmed if r.failure_reason]
        if failed and len(failed) == len(warmed):
            for _ in range(ENDING_CHECKS):  # a server that aborts answers until its last words are in its log
                await asyncio.to_thread(check)
                await asyncio.sleep(ENDING_PAUSE_S)
            raise ValueError(
                f"{url} failed all {len(failed)} requests of the warm-up, the first: {failed[0].failure_message}"
            )
        if engine == "sglang":
            await _flush_cache(http, url)
        generator = LoadGenerator(http, url, engine, check, on_request_end)
        records = await generator.send(requests, arrivals)
        warmup_failed = dict(sorted(Counter(str(r.failure_reason) for r in failed).items()))
        found = LoadResult(engine, records, generator.max_in_flight, warmup_failed, generator.counting_errors)
        if engine == "sglang":
            found.engine_figures = await _fetch_engine_figures(http, url)
    return found


@dataclass
class LoadGenerator:
    """Sends requests to one server."""

    http: http_session.HttpSession
    url: str
    engine: str
    check: Callable[[], None]
    on_request_end: Callable[[], object] = lambda: None
    max_in_flight: int = 0
    counting_errors: list[str] = field(default_factory=list)
    _in_flight: int = 0

    async def send(self, requests: list[LoadRequest], arrivals: Arrivals) -> list[RequestRecord]:
        """Return a record of each request. Requests in flight are dropped when this is cancelled."""
        # Bodies are built before the clock runs.
        ready = [(request, *build_request(request, self.engine, self.http.model)) for request in requests]
        gate = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency else contextlib.nullcontext()
        with _suspend_garbage_collection():
            due = time.perf_counter() + arrivals.sample_due_s(len(requests))
            with http_session.raise_first_error():
                async with asyncio.TaskGroup() as group:
                    tasks = []
                    for (request, path, body), due_s in zip(ready, due.tolist(), strict=True):
                        if (wait_s := due_s - time.perf_counter()) > 0:
                            await asyncio.sleep(wait_s)
                        tasks.append(group.create_task(self._send_in_turn(gate, request, path, body, due_s)))
        return [task.result() for task in tasks]

    async def _send_in_turn(self, gate: Any, request: LoadRequest, path: str, body: bytes, due: float) -> RequestRecord:
        async with gate:
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            try:
                return await self._send_request(request, path, body, due)
            finally:
                self._in_flight -= 1
                self.on_request_end()

    async def _send_request(self, request: LoadRequest, path: str, body: bytes, due: float) -> RequestRecord:
        record = RequestRecord(request.id, due, sent=time.perf_counter())
        stream, headers = AnswerStream(record, path), {"Content-Type": "application/json"}
        if path == "/completion":  # llama.cpp ends a connection after some answers, and does not say so before
            headers["Connection"] = "close"
        try:
            async with self.http.open(self.url, "POST", path, data=body, headers=headers) as response:
                if response.status != 200:
                    self.http.check(self.url, await http_session.read_reply(response))
                async for data in response.content.iter_any():
                    stream.feed(data, time.perf_counter())
            stream.end(time.perf_counter())
        except (http_session.RequestRefusedError, http_session.ExchangeFailedError) as error:
            record.failure_reason, record.failure_message = error.reason, str(error)
        record.ended = time.perf_counter()
        if record.failure_reason == "connection":
            self.check()
        elif not record.failure_reason and record.is_counted:
            try:
                record.counts = spec_counters.count_request(record.engine_meta, record.output_tokens)
            except ValueError as error:
                self.counting_errors.append(f"{record.id}: {error}")
        return record


def build_request(request: LoadRequest, engine: str, model: str) -> tuple[str, bytes]:
    """Return (path, body). SGLang and llama.cpp get their own protocols if possible: only there they report accepted drafts.

    Raises:
        ValueError: if the engine doesn't take such a request.
    """
    has_token_ids = bool(request.prompt) and isinstance(request.prompt[0], int)
    top_k = {} if request.top_k is None else {"top_k": request.top_k}
    if has_token_ids and engine == "sglang":
        sampling = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "ignore_eos": request.ignore_eos,
            **top_k,
        }
        body = {"input_ids": request.prompt, "sampling_params": sampling, "stream": True, **request.engine_fields}
        return "/generate", orjson.dumps(body)
    if has_token_ids and engine == "llama.cpp":
        sampling = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k or 0, "min_p": 0}
        body = {
            "prompt": request.prompt, "n_predict": request.max_tokens, "ignore_eos": request.ignore_eos, "stream": True,
            "return_tokens": True, "cache_prompt": False, **sampling,
        }  # fmt: skip
        return "/completion", orjson.dumps(body)
    extensions: dict[str, Any] = {"ignore_eos": request.ignore_eos, **top_k}
    if engine == "sglang":
        extensions["return_spec_tokens_details"] = True  # ignored by SGLang up to 0.5.17
    elif engine == "vllm":
        extensions["return_token_ids"] = True
    else:
        if request.ignore_eos or top_k or (has_token_ids and engine == "transformers"):
            feature = "ignore_eos" if request.ignore_eos else "top_k" if top_k else "token ids as prompts"
            raise ValueError(
                f"{request.id}: expected an engine that takes {feature}, found {engine}; ask without, or use sglang or vllm"
            )
        extensions = {}
    body = {
        "model": model,
        "prompt" if has_token_ids else "messages": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **extensions,
        **request.engine_fields,
    }
    return "/v1/completions" if has_token_ids else "/v1/chat/completions", orjson.dumps(body)


@contextlib.contextmanager
def _suspend_garbage_collection() -> Iterator[None]:
    """Suspend it, since a full collection of a stage's objects takes longer than a token.

    Objects that were frozen before stay so, as those of a fork (telemetry/fork_server.py): each later load would collect them.
    """
    stay_frozen = _has_frozen_objects()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not stay_frozen:
            gc.unfreeze()


@cache
def _has_frozen_objects() -> bool:
    """Return whether objects were frozen before the first load; asked once, since counting a million takes 40 ms."""
    return gc.get_freeze_count() > 0


async def _flush_cache(http: http_session.HttpSession, url: str) -> None:
    """Flush SGLang's cache, so that no prompt finds its beginning there and its own averages are of this load."""
    try:
        reply = await http.send(url, "POST", f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", within_s=FLUSH_TIMEOUT_S + 10)
    except http_session.ExchangeFailedError as error:
        raise ValueError(f"{url} did not flush its cache: {error}; see to the server and run again") from None
    if reply.status != 200:
        raise ValueError(
            f"{url} did not flush its cache: HTTP {reply.status} {reply.excerpt()}; expected no running requests after the "
            "warm-up. Does another client use it?"
        )


async def _fetch_engine_figures(http: http_session.HttpSession, url: str) -> dict[str, Any]:
    """Return SGLang's mean accept length since the flush, if it speculates. It lags, unless --decode-log-interval is 1."""
    try:
        reply = await http.send(url, "GET", "/server_info")
        state = orjson.loads(reply.body)["internal_states"][0] if reply.status == 200 else {}
    except (http_session.ExchangeFailedError, ValueError, KeyError, IndexError, TypeError):
        return {}
    length = state.get("avg_spec_accept_length")
    return {} if length is None else {"avg_spec_accept_length": length}
