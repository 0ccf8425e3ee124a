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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.cells.request_record import RequestRecord
from stages.engines import http_session
from stages.engines.cell_engine import LoadResult
from stages.engines.protocol import BuiltRequest, LoadRequest, ServingEngine
from stages.engines.sse import AnswerStream

ENDING_CHECKS, ENDING_PAUSE_S = 6, 0.5  # of a server that fails the whole warm-up


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


async def run_load(
    session: http_session.HttpSession,
    url: str,
    engine: ServingEngine,
    requests: list[LoadRequest],
    arrivals: Arrivals,
    warmup: list[LoadRequest],
    num_steps: int | None = None,
    check: Callable[[], None] = lambda: None,
    on_request_end: Callable[[], object] = lambda: None,
) -> LoadResult:
    """Send `warmup`, which is not counted, then all `requests` (one or more) to the server at `url` (without /v1).

    Args:
        session: not yet entered; its timeout is from sending a request to its last byte.
        num_steps: of the draft; None without one.
        check: called after a failed connection; may raise ValueError.

    Raises:
        ValueError: if the server refuses the key, or fails the whole warm-up.
    """
    async with session as http:
        warmed = await LoadGenerator(http, url, engine, check).send(warmup, Arrivals(math.inf, arrivals.concurrency, 0))
        failed = [r for r in warmed if r.failure_reason]
        if failed and len(failed) == len(warmed):
            for _ in range(ENDING_CHECKS):  # a server that aborts answers until its last words are in its log
                await asyncio.to_thread(check)
                await asyncio.sleep(ENDING_PAUSE_S)
            raise ValueError(
                f"{url} failed all {len(failed)} requests of the warm-up, the first: {failed[0].failure_message}"
            )
        await engine.begin_load(http, url)
        generator = LoadGenerator(http, url, engine, check, on_request_end, num_steps)
        records = await generator.send(requests, arrivals)
        figures = await engine.fetch_figures(http, url)
    return LoadResult(records, generator.counting_errors, figures)


@dataclass
class LoadGenerator:
    """Sends requests to one server."""

    http: http_session.HttpSession
    url: str
    engine: ServingEngine
    check: Callable[[], None]
    on_request_end: Callable[[], object] = lambda: None
    num_steps: int | None = None
    counting_errors: list[str] = field(default_factory=list)

    async def send(self, requests: list[LoadRequest], arrivals: Arrivals) -> list[RequestRecord]:
        """Return a record of each request. Requests in flight are dropped when this is cancelled."""
        # Bodies are built before the clock runs.
        ready = [(request, self.engine.build_request(request, self.http.model)) for request in requests]
        gate = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency else contextlib.nullcontext()
        gc.collect()
        gc.freeze()  # a full collection of a stage's objects, while the clock runs, takes longer than a token
        due = time.perf_counter() + arrivals.sample_due_s(len(requests))
        with http_session.raise_first_error():
            async with asyncio.TaskGroup() as group:
                tasks = []
                for (request, built), due_s in zip(ready, due.tolist(), strict=True):
                    if (wait_s := due_s - time.perf_counter()) > 0:
                        await asyncio.sleep(wait_s)
                    tasks.append(group.create_task(self._send_in_turn(gate, request, built, due_s)))
        return [task.result() for task in tasks]

    async def _send_in_turn(self, gate: Any, request: LoadRequest, built: BuiltRequest, due: float) -> RequestRecord:
        async with gate:
            try:
                return await self._send_request(request, built, due)
            finally:
                self.on_request_end()

    async def _send_request(self, request: LoadRequest, built: BuiltRequest, due: float) -> RequestRecord:
        record = RequestRecord(request.id, due, sent=time.perf_counter())
        stream = AnswerStream(record, built.read)
        try:
            async with self.http.open(self.url, "POST", built.path, data=built.body, headers=built.headers) as response:
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
        elif not record.failure_reason:
            try:
                record.counts = self.engine.count_request(record.engine_meta, record.output_tokens, self.num_steps)
            except ValueError as error:
                self.counting_errors.append(f"{record.id}: {error}")
        return record
