"""HTTP to servers of one model: connection and errors.

`client` retries what failed, `load_generator` counts it. aiohttp takes a fifth of httpx's time for a request
(docs/sampling.md).
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504, 529}
NOT_READY_STATUSES = {502, 503, 504}  # of a server that loads its model, or of the proxy before it
ROW_REFUSED_STATUSES = {400, 413, 422}  # this request is at fault; any other 4xx concerns all requests
FINISH_REASONS = ("stop", "length")
KEEPALIVE_S = 3.0  # of an idle connection; uvicorn, which SGLang and vLLM use, closes it after 5


class HttpReply(NamedTuple):
    """A server's complete response."""

    status: int
    retry_after: str  # the Retry-After header, or empty
    body: bytes

    def excerpt(self) -> str:
        """Return the start of the body, for messages."""
        return " ".join(self.body.decode(errors="replace").split())[:300]


class RequestRefusedError(Exception):
    """A server understood the request and will not answer it."""

    reason = "refused"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status} {message}")


class ExchangeFailedError(Exception):
    """An exchange that failed and may succeed when retried; `reason` is short, to count by."""

    def __init__(self, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


@contextmanager
def raise_first_error() -> Iterator[None]:
    """Raise the first ValueError of a TaskGroup whose tasks fail alike, instead of the group.

    `except*` can't raise it bare: before Python 3.11.4 it comes in a group again.
    """
    try:
        yield
    except ExceptionGroup as failed:
        if failed.split(ValueError)[1] is None:
            raise failed.exceptions[0] from None
        raise


def find_proxy(url: str) -> str | None:
    """Return the environment's proxy for a server (HTTPS_PROXY, NO_PROXY); None for servers on this machine."""
    parts = urlsplit(url)
    if parts.hostname in ("127.0.0.1", "localhost", "::1") or proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def read_api_key(variable: str | None, section: str) -> str | None:
    """Return the key from the environment; no message ever holds it. Raises ValueError if the variable is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(f"{section}.api_key_env is {variable}, but that variable is not set; export it, or use null")
    return os.environ[variable]


class HttpSession:
    """Use as `async with`. `section` is the section of params.yaml named in messages."""

    def __init__(self, model: str, timeout_s: float, section: str, key: str | None = None) -> None:
        self.model, self.timeout_s, self.section = model, timeout_s, section
        self._proxies: dict[str, str | None] = {}
        self._key = (lambda: key) if key else None  # keeps it out of repr
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "HttpSession":
        self._http = aiohttp.ClientSession(
            # The caller limits the requests in flight. A request that reuses a connection closed by the server fails.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(self.timeout_s, sock_connect=min(10.0, self.timeout_s)),
            headers={"Authorization": f"Bearer {self._key()}"} if self._key else {},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http:
            await self._http.close()

    @asynccontextmanager
    async def open(
        self, url: str, method: str, path: str, within_s: float | None = None, **kwargs: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response whose body is still to be read. Redirects are not followed: they would carry the key elsewhere.

        Raises:
            ExchangeFailedError: if the server can't be reached, closes the connection, or takes too long, also while the
                body is read.
        """
        assert self._http, "a session is used inside `async with`"
        if url not in self._proxies:
            self._proxies[url] = find_proxy(url)
        proxy = self._proxies[url]
        if within_s is not None:
            kwargs["timeout"] = aiohttp.ClientTimeout(within_s)
        with _translate_errors(within_s or self.timeout_s):
            async with self._http.request(method, url + path, proxy=proxy, allow_redirects=False, **kwargs) as response:
                yield response

    async def send(self, url: str, method: str, path: str, **kwargs: Any) -> HttpReply:
        """Return the response to one request; the timeout covers it from sending to the last byte."""
        async with self.open(url, method, path, **kwargs) as response:
            return await read_reply(response)

    def check(self, url: str, reply: HttpReply) -> None:
        """Check the status of a response.

        Raises:
            ExchangeFailedError: for a transient status.
            RequestRefusedError: if the server refuses this request.
            ValueError: if it would refuse every request.
        """
        if reply.status in TRANSIENT_STATUSES:
            retry_after_s = float(reply.retry_after) if reply.retry_after.isdigit() else 0.0
            raise ExchangeFailedError(f"http {reply.status}", f"HTTP {reply.status} {reply.excerpt()}", retry_after_s)
        if reply.status in ROW_REFUSED_STATUSES:
            raise RequestRefusedError(reply.status, reply.excerpt())
        if reply.status != 200:
            key = f"; is {self.section}.api_key_env right?"
            hint = {401: key, 403: key, 404: "; is it an OpenAI-compatible server, and does it serve that model?"}
            raise ValueError(
                f"{url} answered HTTP {reply.status} to a request for model {self.model}: "
                f"{reply.excerpt()}{hint.get(reply.status, '')}"
            )


async def read_reply(response: aiohttp.ClientResponse) -> HttpReply:
    return HttpReply(response.status, response.headers.get("Retry-After", ""), await response.read())


@contextmanager
def _translate_errors(within_s: float) -> Iterator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError:
        raise ExchangeFailedError("timeout", "no connection in time") from None
    except TimeoutError:
        raise ExchangeFailedError("timeout", f"no whole answer within {within_s:g} s") from None
    except aiohttp.ClientError as error:  # refused, reset, closed in the middle
        raise ExchangeFailedError("connection", f"{type(error).__name__} {error}".strip()) from None
