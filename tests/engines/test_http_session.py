"""Connections that are kept, and those that a server has closed meanwhile."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from aiohttp import web

from stages.engines import http_session

CLOSES_S = 0.3  # uvicorn's 5


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a thread of its own, which closes what is idle."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="yes")

    async def serve() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app, keepalive_timeout=CLOSES_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    def work() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(serve())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_a_connection_that_the_server_closed_while_nobody_looked_is_not_taken_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of 256 requests failed so on an H200: after a warm-up, all came at once in one turn of the loop."""
    monkeypatch.setattr(http_session, "KEEPALIVE_S", CLOSES_S / 3)

    async def run() -> None:
        async with http_session.HttpSession("tiny", 10.0, "benchmark_served.server") as http:
            async with http.open(url, "POST", "/generate") as response:
                assert await response.text() == "yes"
            time.sleep(3 * CLOSES_S)  # the loop is busy, and doesn't hear of it
            async with http.open(url, "POST", "/generate") as response:
                assert await response.text() == "yes"

    asyncio.run(run())
