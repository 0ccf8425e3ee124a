"""Loads of the load generator on a server that streams at times we set, for its tests."""

import asyncio
import math
from typing import Any

from stages.engines import registry
from stages.engines.cell_engine import LoadResult
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
    settings = {"request_timeout_s": 60.0, "warmup": [], "section": "benchmark_served.servers.sglang"} | overrides
    settings["engine"] = registry.get(overrides.get("engine", "vllm"))
    return asyncio.run(load_generator.run_load(url, "tiny", requests, arrivals, **settings))


def add_sglang_pages(fake: Fake) -> Fake:
    fake.pages |= {
        "/flush_cache": b"Cache flushed.",
        "/server_info": {"internal_states": [{"avg_spec_accept_length": 2.5}]},
    }
    return fake


SCHEDULE = [(0.01, 1), (0.02, 3), (0.03, 1), (0.04, 4)]  # s after the request came, tokens
