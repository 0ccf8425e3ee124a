"""Served cells of an embedded target on one GPU, every stage without DVC: tau beside replay's, and seed 002's scenarios.

    python3 -m benchmarks.served RECIPE [--device cuda] [--dtype bfloat16] [--rows 100] [--kit /tmp/kit] [--jobs 1]
                                        [--workloads eval code_gen chat completion sweep] [--part all|train|replay|serve]

For a machine that has torch but not our installation (a lent GPU), in a copy: it edits params.yaml. The engine is SGLang
of shared/gpu's kit, in an environment of its own. Prints a line a tree; cells and page lie under results/. Parts are calls
of their own on a lent machine: `train` ends with replay; `replay` takes a target and drafts that lie there already, and
samples, extracts and replays on this device; `serve` goes on from either. With `--jobs` several servers run at once: taus
are what they are, times are not.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline.recipes import use_recipe
from stages.results import replay_records, served_records

TREES = ["t5_1_6", "t8_2_16", "t10_3_32", "t5_4_16", "t6_10_32", "t8_2_8"]  # the last one SGLang refuses
CHECKPOINT = "e009"
KIT = (  # what runs without the kernels that the kit leaves out (shared/gpu/README.md)
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-custom-all-reduce",
    "--cuda-graph-backend-prefill", "disabled", "--mm-feature-transport", "cpu", "--mm-attention-backend", "triton_attn",
)  # fmt: skip
SCENARIOS: dict[str, dict[str, Any]] = {  # seed 002, section 2.2; lengths exact, not drawn
    "code_gen": {"num_prompts": 128, "input_tokens": 512, "max_new_tokens": 1024, "request_rate": "inf", "concurrency": 64},
    "chat": {"num_prompts": 128, "input_tokens": 256, "max_new_tokens": 256, "request_rate": 8.0, "concurrency": 32},
    "completion": {"num_prompts": 256, "input_tokens": 1024, "max_new_tokens": 128, "request_rate": "inf", "concurrency": 128},
}  # fmt: skip
SWEEP = {"num_prompts": 256, "input_tokens": 128, "max_new_tokens": [10, 128]}
FIRST = (
    "fix_data", "prepare_target", "sample_target", "extract_hiddens", "init_draft", "check_overfit", "train_draft e003",
    "train_draft e009", f"replay_trees {CHECKPOINT}", "time_trees e000",
)  # fmt: skip
GIVEN = (
    "fix_data",
    "sample_target",
    "extract_hiddens",
    "replay_trees",
)  # what is run anew where target and drafts are given


def command(kit: str) -> list[str]:
    """SGLang in the kit's own environment: its transformers is not the stages'."""
    if not kit:
        return [sys.executable, "-m", "tests.serving.engine_double", "serve"]
    settings = subprocess.run(
        ["bash", "-c", f"PYTHONPATH= KIT={kit}; . {kit}/env.sh; env"], capture_output=True, text=True
    )
    names = ("PYTHONPATH", "TVM_FFI", "TRITON", "HF_HUB", "TRANSFORMERS", "TORCHDYNAMO", "SGLANG", "CUDA_HOME")
    kept = [line for line in settings.stdout.splitlines() if line.startswith(names)]
    return ["env", *kept, "python3", "-m", "sglang.launch_server"]


def of_kit(server: dict[str, Any], kit: str) -> dict[str, Any]:
    """benchmark_served.server, of the kit's SGLang."""
    return dict(server) | {"command": command(kit), "launch_args": list(KIT) if kit else []}


def edit(o: argparse.Namespace) -> None:
    use_recipe(o.recipe)
    yaml = YAML()
    p = yaml.load(Path("params.yaml").read_text())
    p["target"] |= {"device": o.device, "dtype": o.dtype}
    p["extract_hiddens"] |= {"dtype": o.dtype}
    p["fix_data"] |= {"eval_share": 0.4}  # half a percent of tau needs hundreds of answers
    p["sample_target"] |= {"eval_rows": o.rows, "temperature": 0.0}
    if o.part == "replay":
        p["sample_target"] |= {"train_rows": 8}
    p["replay_trees"] |= {
        "checkpoints": [CHECKPOINT],
        "num_steps": [5, 6, 8, 10],
        "topk": [1, 2, 3, 4, 10],
        "num_draft_tokens": [8, 16, 32],
    }
    first = dict(p["benchmark"]["workloads"]["eval"])
    drawn = {**first, "prompts": "random", "ignore_eos": True, "warmup": 64, "repeats": o.repeats}
    workloads = {"eval": {**first, "num_prompts": o.rows, "concurrency": o.concurrency}}
    workloads |= {name: {**drawn, **keys} for name, keys in SCENARIOS.items()}
    workloads |= {"sweep": {**drawn, **SWEEP, "concurrency": o.at_once, "repeats": 1}}
    p["benchmark"] |= {"workloads": workloads, "torch_workloads": [], "checkpoints": [CHECKPOINT], "trees": TREES[:1]}
    server = of_kit(p["benchmark_served"]["server"], o.kit) | {"mem_fraction": o.mem_fraction}
    server |= {"max_total_tokens": 50_000 if o.jobs > 1 else None}
    p["benchmark_served"] |= {
        "workloads": list(workloads),
        "checkpoints": [CHECKPOINT],
        "trees": TREES,
        "server": server,
    }
    yaml.dump(p, Path("params.yaml"))


def stage(words: str) -> None:
    begun = time.perf_counter()
    done = subprocess.run(["python3", "-m", *f"stages.{words}".split()], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{words} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    print(f"{done.stdout.strip().splitlines()[-1]}  [{words}: {time.perf_counter() - begun:.1f} s]", flush=True)


def compare(trees: list[str]) -> list[dict[str, Any]]:
    """Served tau beside replay's, of the same prompts."""
    found, plain = [], served_records.read_served_cell("eval", None, None)["points"][0]
    said = {(r["id"], r["turn"]): r["answer"] for r in plain["requests"]}
    replayed = replay_records.select_temperature(replay_records.read_replay(CHECKPOINT), 0)
    mine = {tree.shape.name: tree.tau for tree in replayed}
    print(f"{'tree':10}{'served':>9}{'replay':>9}{'off by':>9}{'same answers':>14}{'cycle ms':>10}{'speedup':>9}")
    for tree in trees:
        cell = served_records.read_served_cell("eval", CHECKPOINT, tree)
        if not cell["points"]:
            print(f"{tree:10}{'-':>9}{mine[tree]:9.4f}  {cell['reason']}")
            continue
        (point,) = cell["points"]
        tau, load, rows = point["acceptance"]["tau"], point["loads"][0], point["requests"]
        same = sum(r["answer"] == said[r["id"], r["turn"]] for r in rows) / len(rows)
        cycle = 1000 * sum(r["e2e_s"] - r["ttft_s"] for r in rows) / point["acceptance"]["cycles"]
        speedup = load["output_throughput"] / plain["loads"][0]["output_throughput"]
        line = {"tree": tree, "served": tau, "replay": mine[tree], "off": tau / mine[tree] - 1, "same": same}
        found.append(line | {"cycle_ms": cycle, "speedup": speedup})
        print(
            f"{tree:10}{tau:9.4f}{mine[tree]:9.4f}{line['off']:9.2%}{same:14.0%}{cycle:10.2f}{speedup:9.2f}", flush=True
        )
    return found


def main() -> None:
    takes = argparse.ArgumentParser()
    takes.add_argument("recipe")
    takes.add_argument("--device", default="cuda")
    takes.add_argument("--dtype", default="bfloat16")
    takes.add_argument("--rows", type=int, default=100)
    takes.add_argument("--concurrency", type=int, default=1)
    takes.add_argument("--repeats", type=int, default=2, help="of each scenario")
    takes.add_argument("--mem-fraction", type=float, default=0.5)
    takes.add_argument("--jobs", type=int, default=1, help="servers at once, each with a cache of 50,000 tokens")
    takes.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="of the sweep")
    takes.add_argument("--part", choices=("all", "train", "replay", "serve"), default="all")
    takes.add_argument("--kit", default="/tmp/kit", help="empty: the tests' double instead of SGLang")
    takes.add_argument("--workloads", nargs="+", default=["eval"], choices=["eval", *SCENARIOS, "sweep"])
    takes.add_argument("--trees", nargs="+", default=TREES)
    o = takes.parse_args()
    edit(o)
    if o.part != "serve":
        stages = [s for s in FIRST if o.part != "replay" or s.startswith(GIVEN)]
        for words in [*stages, *(f"prepare_prompts {w}" for w in o.workloads)]:
            stage(words)
    if o.part in ("train", "replay"):
        return
    cells = []
    for workload in o.workloads:
        with_draft = o.trees if workload == "eval" else ["t5_4_16"]
        cells += [f"{workload}", *(f"{workload} {CHECKPOINT} {tree}" for tree in with_draft)]
    with ThreadPoolExecutor(o.jobs) as pool:
        list(pool.map(lambda cell: stage(f"benchmark_served {cell}"), cells))
    if "eval" in o.workloads:
        Path("results/served_against_replay.json").write_text(json.dumps(compare(o.trees), indent=1) + "\n")


if __name__ == "__main__":
    main()
