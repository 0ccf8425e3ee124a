"""What the load generator itself costs, against a null server that streams tokens at a fixed pace.

    python -m benchmarks.load_overhead [AT_ONCE [GAP_S [TOKENS [ROUNDS]]]]

The null server is another process; AT_ONCE streams send a chunk of one token every GAP_S, TOKENS of them, ROUNDS times
over. For each dialect: seconds of this process's CPU for each token event, all told (reading, parsing, keeping the time, a
share of connecting); and by how much the clock we read for an event is later than the server's when it sent it, on the
machine's one clock. SGLang's own dialect repeats the whole answer in every chunk, so it depends on TOKENS.
"""

import asyncio
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np

from stages.runtime import free_port
from stages.serving import latency, load_generator
from stages.serving.load_generator import Arrivals, LoadRequest

WARM_TOKENS = 3


def asks(dialect: str, count: int, tokens: int) -> list[LoadRequest]:
    prompt: Any = [{"role": "user", "content": "x" * 400}] if dialect == "chat" else list(range(400))
    return [LoadRequest(str(n), prompt, tokens, 0.0, 1.0, None, True) for n in range(count)]


def measured(port: int, dialect: str, engine: str, at_once: int, tokens: int, rounds: int) -> dict[str, Any]:
    wanted, warm = asks(dialect, at_once * rounds, tokens), asks(dialect, at_once, WARM_TOKENS)
    arrivals = Arrivals(math.inf, at_once, 0)
    cpu = time.process_time()
    url = f"http://127.0.0.1:{port}"
    found = asyncio.run(
        load_generator.run_load(url, "null", wanted, arrivals, 600.0, warm, "benchmarks", engine=engine)
    )
    cpu = time.process_time() - cpu
    told = latency.summarise_load(found.records)
    assert told.completed == len(wanted) and told.itl_s, told.failed
    events = sum(len(r.events) for r in found.records) + len(warm) * WARM_TOKENS
    result = {
        "dialect": dialect, "events": events, "events_per_s": round(told.output_throughput),
        "cpu_ms_per_event": round(1e3 * cpu / events, 4),
        "itl_ms": {name: round(1e3 * value, 2) for name, value in asdict(told.itl_s).items()},
    }  # fmt: skip
    if dialect != "generate":
        late = [
            1e3 * (when - float(sent))
            for r in found.records
            for (when, _), sent in zip(r.events, r.text.split(), strict=True)
        ]
        result["late_ms"] = {f"p{p}": round(float(np.percentile(late, p)), 3) for p in (50, 90, 99)}
    return result


def wait_for(port: int) -> None:
    for _ in range(100):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.1)


def main() -> None:
    words = sys.argv[1:] + ["64", "0.02", "200", "2"][len(sys.argv) - 1 :]
    at_once, gap_s, tokens, rounds = int(words[0]), words[1], int(words[2]), int(words[3])
    port = free_port.find_free_port()
    null = subprocess.Popen([sys.executable, "-m", "tests.serving.misbehaving_server", str(port), gap_s, "stream"])
    try:
        wait_for(port)
        print(
            f"{time.strftime('%Y-%m-%d')}: {at_once} at once, a token every {gap_s} s, {tokens} each, {rounds} rounds"
        )
        for dialect, engine in (("generate", "sglang"), ("completions", "vllm"), ("chat", "vllm")):
            print(json.dumps(measured(port, dialect, engine, at_once, tokens, rounds)), flush=True)
    finally:
        null.terminate()
        null.wait()


if __name__ == "__main__":
    main()
