"""Client of the servers that answer `sample_target`: many requests in flight over a list of servers, with retries.

A request goes to the server with the fewest in flight. Cut, hung and unreachable servers are retried, and those whose status is
one of http_session.TRANSIENT_STATUSES (408, 425, 429 and some of 5xx), another server first, with growing pauses. A server that
fails several times in a row is left alone for a while, longer each time. Any other status is not retried: it would come again.
"""

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field

from pydantic import ValidationError
from tqdm import tqdm

from stages.engines import http_session, registry
from stages.engines.chat_answer import ChatAnswer
from stages.engines.protocol import Body, SamplingOptions, ServingEngine

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
FAILURES_BEFORE_BACKOFF = 3  # failures of a server in a row
NOTE_INTERVAL_S = 5.0  # between notes that no server answers yet
PARAMS_SECTION = "sample_target.server"  # of params.yaml, for messages


@dataclass
class Endpoint:
    """A server, and how it fares."""

    url: str  # without /v1
    engine: ServingEngine | None  # None until identified
    in_flight: int = 0
    answered: int = 0
    failures: int = 0  # in a row
    backoff_until: float = 0.0
    is_awaited: bool = False  # a note said that it can't be asked
    semaphore: asyncio.Semaphore | None = None  # None until identified
    identify_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class ChatClient:
    """Use as `async with`; `complete` may be called from any number of tasks."""

    urls: list[str]
    model: str
    concurrency: int
    timeout_s: float
    attempts: int
    key: InitVar[str | None] = None
    engine: ServingEngine | None = None
    # Called after a failure, in a thread: it may restart servers of this machine.
    check: Callable[[], None] = lambda: None
    first_backoff_s: float = FIRST_BACKOFF_S
    retries_by_reason: Counter[str] = field(default_factory=Counter)

    def __post_init__(self, key: str | None) -> None:
        self.endpoints = [Endpoint(url, self.engine) for url in self.urls]
        self._gate = asyncio.Semaphore(self.concurrency)
        self._checker, self._checking = ThreadPoolExecutor(1), asyncio.Lock()
        self._http = http_session.HttpSession(self.model, self.timeout_s, PARAMS_SECTION, key)
        self._started_at = self._noted_at = time.monotonic()

    async def __aenter__(self) -> "ChatClient":
        await self._http.__aenter__()
        found = await asyncio.gather(*(self._identify(e) for e in self.endpoints), return_exceptions=True)
        for error in found:
            # An unreachable server may come up later; `complete` identifies it then.
            if isinstance(error, BaseException) and not isinstance(error, http_session.ExchangeFailedError):
                await self.__aexit__()
                raise error
        return self

    def _note_awaited(self, endpoint: Endpoint, error: BaseException) -> None:
        """Say that a server can't be asked yet: at once, and again now and then while no other has been."""
        now, is_alone = time.monotonic(), not any(e.engine for e in self.endpoints)
        if endpoint.is_awaited and not (is_alone and now - self._noted_at >= NOTE_INTERVAL_S):
            return
        endpoint.is_awaited, self._noted_at = True, now
        note = f"unless a server answers, the run stops after {self.attempts} attempts ({PARAMS_SECTION}.attempts)"
        note = note if is_alone else "the other servers are asked meanwhile"
        _print_note(f"{endpoint.url} can't be asked yet, {now - self._started_at:.0f} s so far: {error}; {note}")

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()
        self._checker.shutdown(wait=False, cancel_futures=True)  # its owner stops a server that is being started

    async def complete(self, body: Body, options: SamplingOptions | None = None) -> ChatAnswer:
        """Return the answer to one request.

        Args:
            body: the request without the model.
            options: what engines are told in fields of their own; None: nothing.

        Raises:
            RequestRefusedError: if the server refuses this request.
            ValueError: if it can't be answered after all attempts, or if every request would fail the same way.
        """
        async with self._gate:
            return await self._try_endpoints(body, options)

    async def _try_endpoints(self, body: Body, options: SamplingOptions | None) -> ChatAnswer:
        failure, reason, avoid = "", "", None
        for attempt in range(self.attempts):
            endpoint = await self._choose_endpoint(avoid)
            endpoint.in_flight += 1
            try:
                engine = await self._identify(endpoint)
                path, own_body = engine.build_sampling_request(body, options)
                async with endpoint.semaphore or contextlib.nullcontext():
                    request_body = {"model": self.model, **own_body}
                    reply = await self._http.send(endpoint.url, "POST", path, json=request_body)
                    self._http.check(endpoint.url, reply)
                    answer = self._read_answer(endpoint.url, engine, reply.body)
            except http_session.ExchangeFailedError as error:
                failure, reason, avoid = f"{endpoint.url}: {error}", error.reason, endpoint
                self._record_failure(endpoint, error)
                await self._check_servers()
                # The first retry goes to another server at once.
                if attempt + 1 < self.attempts and (attempt or len(self.endpoints) == 1):
                    backoff_s = self._compute_backoff_s(attempt)
                    await asyncio.sleep(max(backoff_s, min(error.retry_after_s, MAX_BACKOFF_S)))
                continue
            finally:
                endpoint.in_flight -= 1
            endpoint.failures, endpoint.answered = 0, endpoint.answered + 1
            return answer
        advice = "see to the servers"
        if reason == "http 429":
            advice = f"lower {PARAMS_SECTION}.concurrency, {self.concurrency}, the requests in flight over all servers,"
        raise ValueError(
            f"no answer in {self.attempts} attempts, the last at {failure}; {advice} and run again: what was answered is kept. "
            f"Or raise {PARAMS_SECTION}.attempts or timeout_s"
        )

    async def _check_servers(self) -> None:
        """Run `check` while other servers answer.

        Requests that failed meanwhile wait for it and count as in flight, so that no more are sent to a server that restarts.
        """
        async with self._checking:
            await asyncio.get_running_loop().run_in_executor(self._checker, self.check)

    def _read_answer(self, url: str, engine: ServingEngine, body: bytes) -> ChatAnswer:
        """Parse a response; one that is cut or malformed is retried."""
        try:
            found = engine.answer_type.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"not a chat completion: {'.'.join(map(str, first['loc']))} {first['msg']}, in {body[:80]!r}"
            raise http_session.ExchangeFailedError("malformed", problem) from None
        answer, name = found.get_answer(), found.model
        # transformers appends @revision to the name.
        if name is not None and name != self.model and name.rpartition("@")[0] != self.model:
            raise ValueError(
                f"{url} answered as model {name!r}, expected {self.model!r}: it serves another model. Correct "
                "sample_target.server.base_urls, or set server.model to that name if it is the target"
            )
        if answer.finish_reason not in http_session.FINISH_REASONS:
            if answer.finish_reason in ("", "abort", "error"):
                raise http_session.ExchangeFailedError("malformed", f"finish_reason {answer.finish_reason!r}")
            raise http_session.RequestRefusedError(
                200, f"finish_reason {answer.finish_reason!r}, expected stop or length"
            )
        return answer

    async def _choose_endpoint(self, avoid: Endpoint | None) -> Endpoint:
        """Return the least-loaded endpoint not in back-off, preferring another than `avoid`; wait if all are in back-off."""
        while True:
            now = time.monotonic()
            available = [e for e in self.endpoints if e.backoff_until <= now]
            if available:
                return min(available, key=lambda e: (e is avoid, e.in_flight, e.answered))
            await asyncio.sleep(min(e.backoff_until for e in self.endpoints) - now)

    def _record_failure(self, endpoint: Endpoint, error: http_session.ExchangeFailedError) -> None:
        self.retries_by_reason[error.reason] += 1
        if endpoint.backoff_until > time.monotonic():  # requests in flight when it failed: they count as one failure
            return
        endpoint.failures += 1
        if endpoint.failures >= FAILURES_BEFORE_BACKOFF:
            backoff_s = self._compute_backoff_s(endpoint.failures - FAILURES_BEFORE_BACKOFF)
            endpoint.backoff_until = time.monotonic() + backoff_s

    def _compute_backoff_s(self, times: int) -> float:
        return _pause_s(self.first_backoff_s, times) * random.uniform(0.7, 1.3)

    async def _identify(self, endpoint: Endpoint) -> ServingEngine:
        """Find out which engine a server is, and that it serves the model, before the first request."""
        if endpoint.engine and endpoint.semaphore:
            return endpoint.engine
        async with endpoint.identify_lock:
            if endpoint.backoff_until > time.monotonic():  # the task before this one found it unreachable
                raise http_session.ExchangeFailedError("connection", "can't be reached")
            if not endpoint.engine:
                try:
                    endpoint.engine = await registry.identify_engine(self._http, endpoint.url)
                except http_session.ExchangeFailedError as error:
                    self._note_awaited(endpoint, error)
                    endpoint.failures += 1
                    endpoint.backoff_until = time.monotonic() + self._compute_backoff_s(endpoint.failures)
                    raise
                if endpoint.is_awaited:
                    _print_note(f"{endpoint.url} answers now")
            most = endpoint.engine.most_at_once or self.concurrency
            endpoint.semaphore = endpoint.semaphore or asyncio.Semaphore(most)
            return endpoint.engine


def _pause_s(first_s: float, times: int) -> float:
    """Return the pause after `times` failures in a row, without its random factor."""
    return min(first_s * 2**times, MAX_BACKOFF_S)


def _print_note(text: str) -> None:
    """Print a note, which `aerie run` shows at once; above the progress bar, where there is one."""
    tqdm.write(f"note: {text}", file=sys.stderr)
