"""Loads of the load generator on a server that streams at times we set, for its tests."""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from typing import Any

from stages.engines import registry
from stages.engines.cell_engine import LoadResult
from stages.engines.http_session import HttpSession
from stages.engines.protocol import LoadRequest
from stages.measuring import load_generator
from stages.measuring.load_generator import Arrivals
from tests.engines.misbehaving_server import Fake

AT_ONCE = Arrivals(math.inf, None, 0)


def make_requests(count: int, prompt: list[int] | None = None, **changes: Any) -> list[LoadRequest]:
    fields = {
        "prompt": prompt or [1, 2, 3],
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": None,
        "ignore_eos": False,
    } | changes
    return [LoadRequest(id=str(index), **fields) for index in range(count)]


def run_load(url: str, requests: list[LoadRequest], arrivals: Arrivals = AT_ONCE, **overrides: Any) -> LoadResult:
    return asyncio.run(start_load(url, requests, arrivals, **overrides))


def start_load(
    url: str,
    requests: list[LoadRequest],
    arrivals: Arrivals = AT_ONCE,
    engine: str = "vllm",
    request_timeout_s: float = 60.0,
    warmup: Sequence[LoadRequest] = (),
    **more: Any,
) -> Coroutine[Any, Any, LoadResult]:
    session = HttpSession("tiny", request_timeout_s, "benchmark_served.servers.sglang")
    return load_generator.run_load(session, url, registry.get(engine), requests, arrivals, list(warmup), **more)


def add_sglang_pages(fake: Fake) -> Fake:
    fake.pages |= {
        "/flush_cache": b"Cache flushed.",
        "/server_info": {"internal_states": [{"avg_spec_accept_length": 2.5}]},
    }
    return fake


SCHEDULE = [(0.01, 1), (0.02, 3), (0.03, 1), (0.04, 4)]  # s after the request came, tokens
