"""Our load generator beside SGLang's own bench_serving, against one SGLang server: the same load, seen by both.

    python3 -m benchmarks.bench_serving TARGET [--kit /tmp/kit] [--requests 128] [--concurrency 16]

Random token ids of one length, answers of one length, a closed loop; each client measures three times, in turns. Run where
an engine is (a lent GPU). Prints both clients' figures and their ratio, the median of the three.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks import engine_kit
from stages.runtime import free_port
from stages.serving import engine_flags, latency, load_generator, server

INPUT, OUTPUT, ROUNDS = 512, 128, 3
FIGURES = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms")


def theirs(words: list[str], port: int, o: argparse.Namespace) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        asked = ["--backend", "sglang", "--host", free_port.HOST, "--port", str(port), "--dataset-name", "random-ids"]
        asked += ["--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--random-range-ratio", "1"]
        asked += ["--num-prompts", str(o.requests), "--max-concurrency", str(o.concurrency), "--output-file", file.name]
        asked += ["--model", o.target, "--tokenizer", o.target, "--flush-cache"]
        subprocess.run([*words[:-1], "sglang.benchmark.serving", *asked], check=True, capture_output=True)
        found = json.loads(Path(file.name).read_text().splitlines()[-1])
    return {name: found[name] for name in FIGURES}


def ours(url: str, vocabulary: int, o: argparse.Namespace, seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    asks = [
        load_generator.LoadRequest(
            str(n), [draw.randrange(vocabulary) for _ in range(INPUT)], OUTPUT, 0.0, 1.0, None, True
        )
        for n in range(o.requests)
    ]
    arrivals = load_generator.Arrivals(float("inf"), o.concurrency, seed)
    found = asyncio.run(
        load_generator.run_load(url, o.target, asks, arrivals, 600, asks[:1], "benchmark", engine="sglang")
    )
    told = asdict(latency.summarise_load(found.records))
    assert told["completed"] == o.requests, told["failed"]
    milli = {
        f"{part}_{name}_ms": 1000 * told[f"{name}_s"][part]
        for name in ("ttft", "tpot", "itl")
        for part in ("mean", "p99")
    }
    return {name: (milli | told)[name] for name in FIGURES}


def main() -> None:
    takes = argparse.ArgumentParser()
    takes.add_argument("target")
    takes.add_argument("--kit", default="/tmp/kit")
    takes.add_argument("--requests", type=int, default=128)
    takes.add_argument("--concurrency", type=int, default=16)
    o = takes.parse_args()
    o.target = str(Path(o.target).absolute())
    vocabulary = json.loads((Path(o.target) / "config.json").read_text())["vocab_size"]
    words, port = engine_kit.build_sglang_command(o.kit), free_port.find_free_port()
    setup = engine_flags.ServerSetup(
        "sglang",
        o.target,
        "bfloat16",
        "cuda",
        False,
        1,
        0.5,
        None,
        o.concurrency,
        None,
        False,
        tuple(engine_kit.KIT_FLAGS["sglang"]),
    )
    with server.ServerProcess(
        "sglang", engine_flags.build_setup_command(setup, port, words), port, Path("bench_serving.log"), 600
    ) as one:
        seen = [(theirs(words, port, o), ours(one.base_url, vocabulary, o, n)) for n in range(ROUNDS)]
    print(f"{o.requests} requests of {INPUT} and {OUTPUT} tokens, {o.concurrency} at once, medians of {ROUNDS}")
    for name in FIGURES:
        a, b = (statistics.median(pair[k][name] for pair in seen) for k in (0, 1))
        print(f"{name:20} bench_serving {a:10.3f}   aerie {b:10.3f}   ratio {b / a:.3f}")


if __name__ == "__main__":
    main()
