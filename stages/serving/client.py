"""Asks OpenAI-compatible servers for answers: many at a time, over a list of servers, again where that may help.

A request goes to the server with the fewest under way. Busy (429), broken (5xx), cut, hung and unreachable are asked
again, elsewhere first, with growing pauses; a server that fails several times in a row rests, longer each time, and is
tried again when its rest is over. What a server refuses (other 4xx) would be refused again, so it is not asked again.

Through aiohttp, which takes a fifth of httpx's time for a request (docs/sampling.md): when hundreds of answers come in
one moment they wait for each other, and that wait is the whole overhead.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

TRANSIENT = {408, 425, 429, 500, 502, 503, 504, 529}
ROW_REFUSED = {400, 413, 422}  # this row is at fault, so long as others are answered; any other 4xx concerns all
FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
IN_A_ROW = 3  # failures, without an answer between, that send a server to rest
FINISHED = ("stop", "length")


@dataclass(frozen=True)
class Answer:
    text: str
    reasoning: str | None  # where the server takes it out of the text
    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    prompt_ids: list[int] | None  # where the server says them
    answer_ids: list[int] | None


class Reply(NamedTuple):
    """A server's response, read whole."""

    status: int
    after: str  # its Retry-After, where it says one
    body: bytes

    def said(self) -> str:
        return " ".join(self.body.decode(errors="replace").split())[:300]


class Refused(Exception):
    """A server understood the request and will not answer it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status} {message}")
        self.status = status


@dataclass
class Endpoint:
    url: str  # without /v1
    engine: str  # transformers, sglang, vllm, or openai for any other
    under_way: int = 0
    answered: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0
    proxy: str | None = None
    turn: asyncio.Semaphore | None = None
    meeting: asyncio.Lock = field(default_factory=asyncio.Lock)


def expand(base_urls: list[str]) -> list[str]:
    """One URL per server: http://host:6000-6007 is eight of them. Raises ValueError for a range that is none."""
    urls: list[str] = []
    for given in base_urls:
        url = re.sub(r"(/v1)?/?$", "", given)
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


def proxy_of(url: str) -> str | None:
    """What the environment (HTTPS_PROXY, NO_PROXY) says of a server; nothing of one on this machine, where none is meant."""
    parts = urlsplit(url)
    if parts.hostname in ("127.0.0.1", "localhost", "::1") or proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def api_key(variable: str | None) -> str | None:
    """The key in the environment; no message ever holds it."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(
            f"sample_target.server.api_key_env is {variable}, but that variable is not set; export it, or use null"
        )
    return os.environ[variable]


class Client:
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
        first_rest_s: float = FIRST_REST_S,
    ) -> None:
        self.model, self.attempts, self.timeout_s, self.check = model, attempts, timeout_s, check
        self.concurrency, self.first_rest_s = concurrency, first_rest_s
        self.asked_again: dict[str, int] = {}  # by reason
        self.endpoints = [Endpoint(url, engine or "", proxy=proxy_of(url)) for url in urls]
        self._gate = asyncio.Semaphore(concurrency)
        self._key = (lambda: key) if key else None  # in no repr
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # `_gate` is the limit
            timeout=aiohttp.ClientTimeout(self.timeout_s, sock_connect=min(10.0, self.timeout_s)),
            headers={"Authorization": f"Bearer {self._key()}"} if self._key else {},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        met = await asyncio.gather(*(self._greet(e) for e in self.endpoints), return_exceptions=True)
        for error in met:
            if error and not isinstance(error, _AskAgain):  # one that is away now may come; `ask` meets it then
                await self.__aexit__()
                raise error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http:
            await self._http.close()

    async def ask(self, body: dict[str, Any], engines: dict[str, dict[str, Any]] | None = None) -> Answer:
        """One answer to one request, `body` without the model; `engines` adds what only that engine understands.

        Raises:
            Refused: where the server will not answer this row.
            ValueError: where it can't be answered now (after all attempts) or every row would fail the same way.
        """
        async with self._gate:
            return await self._attempts(body, engines or {})

    async def _attempts(self, body: dict[str, Any], engines: dict[str, dict[str, Any]]) -> Answer:
        failed, avoid = "", None
        for attempt in range(self.attempts):
            endpoint = await self._choose(avoid)
            endpoint.under_way += 1
            try:
                await self._meet(endpoint)
                async with endpoint.turn or contextlib.nullcontext():
                    answer = await self._once(endpoint, body, engines)
            except _AskAgain as error:
                failed, avoid = f"{endpoint.url}: {error}", endpoint
                self._failed(endpoint, error)
                self.check()
                if attempt + 1 < self.attempts and (attempt or len(self.endpoints) == 1):  # elsewhere at once
                    await asyncio.sleep(max(self._pause(attempt), min(error.after_s, LONGEST_REST_S)))
                continue
            finally:
                endpoint.under_way -= 1
            endpoint.failures, endpoint.answered = 0, endpoint.answered + 1
            return answer
        raise ValueError(
            f"no answer in {self.attempts} attempts, the last at {failed}; see to the servers and run again: what was "
            "answered is kept. Or raise sample_target.server.attempts or timeout_s"
        )

    async def _once(self, endpoint: Endpoint, body: dict[str, Any], engines: dict[str, dict[str, Any]]) -> Answer:
        whole = {"model": self.model, **body, **engines.get(endpoint.engine, {})}
        reply = await self._send(endpoint, "POST", "/v1/chat/completions", json=whole)
        if reply.status in TRANSIENT:
            raise _AskAgain(f"http {reply.status}", f"HTTP {reply.status} {reply.said()}",
                            float(reply.after) if reply.after.isdigit() else 0.0)  # fmt: skip
        if reply.status in ROW_REFUSED:
            raise Refused(reply.status, reply.said())
        if reply.status != 200:
            hint = {401: "; is sample_target.server.api_key_env right?", 403: "; is sample_target.server.api_key_env right?",
                    404: "; is it an OpenAI-compatible server, and does it serve that model?"}  # fmt: skip
            raise ValueError(
                f"{endpoint.url} answered HTTP {reply.status} to a request for model {self.model}: "
                f"{reply.said()}{hint.get(reply.status, '')}"
            )
        return self._read(endpoint, reply.body)

    async def _send(self, endpoint: Endpoint, method: str, path: str, **more: Any) -> Reply:
        """One exchange, bounded from asking to the last byte. Redirects are not followed: they'd carry the key elsewhere."""
        assert self._http, "a client is used inside `async with`"
        url = endpoint.url + path
        try:
            async with self._http.request(method, url, proxy=endpoint.proxy, allow_redirects=False, **more) as response:
                return Reply(response.status, response.headers.get("Retry-After", ""), await response.read())
        except aiohttp.ConnectionTimeoutError:
            raise _AskAgain("timeout", "no connection in time") from None
        except TimeoutError:
            raise _AskAgain("timeout", f"no whole answer within {self.timeout_s:g} s") from None
        except aiohttp.ClientError as error:  # refused, reset, closed in the middle
            raise _AskAgain("connection", f"{type(error).__name__} {error}".strip()) from None

    def _read(self, endpoint: Endpoint, body: bytes) -> Answer:
        """The answer in a response; one that is cut or malformed is asked again."""
        try:
            found = json.loads(body)
            choice, usage = found["choices"][0], found.get("usage") or {}
            message, finish_reason = choice["message"], choice["finish_reason"]
            text = message.get("content") or ""
            reasoning = message.get("reasoning_content") or message.get("reasoning") or None
            name = found.get("model")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _AskAgain("malformed", f"not a chat completion ({error!r})") from None
        if (
            name is not None and name != self.model and name.rpartition("@")[0] != self.model
        ):  # transformers adds @revision
            raise ValueError(
                f"{endpoint.url} answered as model {name!r}, expected {self.model!r}: it serves another model. Correct "
                "sample_target.server.base_urls, or set server.model to that name if it is the target"
            )
        if finish_reason not in FINISHED:
            if finish_reason in (None, "abort", "error"):
                raise _AskAgain("malformed", f"finish_reason {finish_reason!r}")
            raise Refused(200, f"finish_reason {finish_reason!r}, expected stop or length")
        return Answer(
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

    def _failed(self, endpoint: Endpoint, error: "_AskAgain") -> None:
        self.asked_again[error.reason] = self.asked_again.get(error.reason, 0) + 1
        if endpoint.rests_until > time.monotonic():  # many were under way when it fell; that is one failure
            return
        endpoint.failures += 1
        if endpoint.failures >= IN_A_ROW:
            endpoint.rests_until = time.monotonic() + self._pause(endpoint.failures - IN_A_ROW)

    def _pause(self, times: int) -> float:
        return min(self.first_rest_s * 2**times, LONGEST_REST_S) * random.uniform(0.7, 1.3)

    async def _greet(self, endpoint: Endpoint) -> None:
        await self._meet(endpoint)

    async def _meet(self, endpoint: Endpoint) -> None:
        """Learn which engine a server is, and that it serves the model, before anything is asked of it."""
        if endpoint.engine and endpoint.turn:
            return
        async with endpoint.meeting:
            if endpoint.rests_until > time.monotonic():  # whoever held the lock found that it is away
                raise _AskAgain("connection", "can't be reached")
            if not endpoint.engine:
                try:
                    endpoint.engine = await self._engine(endpoint)
                except _AskAgain:
                    endpoint.failures += 1
                    endpoint.rests_until = time.monotonic() + self._pause(endpoint.failures)
                    raise
            # `transformers serve` seeds torch when a request comes in, and generates in one thread: two requests at a
            # time would share a seed, and be no faster.
            endpoint.turn = endpoint.turn or asyncio.Semaphore(
                1 if endpoint.engine == "transformers" else self.concurrency
            )

    async def _engine(self, endpoint: Endpoint) -> str:
        served: list[dict[str, Any]] = []
        briefly = aiohttp.ClientTimeout(min(10.0, self.timeout_s))
        reply = await self._send(endpoint, "GET", "/v1/models", timeout=briefly)
        if reply.status in (401, 403):
            raise ValueError(
                f"{endpoint.url} answered HTTP {reply.status} for its models; "
                "is sample_target.server.api_key_env right?"
            )
        try:
            if reply.status == 200:
                served = [m for m in json.loads(reply.body)["data"] if isinstance(m, dict)]
            engine = next((m["owned_by"] for m in served if m.get("owned_by") in ("sglang", "vllm")), "openai")
            if engine == "openai":
                spec = await self._send(endpoint, "GET", "/openapi.json", timeout=briefly)
                known = json.loads(spec.body)["paths"] if spec.status == 200 else {}
                if {"/load_model", "/v1/chat/completions"} <= set(known):
                    return "transformers"  # it lists what lies in its cache, whatever it serves
        except (KeyError, TypeError, ValueError):
            return "openai"
        names = [str(m.get("id")) for m in served]
        if names and self.model not in names:
            raise ValueError(
                f"{endpoint.url} serves {', '.join(names)}, expected {self.model}; correct sample_target.server.base_urls, or "
                "set server.model to the target's name there"
            )
        return engine


class _AskAgain(Exception):
    def __init__(self, reason: str, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.after_s = reason, after_s
