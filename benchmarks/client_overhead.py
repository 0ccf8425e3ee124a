"""What the client adds to the servers' own time, against a null server that answers after a known delay.

    python -m benchmarks.client_overhead [AT_ONCE [DELAY_S [ROUNDS]]]     # writes docs/results/client_overhead.json

The null server is another process. Two scenarios: `together`, where every answer takes DELAY_S, so that AT_ONCE answers
come in one moment and wait for each other, the worst there is; and `spread`, where each takes half to one and a half of
it, as answers of different lengths do. The overhead is the share by which requests take longer than the server's delay,
on average, with sample_target's own worker pool and body. The floor is the same with the barest client that could be
written, on asyncio's streams: no retries, no checks, nothing but this server understood. The rest is ours.
The first AT_ONCE requests, which open the connections, are a warm-up outside the clock.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.load_overhead import wait_for
from stages.runtime import free_port
from stages.serving import client
from tests.serving.misbehaving_server import spread

Ask = Callable[[dict[str, Any]], Awaitable[Any]]


async def pool(ask: Ask, at_once: int, requests: int) -> dict[str, Any]:
    """Seconds by the clock, of this process's CPU, and each request's by its seed."""
    took: dict[int, float] = {}

    async def work(queue) -> None:
        for seed in queue:
            body = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 200, "seed": seed}
            begun = time.perf_counter()
            await ask(body)
            took[seed] = time.perf_counter() - begun

    warm = iter(range(at_once))
    await asyncio.gather(*(work(warm) for _ in range(at_once)))
    took.clear()
    queue = iter(range(requests))
    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(queue) for _ in range(at_once)))
    return {"wall_s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu, "took": took}


async def ours(port: int, at_once: int, requests: int) -> dict[str, Any]:
    async with client.ChatClient([f"http://127.0.0.1:{port}"], "tiny", at_once, 60.0, 3) as http:
        return await pool(http.complete, at_once, requests)


async def barest(port: int, at_once: int, requests: int) -> dict[str, Any]:
    idle: list[Any] = []

    async def ask(body: dict[str, Any]) -> Any:
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps({"model": "tiny", **body}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        head = await reader.readuntil(b"\r\n\r\n")
        answer = await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0]))
        idle.append((reader, writer))
        return json.loads(answer)

    found = await pool(ask, at_once, requests)
    for _, writer in idle:
        writer.close()
    return found


def measured(found: dict[str, Any], delays: list[float]) -> dict[str, Any]:
    took = [found["took"][seed] for seed in range(len(delays))]
    late = [seconds - delay for seconds, delay in zip(took, delays, strict=True)]
    return {
        "wall_s": round(found["wall_s"], 3),
        "overhead_percent": round(100 * (sum(took) / sum(delays) - 1), 2),
        "cpu_ms_per_request": round(1e3 * found["cpu_s"] / len(took), 3),
        "late_s": {"p50": round(statistics.median(late), 4), "p99": round(sorted(late)[int(0.99 * len(late))], 4)},
    }


def scenario(name: str, at_once: int, delay_s: float, rounds: int) -> dict[str, Any]:
    port = free_port.find_free_port()
    words = [str(port), str(delay_s)] + (["spread"] if name == "spread" else [])
    requests = at_once * rounds
    delays = [spread(delay_s, seed) if name == "spread" else delay_s for seed in range(requests)]
    null = subprocess.Popen([sys.executable, "-m", "tests.serving.misbehaving_server", *words])
    try:
        wait_for(port)
        return {
            "floor": measured(asyncio.run(barest(port, at_once, requests)), delays),
            "client": measured(asyncio.run(ours(port, at_once, requests)), delays),
        }
    finally:
        null.terminate()
        null.wait()


def main() -> None:
    words = sys.argv[1:] + ["256", "5", "4"][len(sys.argv) - 1 :]
    at_once, delay_s, rounds = int(words[0]), float(words[1]), int(words[2])
    result = {
        "date": time.strftime("%Y-%m-%d"), "at_once": at_once, "delay_s": delay_s, "requests": at_once * rounds,
        **{name: scenario(name, at_once, delay_s, rounds) for name in ("together", "spread")},
    }  # fmt: skip
    results = Path("docs/results/client_overhead.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(results.read_text()) if results.exists() else []
    known = [r for r in known if (r["at_once"], r["delay_s"]) != (at_once, delay_s) and "spread" in r] + [result]
    results.write_text(json.dumps(sorted(known, key=lambda r: (r["at_once"], r["delay_s"])), indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
