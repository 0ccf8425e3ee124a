"""Asks OpenAI-compatible servers for answers: many at a time, over a list of servers, again where that may help.

A request goes to the server with the fewest under way. Busy (429), broken (5xx), cut, hung and unreachable are asked
again, elsewhere first, with growing pauses; a server that fails several times in a row rests, longer each time, and is
tried again when its rest is over. What a server refuses (other 4xx) would be refused again, so it is not asked again.
"""

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stages.serving import http_session

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
FAILURES_BEFORE_BACKOFF = 3  # failures, without an answer between, that send a server to rest
PARAMS_SECTION = "sample_target.server"  # of params.yaml, for messages


@dataclass(frozen=True)
class ChatAnswer:
    text: str
    reasoning: str | None  # where the server takes it out of the text
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_ids: list[int] | None  # where the server says them
    answer_ids: list[int] | None


@dataclass
class Endpoint:
    url: str  # without /v1
    engine: str  # transformers, sglang, vllm, or openai for any other
    under_way: int = 0
    answered: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0
    turn: asyncio.Semaphore | None = None
    meeting: asyncio.Lock = field(default_factory=asyncio.Lock)


def expand_urls(base_urls: list[str]) -> list[str]:
    """One URL per server: http://host:6000-6007 is eight of them. Raises ValueError for a range that is none."""
    urls: list[str] = []
    for given in base_urls:
        url = http_session.strip_api_path(given)
        match = re.fullmatch(r"(https?://[^:/]+):(\d+)-(\d+)", url)
        if not match:
            urls.append(url)
            continue
        first, last = int(match[2]), int(match[3])
        if not 0 < first <= last <= 65535 or last - first >= 1024:
            raise ValueError(
                f"sample_target.server.base_urls: {given} is no range of ports; write http://host:6000-6007"
            )
        urls += [f"{match[1]}:{port}" for port in range(first, last + 1)]
    if twice := sorted({u for u in urls if urls.count(u) > 1}):
        raise ValueError(f"sample_target.server.base_urls names {', '.join(twice)} twice; name each server once")
    return urls


class ChatClient:
    """Use as `async with`; `ask` may be called from any number of tasks."""

    def __init__(
        self,
        urls: list[str],
        model: str,
        concurrency: int,
        timeout_s: float,
        attempts: int,
        key: str | None = None,
        engine: str | None = None,
        check: Callable[[], None] = lambda: None,
        first_rest_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self.model, self.attempts, self.timeout_s, self.check = model, attempts, timeout_s, check
        self.concurrency, self.first_rest_s = concurrency, first_rest_s
        self.asked_again: dict[str, int] = {}  # by reason
        self.endpoints = [Endpoint(url, engine or "") for url in urls]
        self._gate = asyncio.Semaphore(concurrency)
        self._http = http_session.HttpSession(model, timeout_s, PARAMS_SECTION, key)

    async def __aenter__(self) -> "ChatClient":
        await self._http.__aenter__()
        met = await asyncio.gather(*(self._greet(e) for e in self.endpoints), return_exceptions=True)
        for error in met:
            if error and not isinstance(
                error, http_session.ExchangeFailedError
            ):  # one that is away now may come; `ask` meets it then
                await self.__aexit__()
                raise error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__()

    async def ask(self, body: dict[str, Any], engines: dict[str, dict[str, Any]] | None = None) -> ChatAnswer:
        """One answer to one request, `body` without the model; `engines` adds what only that engine understands.

        Raises:
            session.Refused: where the server will not answer this row.
            ValueError: where it can't be answered now (after all attempts) or every row would fail the same way.
        """
        async with self._gate:
            return await self._attempts(body, engines or {})

    async def _attempts(self, body: dict[str, Any], engines: dict[str, dict[str, Any]]) -> ChatAnswer:
        failed, avoid = "", None
        for attempt in range(self.attempts):
            endpoint = await self._choose(avoid)
            endpoint.under_way += 1
            try:
                await self._meet(endpoint)
                async with endpoint.turn or contextlib.nullcontext():
                    answer = await self._once(endpoint, body, engines)
            except http_session.ExchangeFailedError as error:
                failed, avoid = f"{endpoint.url}: {error}", endpoint
                self._failed(endpoint, error)
                self.check()
                if attempt + 1 < self.attempts and (attempt or len(self.endpoints) == 1):  # elsewhere at once
                    await asyncio.sleep(max(self._pause(attempt), min(error.after_s, MAX_BACKOFF_S)))
                continue
            finally:
                endpoint.under_way -= 1
            endpoint.failures, endpoint.answered = 0, endpoint.answered + 1
            return answer
        raise ValueError(
            f"no answer in {self.attempts} attempts, the last at {failed}; see to the servers and run again: what was "
            "answered is kept. Or raise sample_target.server.attempts or timeout_s"
        )

    async def _once(self, endpoint: Endpoint, body: dict[str, Any], engines: dict[str, dict[str, Any]]) -> ChatAnswer:
        whole = {"model": self.model, **body, **engines.get(endpoint.engine, {})}
        reply = await self._http.send(endpoint.url, "POST", "/v1/chat/completions", json=whole)
        self._http.check(endpoint.url, reply)
        return self._read(endpoint, reply.body)

    def _read(self, endpoint: Endpoint, body: bytes) -> ChatAnswer:
        """The answer in a response; one that is cut or malformed is asked again."""
        try:
            found = json.loads(body)
            choice, usage = found["choices"][0], found.get("usage") or {}
            message, finish_reason = choice["message"], choice["finish_reason"]
            text = message.get("content") or ""
            reasoning = message.get("reasoning_content") or message.get("reasoning") or None
            name = found.get("model")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise http_session.ExchangeFailedError("malformed", f"not a chat completion ({error!r})") from None
        if (
            name is not None and name != self.model and name.rpartition("@")[0] != self.model
        ):  # transformers adds @revision
            raise ValueError(
                f"{endpoint.url} answered as model {name!r}, expected {self.model!r}: it serves another model. Correct "
                "sample_target.server.base_urls, or set server.model to that name if it is the target"
            )
        if finish_reason not in http_session.FINISH_REASONS:
            if finish_reason in (None, "abort", "error"):
                raise http_session.ExchangeFailedError("malformed", f"finish_reason {finish_reason!r}")
            raise http_session.RequestRefusedError(200, f"finish_reason {finish_reason!r}, expected stop or length")
        return ChatAnswer(
            text, reasoning, finish_reason, usage.get("prompt_tokens"), usage.get("completion_tokens"),
            found.get("prompt_token_ids"), choice.get("token_ids"),
        )  # fmt: skip

    async def _choose(self, avoid: Endpoint | None) -> Endpoint:
        """The idlest server that does not rest, another than `avoid` if there is one; where all rest, the first to rise."""
        while True:
            now = time.monotonic()
            awake = [e for e in self.endpoints if e.rests_until <= now]
            if awake:
                return min(awake, key=lambda e: (e is avoid, e.under_way, e.answered))
            await asyncio.sleep(min(e.rests_until for e in self.endpoints) - now)

    def _failed(self, endpoint: Endpoint, error: http_session.ExchangeFailedError) -> None:
        self.asked_again[error.reason] = self.asked_again.get(error.reason, 0) + 1
        if endpoint.rests_until > time.monotonic():  # many were under way when it fell; that is one failure
            return
        endpoint.failures += 1
        if endpoint.failures >= FAILURES_BEFORE_BACKOFF:
            endpoint.rests_until = time.monotonic() + self._pause(endpoint.failures - FAILURES_BEFORE_BACKOFF)

    def _pause(self, times: int) -> float:
        return min(self.first_rest_s * 2**times, MAX_BACKOFF_S) * random.uniform(0.7, 1.3)

    async def _greet(self, endpoint: Endpoint) -> None:
        await self._meet(endpoint)

    async def _meet(self, endpoint: Endpoint) -> None:
        """Learn which engine a server is, and that it serves the model, before anything is asked of it."""
        if endpoint.engine and endpoint.turn:
            return
        async with endpoint.meeting:
            if endpoint.rests_until > time.monotonic():  # whoever held the lock found that it is away
                raise http_session.ExchangeFailedError("connection", "can't be reached")
            if not endpoint.engine:
                try:
                    endpoint.engine = await self._http.engine_of(endpoint.url)
                except http_session.ExchangeFailedError:
                    endpoint.failures += 1
                    endpoint.rests_until = time.monotonic() + self._pause(endpoint.failures)
                    raise
            # `transformers serve` seeds torch when a request comes in, and generates in one thread: two requests at a
            # time would share a seed, and be no faster.
            endpoint.turn = endpoint.turn or asyncio.Semaphore(
                1 if endpoint.engine == "transformers" else self.concurrency
            )
