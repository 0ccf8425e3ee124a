"""The graph at a real size, stage by stage through `dvc repro`: seconds, GiB, joules and overhead.

    python3 -m benchmarks.big_graph FOLDER [--shape 8b] [--rows 2000] [--parts fix_data prepare_target ...]
    python3 -m benchmarks.big_graph FOLDER --long-row 131072 [--target OTHER/big-target] [--window 4096]
    python3 -m benchmarks.big_graph FOLDER --costs   # what cycles cost on SGLang, and live cells to predict
    python3 -m benchmarks.big_graph FOLDER --small              # here, on a CPU, with the tests' double as the engine

FOLDER becomes a project of its own, with a target of random weights (benchmarks/random_target.py) and conversations.
Stages that are up to date are passed over, so one machine may make them in several calls; the table is of all of them.
Stages are forked from a process that has imported torch, as those of `aerie run` are, where a call makes four or more.
Engines and DVC on machines without a package registry: benchmarks/gpu_graph.py.

The waits, in seconds: `dvc` before (from the command to the stage's `main`: imports, the graph, the hashes of dependencies) and
after it (hashing and linking of outputs). `GiB` is the most memory in use on the first visible GPU, by anybody.

`--costs`: instead of one served pair the grid of time_cycles at 1, 8, 32 and 128 at once, and live cells of other trees, each
in turns with its own baseline, whose speedups the report compares with the predictions. The target is the
embedded one, widened to the shape (benchmarks/widened_target.py), on the embedded data: answers of a random one all have one
length, and each draft is accepted. At 1B shape steps are mostly the engine's Python, whose speed is the machine's of the moment.
`--gpus 0 1 2 3` measures the grid and three live cells at the same time, each on a GPU of its own, where `--num-prompts` may be
larger than the plan's.

Disk at 8B shape, 2,000 rows of 760 tokens on average, fp8: target 16 GB, hidden states 25, drafts with optimizer states 13.

`--long-row N`: one training row and one eval row of N tokens among short ones. Sizes at 8B shape, bfloat16, N = 131,072:

    stored    32 kB a token (three feature layers and the last): 4.3 GB a row; two staging buffers on the GPU and in memory
    extract   weights 16.4 GB, buffers 8.6, MLP of one block 9.7, streams and norms 6: about 41 GB; no mask, since the flash
              kernel takes borders
    train     weights, moments, tables, logits of a chunk 15 GB; pack 4.3 to 8.6; states and their gradients, joined and by step,
              30; keys and values of 7 steps 4; one step computed again 30 at most: about 85 GB with every position supervised.
              Without computing again (training/ttt.py) 1.25 MiB a token: 180 GB. FlexAttention's blocks: 4 tables of 1,024²
    replay    features, fused, keys and values 8 GB, tables 0.4; places are expanded as many at once as 2^27 logits allow, 6 of
              them at topks 1 and 4; cycles traced likewise
"""

import argparse
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from benchmarks import engine_kit, random_target, widened_target
from benchmarks.gpu_graph import copy_project, run, serve_cells, serve_on_gpus
from pipeline import processes
from stages.params.schema import load_params
from stages.runtime import atomic
from stages.telemetry.gpu_energy import list_visible_cards, pynvml
from stages.telemetry.stage_log import LOG_FILE

CHECKPOINT, TREE, TARGET, RAW = "e001", "t5_4_16", "big-target", "data/raw/big"
PARTS = (
    "fix_data", "prepare_target", "sample_target", "extract_hiddens", "init_draft@e000", "check_overfit@e000",
    f"train_draft@{CHECKPOINT}", f"replay_trees@{CHECKPOINT}", "prepare_prompts@eval", "benchmark_served_baseline@sglang-eval",
    f"benchmark_served@sglang-eval-{CHECKPOINT}-{TREE}",
)  # fmt: skip
AT_ONCE = [1, 8, 32, 128]
LIVE = "sweep"  # the workload of --costs
LIVE_TREES = "t3_1_4 t5_4_16 t8_2_16"
COST_PARTS = (*PARTS[: PARTS.index("prepare_prompts@eval")], f"prepare_prompts@{LIVE}")
COST_CELLS = (  # the grid first
    f"time_cycles@sglang-{CHECKPOINT}",
    *(f"benchmark_served@sglang-{LIVE}-{CHECKPOINT}-{tree}" for tree in LIVE_TREES.split()),
)
MEASURED = "big_graph.json"  # in FOLDER: a StageCost of each stage that ran
COST_CONTEXT = 2048  # tokens of a prompt and its answer, at most, of --costs: the positions of its target
COST_ANSWER = 200  # tokens at most, of which the embedded target's answers have half
LONG_ANSWER = 256  # tokens of the long eval row's answer


@dataclass(frozen=True)
class CostPlan:
    """The measurements of --costs at one shape, whose servers take turns: as many are up as the GPU holds."""

    trees: str  # of the grids
    mem_fraction: float
    max_total_tokens: int
    num_prompts: list[int]  # at each of AT_ONCE, or at its first
    epochs: int


SIX_TREES = "t1_1_2 t10_1_11 t2_4_8 t6_2_12 t4_4_24 t10_4_32"
COST_PLANS = {
    "8b": CostPlan("t1_1_2 t10_1_11 t2_4_8 t8_4_24", 0.19, 36_000, [8, 80, 192, 512], epochs=8),
    "1b": CostPlan(SIX_TREES, 0.12, 50_000, [40, 96, 512, 960], epochs=16),
    "small": CostPlan(SIX_TREES, 0.12, 50_000, [3, 8], epochs=5),
}


@dataclass(frozen=True)
class StageCost:
    """Times, waits and energy of one stage."""

    stage: str
    seconds: float  # of the whole command
    process_s: float  # of the stage's `main`
    cpu_s: float  # CPU time of the stage's process, and of those that it started and that ended
    peak_gib: float | None
    joules: float | None
    dvc_before_s: float
    dvc_after_s: float


class GpuMemoryPeak:
    """The most memory in use on the first visible GPU inside a `with` block, looked at ten times a second."""

    def __init__(self) -> None:
        self.gib: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "GpuMemoryPeak":
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        card = list_visible_cards()[0]
        while not self._ended.wait(0.1):
            self.gib = max(self.gib or 0.0, pynvml.nvmlDeviceGetMemoryInfo(card).used / 2**30)


def main() -> None:
    o = parse_words()
    folder = o.folder.absolute()
    if not folder.exists():
        make_project(folder, o)
    edit_params(folder, o)
    with processes.preload_stages():  # as `aerie run` does
        is_made = all(measure_stage(folder, stage) for stage in o.parts)
    if is_made and (o.grids or o.cells):
        serve(folder, o)
    print_table(folder)


def serve(folder: Path, o: argparse.Namespace) -> None:
    """Make the grids and live cells of --costs: with --gpus all at once, else the grids alone first, as they fill a GPU."""
    if o.gpus:
        serve_on_gpus(folder, [*o.grids, *o.cells], o.gpus)
        return
    for cells in (o.grids, o.cells):
        if cells:
            serve_cells(folder, cells, o.at_once)


def parse_words() -> argparse.Namespace:
    takes = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    takes.add_argument("folder", type=Path)
    takes.add_argument("--shape", default="8b", choices=random_target.SHAPES)
    takes.add_argument("--target", type=Path, help="a target that was made before, whose files are linked")
    takes.add_argument("--rows", type=int, help="of training; default: 2,000, with --costs 600")
    takes.add_argument("--eval-rows", type=int, default=16)
    takes.add_argument("--mean-answer", type=int, default=600, help="tokens; 0: every answer has --longest")
    takes.add_argument("--longest", type=int, default=8192, help="tokens of an answer")
    takes.add_argument("--dtype", default="fp8", help="of stored hidden states")
    takes.add_argument("--batch-tokens", type=int, default=16384, help="of extraction and training")
    takes.add_argument("--memory-gib", type=float, default=20, help="of replay_trees")
    takes.add_argument("--overfit-steps", type=int, default=20)
    takes.add_argument("--long-row", type=int, help="tokens of one training and one eval row")
    takes.add_argument("--window", type=int, help="init_draft.sliding_window")
    takes.add_argument("--costs", action="store_true", help="grids of time_cycles and live cells")
    takes.add_argument("--repeats", type=int, default=3, help="of the loads of --costs")
    takes.add_argument("--epochs", type=int, help="of --costs; default: the plan's")
    takes.add_argument(
        "--num-prompts", type=int, nargs="+", help=f"of --costs, at {AT_ONCE} at once; default: the plan's"
    )
    takes.add_argument("--prefill-graphs", action="store_true", help="prompts of SGLang in CUDA graphs")
    takes.add_argument("--tensor-parallel", type=int, help="GPUs of each server")
    takes.add_argument("--at-once", type=int, default=2, help="cells of --costs, of which one is measured at a time")
    takes.add_argument("--gpus", nargs="+", help="of the grid and the live cells of --costs, which have one each")
    takes.add_argument("--parts", nargs="+", help="stages, or the beginnings of their names; default: all")
    takes.add_argument("--small", action="store_true", help="on a CPU, a tiny target, few rows, the tests' double")
    o = takes.parse_args()
    taken = tuple(o.parts or [""])
    o.parts = [stage for stage in (COST_PARTS if o.costs else PARTS) if stage.startswith(taken)]
    chosen = [stage for stage in COST_CELLS if o.costs and stage.startswith(taken)]
    o.grids = [stage for stage in chosen if stage.startswith("time_cycles")]
    o.cells = [stage for stage in chosen if stage not in o.grids]
    if o.costs:
        o.longest, o.batch_tokens, o.dtype = COST_ANSWER, 4096, "bfloat16"
    o.rows = o.rows or (600 if o.costs else 2000)
    if o.small:
        o.shape, o.rows, o.eval_rows, o.mean_answer, o.longest, o.batch_tokens = "tiny", 24, 4, 40, 100, 512
        o.memory_gib, o.overfit_steps = 0.25, 5
    if o.small and o.costs:
        o.shape, o.rows = "small", 60
    if o.costs:
        if o.shape not in COST_PLANS:
            takes.error(f"--costs with --shape {o.shape}, expected one of {', '.join(COST_PLANS)}")
        o.num_prompts = o.num_prompts or COST_PLANS[o.shape].num_prompts
        o.eval_rows = 20 if o.small else max(o.num_prompts)
    return o


# The project


def make_project(folder: Path, o: argparse.Namespace) -> None:
    """Copy the project, and make its target and its conversations."""
    begun = time.perf_counter()
    copy_project(folder, Path())
    engine_kit.write_launcher(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if o.small else torch.bfloat16
    if o.target:
        shutil.copytree(o.target, folder / TARGET, copy_function=os.link)
    elif o.costs:
        widened_target.write_target(folder / TARGET, o.shape, device, dtype)
    else:
        random_target.write_target(folder / TARGET, o.shape, o.mean_answer, device, dtype)
    torch.cuda.empty_cache()
    if not o.costs:
        random_target.write_conversations(folder / RAW / "train.jsonl", list_train_lengths(o), seed=1)
        random_target.write_conversations(folder / RAW / "eval.jsonl", list_eval_lengths(o), seed=2)
    size = sum(file.stat().st_size for file in (folder / TARGET).iterdir()) / 1e9
    print(f"{folder}: target of {size:.1f} GB and conversations in {time.perf_counter() - begun:.0f} s", flush=True)


def list_train_lengths(o: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield the characters of each training question and answer; the target gives its own answers, but for a long row."""
    rng = random.Random(3)
    for _ in range(16 if o.long_row else o.rows):
        yield draw_question(rng, o), 200 if o.long_row else 20
    if o.long_row:
        yield 200, o.long_row  # with its question longer than --long-row, where extract_hiddens cuts it


def list_eval_lengths(o: argparse.Namespace) -> Iterator[tuple[int, int]]:
    rng = random.Random(4)
    for _ in range(4 if o.long_row else o.eval_rows):
        yield draw_question(rng, o), 20
    if o.long_row:
        yield o.long_row - 2 * LONG_ANSWER, 20


def draw_question(rng: random.Random, o: argparse.Namespace) -> int:
    """Return a question's characters: lognormal, 140 on average, a few of thousands."""
    return max(30, min(120 if o.small else 7000, round(rng.lognormvariate(4.1, 1.3))))


def edit_params(folder: Path, o: argparse.Namespace) -> None:
    """Write the keys of params.yaml that differ from the default ones."""
    yaml = YAML(typ="safe")
    p = load_params(Path("params.yaml")).model_dump(by_alias=True)
    dtype = "float32" if o.small else "bfloat16"
    kit = list_launch_args(o)
    p["target"] |= {
        "model": TARGET, "dtype": dtype, "device": "cpu" if o.small else "cuda",
        "num_threads": 2 if o.small else 8,
    }  # fmt: skip
    if not o.costs:
        p["fix_data"] |= {
            "raw": RAW, "eval_file": "eval.jsonl", "answers": "text", "tables": None, "max_chars": 4 * (o.long_row or 8000),
        }  # fmt: skip
    p["sample_target"] |= {
        "backend": "keep" if o.long_row else "transformers" if o.small else "server", "train_rows": None, "eval_rows": None,
        "temperature": 0.0 if o.long_row else 1.0, "max_new_tokens": LONG_ANSWER if o.long_row else o.longest,
        "batch_size": 1 if o.long_row else 64,
    }  # fmt: skip
    sampling = {"launch": "sglang", "launch_args": [*kit, "--max-running-requests", "256"], "concurrency": 256}
    p["sample_target"]["server"] |= {} if o.small or o.long_row else sampling  # a few long answers need no server
    p["extract_hiddens"] |= {
        "dtype": o.dtype, "max_length": o.long_row or o.longest + 600, "longer_rows": "truncate",
        "batch_tokens": o.batch_tokens,
    }  # fmt: skip
    p["init_draft"] |= {"draft_vocab_size": 320 if o.small else 32000, "sliding_window": o.window}
    # Nothing is demanded of a draft of a random target after so few steps.
    p["check_overfit"] |= {"steps": o.overfit_steps, "learning_rate": 3e-4, "min_tau": 1.0}
    p["train_draft"] |= {
        "checkpoints": {CHECKPOINT: {"from": "e000", "epochs": 5 if o.small else 1}}, "dtype": dtype,
        "learning_rate": 3e-3 if o.small else 5e-4 if o.costs else 1e-4, "warmup_steps": 5, "batch_tokens": o.batch_tokens,
    }  # fmt: skip
    p["replay_trees"] |= {
        "checkpoints": [CHECKPOINT], "num_steps": [1, 5], "topk": [1, 4], "num_draft_tokens": [4, 16],
        "trace_trees": [TREE], "memory_gib": o.memory_gib,
    }  # fmt: skip
    few = {"num_prompts": 3 if o.small else 16, "max_new_tokens": 20 if o.small else 256, "repeats": 1, "warmup": 1}
    p["benchmark"] |= {
        "workloads": {"eval": p["benchmark"]["workloads"]["eval"] | few | {"ignore_eos": True}}, "torch_workloads": [],
        "checkpoints": [CHECKPOINT], "trees": [TREE],
    }  # fmt: skip
    p["benchmark_served"] |= {"workloads": ["eval"], "checkpoints": [CHECKPOINT], "trees": [TREE]}
    p["benchmark_served"]["servers"]["sglang"] |= {
        "mem_fraction": 0.5, "max_total_tokens": 50_000, "command": engine_kit.DOUBLE if o.small else [],
        "launch_args": kit,
    }  # fmt: skip
    if o.costs:
        edit_cost_params(p, o)
    with atomic.write_file(folder / "params.yaml") as path:  # another plan may be running in the same folder
        yaml.dump(p, path)


def edit_cost_params(p: dict[str, Any], o: argparse.Namespace) -> None:
    """Replace the served pair by the grids of time_cycles and their live cells."""
    plan = COST_PLANS[o.shape]
    at_once = AT_ONCE[: len(o.num_prompts)]
    # Greedy answers are replayed at one temperature; few and short ones need no server.
    p["fix_data"]["eval_share"] = 0.4
    p["sample_target"] |= {
        "backend": "transformers", "temperature": 0.0, "batch_size": 256, "train_rows": o.rows, "eval_rows": o.eval_rows,
    }  # fmt: skip
    p["replay_trees"] |= {"num_steps": [3, 5, 8], "topk": [1, 2, 4], "num_draft_tokens": [4, 16], "trace_trees": []}
    p["train_draft"]["checkpoints"][CHECKPOINT]["epochs"] = o.epochs or plan.epochs
    eval_load = p["benchmark"]["workloads"]["eval"]
    length = {"max_new_tokens": o.longest, "ignore_eos": False}
    size = {"num_prompts": o.num_prompts, "concurrency": at_once, "warmup": at_once[-1]}
    p["benchmark"]["workloads"] = {LIVE: {**eval_load, **length, **size, "repeats": o.repeats}}
    p["time_cycles"] |= {
        "engines": ["sglang"], "checkpoints": [CHECKPOINT], "workload": LIVE, "trees": plan.trees.split(),
    }  # fmt: skip
    p["benchmark_served"] |= {"workloads": [LIVE], "trees": LIVE_TREES.split(), "interleave": True}
    # SGLang's Triton attention keeps indices for every position of the context: 60 GB in a grid's seven servers at 163,840.
    kit = [] if o.small else [*list_launch_args(o), "--context-length", str(COST_CONTEXT)]
    p["benchmark_served"]["servers"]["sglang"] |= {
        "mem_fraction": plan.mem_fraction, "max_total_tokens": plan.max_total_tokens, "launch_args": kit,
    }  # fmt: skip


def list_launch_args(o: argparse.Namespace) -> list[str]:
    """Return the flags of every server; none for the tests' double."""
    if o.small:
        return []
    parallel = ["--tensor-parallel-size", str(o.tensor_parallel)] if o.tensor_parallel else []
    return [*engine_kit.list_sglang_flags(o.prefill_graphs), *parallel]


# The measurement


def measure_stage(folder: Path, stage: str) -> bool:
    """Make a stage by `dvc repro`, add its cost to those of the folder and print it; return whether it ended well."""
    began = time.time()
    with GpuMemoryPeak() as peak:
        status = run(folder, "pipeline.checked_dvc", "repro", "-s", stage, shown=4)
    ended = time.time()
    logged = find_run(folder, stage, began)
    if logged is not None:
        first, last = logged["began_ns"] / 1e9, logged["ended_ns"] / 1e9
        spans = {"seconds": ended - began, "process_s": last - first, "cpu_s": logged["process_s"]}
        around = {"dvc_before_s": first - began, "dvc_after_s": ended - last}
        rounded = {name: round(value, 1) for name, value in (spans | around).items()}
        gib = None if peak.gib is None else round(peak.gib, 1)
        cost = StageCost(stage, peak_gib=gib, joules=logged["joules"], **rounded)
        costs = {each.stage: each for each in read_costs(folder)} | {stage: cost}
        (folder / MEASURED).write_text(json.dumps([asdict(each) for each in costs.values()], indent=1))
        print(json.dumps(asdict(cost)), flush=True)
    return status == 0


def find_run(folder: Path, stage: str, since: float) -> dict[str, Any] | None:
    """Return the last logged run of the stage that began after `since`; None where it was up to date, or failed."""
    log = folder / LOG_FILE
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return next((x for x in reversed(lines) if x["stage"] == stage and x["began_ns"] / 1e9 > since), None)


def read_costs(folder: Path) -> list[StageCost]:
    path = folder / MEASURED
    return [StageCost(**cost) for cost in json.loads(path.read_text())] if path.exists() else []


def print_table(folder: Path) -> None:
    """Print the costs of all stages made so far."""
    parts = (*COST_PARTS, *PARTS)
    costs = sorted(read_costs(folder), key=lambda cost: parts.index(cost.stage))
    head = "seconds process cpu GiB kJ | dvc before after"
    print(f"\n| stage | {' | '.join(head.replace(' | ', ' ').replace('dvc before', 'dvc_before').split())} |")
    print(f"|{'---|' * 8}")
    for c in costs:
        kilojoules = None if c.joules is None else c.joules / 1000
        numbers = c.seconds, c.process_s, c.cpu_s, c.peak_gib, kilojoules, c.dvc_before_s, c.dvc_after_s
        print(f"| {c.stage} | {' | '.join('–' if x is None else f'{x:.1f}' for x in numbers)} |")
    if costs and (out := os.environ.get("OUT")):
        shutil.copy(folder / MEASURED, Path(out) / f"{folder.name}.json")


if __name__ == "__main__":
    main()
