"""Cells of every method on one GPU by the torch engine, their costs, and SGLang's cells of the same prompts.

    python3 -m benchmarks.methods [--recipe weather-tiny-methods] [--device cuda] [--dtype bfloat16] [--kit /tmp/kit]
                                  [--parts methods torch served]

For a rented GPU machine that has torch but not this project's installation, in a copy, because it edits params.yaml. The target,
drafts and prompts of `eval` must exist, made by `make run` of the recipe. `served` measures SGLang from shared/gpu's kit on the
same prompts, one request at a time, plainly and with EAGLE-3's tree. Cells are written to results/, from which
`python -m stages.report` makes its page; after a failed cell the next one runs.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from ruamel.yaml import YAML

from benchmarks import engine_kit
from pipeline.recipes import use_recipe

TREE, CHECKPOINT, OTHERS = "t8_2_16", "e009", ["t8_1_9", "t5_4_16", "t10_3_32"]


def main() -> None:
    takes = argparse.ArgumentParser()
    takes.add_argument("--recipe", default="weather-tiny-methods")
    takes.add_argument("--model", help="another embedded target, as builtin/weather-tiny-moe")
    takes.add_argument("--device", default="cuda")
    takes.add_argument("--dtype", default="bfloat16")
    takes.add_argument("--kit", default="/tmp/kit", help="empty: the tests' double instead of SGLang")
    takes.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    o = takes.parse_args()
    rows = edit(o)
    for part in o.parts:
        for words in PARTS[part](rows):
            try:
                run_stage(words)
            except SystemExit as failed:
                print(failed, flush=True)


def run_stage(words: str) -> None:
    """Run a stage without DVC; print its last line and seconds. Raises SystemExit with its output if it fails."""
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *f"stages.{words}".split()], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{words} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    print(f"{done.stdout.strip().splitlines()[-1]}  [{words}: {time.perf_counter() - begun:.1f} s]", flush=True)


def edit(o: argparse.Namespace) -> list[str]:
    """Edit params.yaml for the run and return the rows of its table."""
    use_recipe(o.recipe)
    yaml = YAML()
    p = yaml.load(Path("params.yaml").read_text())
    p["target"] |= {"device": o.device, "dtype": o.dtype} | ({"model": o.model} if o.model else {})
    p["benchmark"] |= {"checkpoints": [CHECKPOINT], "trees": [TREE, *OTHERS]}
    server = engine_kit.use_sglang_kit(p["benchmark_served"]["server"], o.kit)
    p["benchmark_served"] |= {"workloads": ["eval"], "checkpoints": [CHECKPOINT], "trees": [TREE], "server": server}
    yaml.dump(p, Path("params.yaml"))
    return [*p["benchmark_methods"]["without_draft"], *p["benchmark_methods"]["with_draft"]]


def methods(rows: list[str]) -> list[str]:
    return [f"benchmark_methods {row}" for row in rows]


def torch(_rows: list[str]) -> list[str]:
    return ["time_trees e000", *(f"benchmark eval {CHECKPOINT} {tree}" for tree in [TREE, *OTHERS])]


def served(_rows: list[str]) -> list[str]:
    return ["benchmark_served eval", f"benchmark_served eval {CHECKPOINT} {TREE}"]


PARTS = {"methods": methods, "torch": torch, "served": served}

if __name__ == "__main__":
    main()
