"""What the client adds to the servers' own time, against a null server that answers after a fixed delay.

    python -m benchmarks.client_overhead [AT_ONCE [DELAY_S [ROUNDS]]]     # writes docs/results/client_overhead.json

The null server is another process. Best possible is ROUNDS x DELAY_S for AT_ONCE x ROUNDS requests, AT_ONCE of them
under way at any moment; the overhead is the share by which the client (with sample_target's own worker pool and body)
takes longer. The first round, which opens the connections, is a warm-up outside the clock.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from stages.serving import client, server


async def measure(url: str, at_once: int, rounds: int) -> tuple[float, float, list[float]]:
    """Wall and CPU seconds of this process, and each request's latency."""
    took: list[float] = []

    async def work(http: client.Client, queue) -> None:
        for number in queue:
            body = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 200, "seed": number}
            begun = time.perf_counter()
            await http.ask(body)
            took.append(time.perf_counter() - begun)

    async with client.Client([url], "tiny", at_once, 60.0, 3) as http:
        warm = iter(range(at_once))
        await asyncio.gather(*(work(http, warm) for _ in range(at_once)))
        took.clear()
        queue = iter(range(at_once * rounds))
        begun, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work(http, queue) for _ in range(at_once)))
        return time.perf_counter() - begun, time.process_time() - cpu, took


def main() -> None:
    words = sys.argv[1:] + ["256", "5", "4"][len(sys.argv) - 1 :]
    at_once, delay_s, rounds = int(words[0]), float(words[1]), int(words[2])
    port = server.free_port()
    null = subprocess.Popen([sys.executable, "-m", "tests.serving.fake", str(port), str(delay_s)])
    try:
        for _ in range(100):
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        wall, cpu, took = asyncio.run(measure(f"http://127.0.0.1:{port}", at_once, rounds))
    finally:
        null.terminate()
        null.wait()
    best = rounds * delay_s
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "at_once": at_once,
        "delay_s": delay_s,
        "requests": at_once * rounds,
        "wall_s": round(wall, 3),
        "best_possible_s": best,
        "overhead_percent": round(100 * (wall / best - 1), 2),
        "client_cpu_ms_per_request": round(1e3 * cpu / (at_once * rounds), 3),
        "latency_s": {"p50": round(statistics.median(took), 4), "p99": round(sorted(took)[int(0.99 * len(took))], 4)},
    }
    results = Path("docs/results/client_overhead.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(results.read_text()) if results.exists() else []
    known = [r for r in known if (r["at_once"], r["delay_s"]) != (at_once, delay_s)] + [result]
    results.write_text(json.dumps(sorted(known, key=lambda r: (r["at_once"], r["delay_s"])), indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
