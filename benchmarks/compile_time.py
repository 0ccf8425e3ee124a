"""How long training waits for the compiler: from the start of a process to its first and second step, cold and warm.

    python3 -m benchmarks.compile_time [--flex-dynamic] [--threads 16] [--runs cold warm]

An 8B-shaped draft (benchmarks/training.py) takes three steps on packs of random data: two full packs and one of a single row, as
an epoch ends. Each run is a process of its own: `cold` with empty caches of the compiler, `warm` with those that cold left.
Prints, as JSON a run, seconds from the start of the process until imports, data and each step are done, and each graph's
name, whether it is a recompilation (number/1, /2 ...), and seconds.

`--flex-dynamic` compiles FlexAttention for any size instead of once for each size; `--threads` are the compiler's processes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import psutil

ROWS, LENGTH = 17, 2048  # 8 + 8 + 1 rows a pack of 16,384
LAYERS = (2, 18, 33)  # features of the target's 36


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs="+", default=["cold", "warm"], choices=("cold", "warm"))
    parser.add_argument("--flex-dynamic", action="store_true")
    parser.add_argument("--threads", type=int, help="default: the compiler's own choice, up to the cores")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_run_child(args)), flush=True)
        return
    work = Path(tempfile.mkdtemp(prefix="compile-time-"))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton")}
    if args.threads:
        caches["TORCHINDUCTOR_COMPILE_THREADS"] = str(args.threads)
    for run in args.runs:
        if run == "cold":
            for folder in ("inductor", "triton"):
                shutil.rmtree(work / folder, ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.compile_time", *sys.argv[1:], "--child", str(work / "data")]
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{run}: status {done.returncode}\n{done.stderr[-4000:]}")
        print(json.dumps({"run": run} | json.loads(done.stdout.splitlines()[-1])), flush=True)
    shutil.rmtree(work, ignore_errors=True)


def _run_child(args: argparse.Namespace) -> dict:
    """Take the steps -> seconds since the start of this process, and the graphs."""
    begun, seconds = psutil.Process().create_time(), {}

    def note(name: str) -> None:
        seconds[name] = round(time.time() - begun, 2)

    import torch

    from benchmarks import training
    from stages.hidden_states import writer
    from stages.hidden_states.reader import HiddenStatesReader
    from stages.runtime.distributed import RankContext
    from stages.training import attention_mask
    from stages.training.learning_rate import plan_schedule
    from stages.training.packs import PackLoader, plan_epoch

    note("imports")
    if args.flex_dynamic:
        attention_mask._compile_static = cache(partial(torch.compile, dynamic=True))
    if not args.child.exists():
        given = argparse.Namespace(
            tokens=ROWS * LENGTH, online=False, hidden=args.hidden, vocab=args.vocab, layer_ids=LAYERS
        )
        args.child.mkdir()
        writer.write_rows(args.child, training.rows(given, "dense"), torch.bfloat16, 1 << 30)
        note("data written")
    chosen = {
        "method": "eagle3", "layer_ids": LAYERS, "batch_tokens": 8 * LENGTH, "packs_per_step": 1, "parallel": "ddp",
    }  # fmt: skip
    run = training.start(argparse.Namespace(**vars(args), **chosen), RankContext(0, 1, args.device))
    reader = HiddenStatesReader(args.child)
    run.schedule = plan_schedule(reader.lengths, run.settings)
    loader = PackLoader(reader, run.objective, run.ranks, run.dtype)
    plan = sorted(plan_epoch(reader.lengths, run.settings, 0), key=lambda step: -len(step[0]))
    note("ready")
    for number, step in enumerate(loader.load_steps([(0, plan)])):
        loss = run.train_step(step.packs)[0, 0].item()  # waits for the device
        note(f"step {number}, {sum(len(pack.ids) for pack in step.packs)} tokens")
    return {
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "flex_dynamic": args.flex_dynamic,
        "seconds": seconds,
        "loss": round(loss, 4),
        **_describe_graphs(),
    }


def _describe_graphs() -> dict:
    """Return what this process has compiled: how many graphs, how many of them again, and each with its seconds."""
    metrics = sys.modules.get("torch._dynamo.utils")
    graphs = metrics.get_compilation_metrics() if metrics else []
    return {
        "graphs": len(graphs),
        "recompiled": sum(not str(g.compile_id).split("_")[0].endswith("/0") for g in graphs),
        "compile_s": metrics.calculate_time_spent().get("total_wall_time") if metrics else 0.0,
        "each": [[g.co_name, g.compile_id, round((g.duration_us or 0) / 1e6, 2), bool(g.is_forward)] for g in graphs],
    }


if __name__ == "__main__":
    main()
