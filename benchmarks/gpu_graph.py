"""Run recipes through DVC on a GPU machine, from raw data to the report, with served cells of SGLang.

    python3 -m benchmarks.gpu_graph PLAN FOLDER [--from FOLDER] [--parts graph] [--device cpu] [--at-once 6] [--small]

FOLDER becomes a project of its own: a copy of this one's files, or of another FOLDER with all it has made (plans of one recipe,
dtype and number of eval rows share a graph). A plan is a recipe and what differs from it on one GPU. `aerie run` makes the graph,
`dvc repro -s` the served cells, several at once (they are measured one at a time: stages/measuring/measurement_lock.py), and
the report.
With `--parts graph --device cpu` the graph is made on a machine without a GPU; the other parts go on in a copy of its folder.

For machines without a package registry: DVC and what it needs come as wheels in PYTHONPATH, SGLang as a kit (shared/gpu) in
/tmp/kit. `--small` tries a plan on a CPU with the tests' double.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from queue import Queue
from typing import Any

from ruamel.yaml import YAML

from benchmarks import engine_kit, together
from pipeline import processes
from stages.params.schema import load_params
from stages.runtime import atomic

COPIED = (
    ".dvc/config", ".dvc/plots", ".dvcignore", "benchmarks", "constraints.txt", "data/prompt_sets", "data/raw",
    "data/tables", "data/targets", "draft_configs", "dvc.yaml", "params.yaml", "pipeline", "published", "pyproject.toml",
    "recipes", "serving-env", "stages", "templates", "tests",
)  # fmt: skip

# The 25 rows of published/qwen3-vl-weather: 15 at ep=9, 10 at ep=3.
SEED_000_EP9 = (
    "t8_1_9 t5_1_6 t5_2_8 t8_2_8 t8_3_8 t8_2_16 t8_3_16 t5_4_16 t6_3_16 t10_2_16 t10_2_32 t10_3_32 t8_3_32 t6_5_32 t6_10_32"
)  # fmt: skip
SEED_000_EP3 = "t8_3_8 t8_2_16 t4_4_16 t4_2_14 t16_1_17 t12_2_16 t12_3_32 t12_2_32 t8_4_32 t9_4_32"
PARTS = ("graph", "prompts", "cells", "report")
REPRO = ("pipeline.checked_dvc", "--wait-for-lock", "repro", "-s")  # the stage alone, whatever made its inputs
Workloads = dict[str, dict[str, Any]]
DRAWN: dict[str, Any] = {"prompts": "random", "ignore_eos": True, "repeats": 2}
CODE_GEN = {"num_prompts": 128, "input_tokens": 512, "max_new_tokens": 1024, "concurrency": 64, "warmup": 64}
CHAT = {
    "num_prompts": 128,
    "input_tokens": 256,
    "max_new_tokens": 256,
    "concurrency": 32,
    "warmup": 32,
    "request_rate": 8.0,
}
COMPLETION = {"num_prompts": 256, "input_tokens": 1024, "max_new_tokens": 128, "concurrency": 128, "warmup": 128}
SCENARIOS: Workloads = {  # published/qwen3-coder-h100, section 2.2; lengths exact, not drawn
    "code_gen": {**DRAWN, **CODE_GEN},
    "chat": {**DRAWN, **CHAT},
    "completion": {**DRAWN, **COMPLETION},
}
LENGTHS = {**DRAWN, "input_tokens": 128, "max_new_tokens": [10, 20, 128, 1024], "repeats": 3}
SWEEP: Workloads = {  # requests at once, each with as many prompts as a few seconds take
    f"sweep{at_once}": {**LENGTHS, "num_prompts": prompts, "concurrency": at_once, "warmup": at_once}
    for at_once, prompts in {1: 4, 4: 8, 16: 32, 64: 64, 256: 256}.items()
}
EVAL: Workloads = {"eval_all": {"num_prompts": None, "repeats": 3}}  # all prompts that replay counts
ONCE: Workloads = {"eval_once": {"num_prompts": None, "repeats": 1, "concurrency": 8, "warmup": 8}}  # for tau alone
HOT: Workloads = {  # sampled as the replayed answers are; SGLang draws drafts of DSpark, and takes the likeliest of DFlash
    "eval_hot": {"num_prompts": None, "repeats": 4, "concurrency": 32, "warmup": 32, "temperature": 0.7, "top_p": 1.0}
}
IN_TURNS: Workloads = {"in_turns": {"num_prompts": 10, "repeats": 5, "warmup": 1}}
BLOCK = {
    "method": "dflash",
    "from": "e000",
    "epochs": 18,
    "layers": 2,
    "anchors": 64,
    "feature_layers": [1, 2, 4, 5, 6],
}
CHECKPOINTS: dict[str, dict[str, Any]] = {  # of plans whose graph has block drafts, each family at two widths
    "e001": {"from": "e000", "epochs": 1},
    "e003": {"from": "e001", "epochs": 2},
    "e009": {"from": "e003", "epochs": 6},
    "dflash8": BLOCK | {"block_size": 8},
    "dflash16": BLOCK | {"block_size": 16},
    "dspark7": BLOCK | {"method": "dspark", "block_size": 7, "markov_rank": 32},
    "dspark4": BLOCK | {"method": "dspark", "block_size": 4, "markov_rank": 32},
}
WIDTHS = {
    "blocks4": ("dspark4", "t4_1_5"),
    "blocks7": ("dflash8 dspark7", "t7_1_8"),
    "blocks15": ("dflash16", "t15_1_16"),
}


@dataclass(frozen=True)
class Plan:
    """A recipe on a GPU: what differs of params.yaml, and the served cells, one of each workload and tree."""

    recipe: str
    dtype: str
    trees: str
    workloads: Workloads
    checkpoints: str = "e009"
    interleave: bool = False
    eval_rows: int = 60  # of sample_target
    block_drafts: bool = False  # whether the graph trains CHECKPOINTS

    def list_stages(self) -> list[str]:
        """Return the served cells as DVC names them, baselines first."""
        cells = [
            f"benchmark_served@sglang-{name}-{checkpoint}-{tree}"
            for name, checkpoint, tree in product(self.workloads, self.checkpoints.split(), self.trees.split())
        ]
        return [*(f"benchmark_served_baseline@sglang-{name}" for name in self.workloads), *cells]


DENSE = Plan("weather-tiny", "bfloat16", "t5_1_6 t8_2_16 t5_4_16 t10_2_32", EVAL, eval_rows=300, block_drafts=True)
MOE = replace(DENSE, recipe="weather-tiny-moe", trees="t5_1_6 t8_2_16 t5_4_16", eval_rows=100)
VL = Plan("weather-tiny-vl", "bfloat16", SEED_000_EP9, IN_TURNS, interleave=True)
PLANS = {
    "dense": DENSE,
    "dense-scenarios": replace(DENSE, trees="t5_4_16", workloads=SCENARIOS),
    "dense-sweep": replace(DENSE, trees="t5_4_16", workloads=SWEEP),
    "dense-sweep256": replace(DENSE, trees="t5_4_16", workloads={"sweep256": SWEEP["sweep256"]}),
    "moe": MOE,
    "moe-scenarios": replace(MOE, trees="t5_4_16", workloads=SCENARIOS),
    "vl": VL,
    "vl-ep3": replace(VL, trees=SEED_000_EP3, checkpoints="e003"),
}
for width, (checkpoints, chain) in WIDTHS.items():  # engines run the chain of a whole block alone
    blocks = replace(DENSE, trees=chain, checkpoints=checkpoints, workloads=ONCE)
    PLANS |= {
        f"dense-{width}": blocks,
        f"moe-{width}": replace(blocks, recipe=MOE.recipe, eval_rows=MOE.eval_rows),
        f"dense-{width}-hot": replace(blocks, workloads=HOT),
        f"moe-{width}-hot": replace(blocks, recipe=MOE.recipe, eval_rows=MOE.eval_rows, workloads=HOT),
    }


def copy_project(folder: Path, source: Path) -> None:
    """Copy the files of the project, or all of a project that has run, with its cache."""
    if source != Path():
        shutil.copytree(source, folder, symlinks=True)
        return
    for name in filter(lambda name: Path(name).exists(), COPIED):
        to = folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if Path(name).is_dir() else shutil.copy2
        copy(name, to)
    (folder / ".dvc/config.local").write_text("[core]\n    no_scm = true\n")


def edit_params(folder: Path, plan: Plan, served: bool, small: bool, device: str) -> None:
    """Write the plan's keys; without `served` the graph has no served cells yet."""
    yaml = YAML(typ="safe")  # comments are lost; kept, some of them would stand where a new list begins
    p = load_params(folder / "params.yaml").model_dump(by_alias=True)
    first = dict(p["benchmark"]["workloads"]["eval"]) | {"num_prompts": 5, "repeats": 1, "warmup": 4}
    dtype = "float32" if small else plan.dtype
    p["target"] |= {"device": device, "dtype": dtype, "num_threads": 2 if device == "cpu" else 6}
    p["extract_hiddens"]["dtype"] = dtype
    p["fix_data"]["eval_share"] = 0.4
    p["sample_target"]["eval_rows"] = 30 if small else plan.eval_rows
    if plan.block_drafts:
        p["target"]["feature_layers"] = [1, 2, 3, 4, 5, 6]  # EAGLE-3's 2 3 4, and those of block drafts
        p["train_draft"]["checkpoints"] = CHECKPOINTS
        p["replay_trees"]["checkpoints"] = list(CHECKPOINTS)
    deep = "vl" in plan.recipe  # qwen3-vl-weather's trees
    p["replay_trees"] |= {
        "num_steps": [1, 2, 3, 4, 5, 6, 7, 8, 10, *([9, 12, 16] if deep else [])],
        "topk": [1, 2, 4, *([3, 5, 10] if deep else [])],
        "num_draft_tokens": [2, 4, 6, 8, 16, 32, *([9, 14, 17] if deep else [])],
    }
    p["check_overfit"] |= {"steps": 60, "min_tau": 1.5}  # as long as it is, it takes longer than the training
    p["time_cycles"] |= {"num_steps": [1, 5, 10], "topk": [1, 4], "num_draft_tokens": [4, 16, 32], "repeats": 2}
    workloads = {name: {**first, **keys} for name, keys in plan.workloads.items()}
    if small:
        few = {"num_prompts": 3, "repeats": 1, "warmup": 1, "max_new_tokens": 20}
        workloads = {name: {**w, **few, "input_tokens": w["input_tokens"] and 20} for name, w in workloads.items()}
    p["benchmark"] |= {
        "workloads": {"eval": first, **workloads},
        "torch_workloads": ["eval"],
        "checkpoints": ["e009"],
        "trees": ["t8_2_16"],
    }
    p["benchmark_served"] |= {
        "engines": ["sglang"],
        "workloads": list(workloads) if served else [],
        "checkpoints": plan.checkpoints.split(),
        "trees": plan.trees.split(),
        "interleave": plan.interleave,
    }
    # Servers that start at once see each other's memory come and go: the cache has a size, not a share.
    p["benchmark_served"]["servers"]["sglang"] |= {
        "mem_fraction": 0.5,
        "max_total_tokens": 50_000 if plan.workloads in (EVAL, ONCE, IN_TURNS, HOT) else 400_000,
        "command": engine_kit.DOUBLE if small else [],
        "launch_args": [] if small else engine_kit.KIT_FLAGS,
    }
    with atomic.write_file(folder / "params.yaml") as path:  # another plan may be running in the same folder
        yaml.dump(p, path)


def run(folder: Path, *words: str, shown: int = 12, environment: dict[str, str] | None = None) -> int:
    """Run a command in the project, with the variables of `environment` too; print its last lines and seconds."""
    begun = time.perf_counter()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    modules = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{folder}"
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": modules} | (environment or {}),
        capture_output=True,
        text=True,
    )
    text = f"{done.stdout}\n{done.stderr if done.returncode else ''}".strip()
    tail = "\n".join(f"  {line[:180]}" for line in text.splitlines()[-shown:])
    took = time.perf_counter() - begun
    print(f"{folder.name}: {' '.join(words)}: status {done.returncode}, {took:.0f} s\n{tail}", flush=True)
    return done.returncode


def make_prompts(folder: Path, plan: Plan) -> None:
    """Make the prompts of the plan's workloads by `dvc repro`."""
    for name in plan.workloads:
        if run(folder, *REPRO, f"prepare_prompts@{name}", shown=1):
            sys.exit(1)


def serve_cells(folder: Path, stages: list[str], at_once: int) -> None:
    """Make served cells by `dvc repro`, several at once, which are measured in turns."""
    _serve_beside(folder, stages, [{}] * at_once)


def serve_on_gpus(folder: Path, stages: list[str], gpus: list[str]) -> None:
    """Make served cells by `dvc repro`, each on a GPU of its own, measured as if it were alone once all have their servers."""
    tmpdirs = [Path(tempfile.gettempdir()) / f"gpu{gpu}" for gpu in gpus]
    for tmpdir in tmpdirs:
        tmpdir.mkdir(exist_ok=True)  # turns of measuring are kept by locks in TMPDIR
    environments = [
        {"CUDA_VISIBLE_DEVICES": gpu, "TMPDIR": str(tmpdir)} for gpu, tmpdir in zip(gpus, tmpdirs, strict=True)
    ]
    with together.begin_together(tmpdirs[: len(stages)]) as ended:
        _serve_beside(folder, stages, environments, ended.set)


def _serve_beside(
    folder: Path, stages: list[str], environments: list[dict[str, str]], on_end: Callable[[], None] = lambda: None
) -> None:
    """Make served cells by `dvc repro`, as many at once as there are environments, each with the variables of one."""
    free: Queue[dict[str, str]] = Queue()
    for environment in environments:
        free.put(environment)

    def serve(name: str) -> int:
        environment = free.get()
        try:
            return run(folder, *REPRO, name, shown=6, environment=environment)
        finally:
            on_end()
            free.put(environment)

    with processes.preload_stages(), ThreadPoolExecutor(len(environments)) as pool:
        failed = sum(status != 0 for status in pool.map(serve, stages))
    print(f"{folder.name}: {failed} of {len(stages)} served cells failed", flush=True)


def main() -> None:
    takes = argparse.ArgumentParser()
    takes.add_argument("plan", choices=PLANS)
    takes.add_argument("folder", type=Path)
    takes.add_argument("--from", dest="source", type=Path, default=Path())
    takes.add_argument("--at-once", type=int, default=6)
    takes.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    takes.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the graph")
    takes.add_argument("--trees", help="some of the plan's, where others were measured before")
    takes.add_argument("--small", action="store_true")
    o = takes.parse_args()
    folder, plan = o.folder.absolute(), PLANS[o.plan]
    plan = replace(plan, trees=o.trees) if o.trees else plan
    if o.small:
        few = dict([*plan.workloads.items()][:2])
        plan = replace(plan, trees=" ".join(plan.trees.split()[:2]), workloads=few)
    if not folder.exists():
        copy_project(folder, o.source)
        engine_kit.write_launcher(folder)
        if o.source == Path() and run(folder, "pipeline", "use", plan.recipe, shown=1):
            sys.exit(1)
    if "graph" in o.parts:
        edit_params(folder, plan, False, o.small, "cpu" if o.small else o.device)
        if run(folder, "pipeline", "run"):
            sys.exit(1)
    edit_params(folder, plan, True, o.small, "cpu" if o.small else "cuda")
    if "prompts" in o.parts:
        make_prompts(folder, plan)
    if "cells" in o.parts:
        serve_cells(folder, plan.list_stages(), o.at_once)
    if "report" in o.parts:
        run(folder, *REPRO, "report", shown=60)


if __name__ == "__main__":
    main()
