"""Seconds of training against what the drafts accept, of several ways to train on the same rows.

    python -m benchmarks.time_to_quality PROJECT OUT --variant short '{epochs: 2, ttt_steps: 3}' --variant default '{epochs: 5}'
        --published rival ../rival/checkpoint 127

PROJECT is a folder whose graph has run up to `init_draft`. Each variant is a segment from e000: `epochs`, other keys of a segment
(`method: dflash` with its sizes), and keys of train_draft. The stage trains it in a process of its own, in a copy of PROJECT by
hard links; then it is replayed on the eval answers. `--published` is another trainer's checkpoint on the same rows, in a form
that import_draft reads, with the seconds that it took. `--cold` gives each training empty caches of compiled code.

Writes OUT/time_to_quality.csv, after each variant, and .svg. A second call goes on with the variants that are not there.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import polars as pl
import textalloc
from matplotlib.figure import Figure
from ruamel.yaml import YAML

TREES = ("t3_1_4", "t7_1_8", "t5_4_16")
GRID = {"num_steps": [3, 5, 7], "topk": [1, 4], "num_draft_tokens": [16], "trace_trees": ["t3_1_4"]}
SEGMENT_KEYS = ("epochs", "method", "layers", "block_size", "anchors", "markov_rank", "feature_layers", "heads")


@dataclass(frozen=True)
class TrainedDraft:
    """A row of the table: a draft, what it took, and its tau on the eval answers at temperature 0, of each tree."""

    name: str
    trained_by: str  # the keys of a variant, or the folder of a published draft
    seconds: float  # of all epochs, compiling included; of a published draft as given
    stage_seconds: float | None  # of the whole process: imports, loading, saving
    epochs: int | None
    training_accuracy: float | None  # of the first step, in the last epoch
    t3_1_4: float
    t3_1_4_low: float
    t3_1_4_high: float
    t7_1_8: float | None
    t5_4_16: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("project", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variant", nargs=2, action="append", default=[], metavar=("NAME", "KEYS"))
    parser.add_argument("--published", nargs=3, action="append", default=[], metavar=("NAME", "FOLDER", "SECONDS"))
    parser.add_argument("--cold", action="store_true", help="compiled code of no earlier training is used")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table = args.out / "time_to_quality.csv"
    done = {row["name"] for row in csv.DictReader(table.open())} if table.exists() else set()
    work = args.out.absolute() / "project"
    if not work.exists():
        shutil.copytree(
            args.project, work, copy_function=os.link, ignore=shutil.ignore_patterns(".git", ".venv", ".dvc")
        )
    given = YAML(typ="safe").load(args.project / "params.yaml")
    for name, keys in args.variant:
        if name not in done:
            _append(table, _train(work, given, name, YAML(typ="safe").load(keys), args.cold))
    for name, folder, seconds in args.published:
        if name not in done:
            _append(table, _import(work, given, name, Path(folder).absolute(), float(seconds)))
    draw(pl.read_csv(table), args.out / "time_to_quality.svg")


def _train(work: Path, given: dict[str, Any], name: str, keys: dict[str, Any], cold: bool) -> TrainedDraft:
    segment = {"from": "e000"} | {key: value for key, value in keys.items() if key in SEGMENT_KEYS}
    settings = given["train_draft"] | {key: value for key, value in keys.items() if key not in SEGMENT_KEYS}
    _write_params(work, given | {"train_draft": settings | {"checkpoints": {name: segment}}}, name)
    caches = {}
    if cold:
        folders = {
            "TORCHINDUCTOR_CACHE_DIR": work / ".cold" / name / "inductor",
            "TRITON_CACHE_DIR": work / ".cold" / name,
        }
        caches = {variable: str(folder) for variable, folder in folders.items()}
    started = time.perf_counter()
    _run_stage(work, "train_draft", name, caches)
    stage_seconds = time.perf_counter() - started
    epochs = json.loads((work / f"results/train/{name}.json").read_text())["epochs"]
    return _replay(work, name, json.dumps(keys), sum(epoch["seconds"] for epoch in epochs), stage_seconds, epochs)


def _import(work: Path, given: dict[str, Any], name: str, folder: Path, seconds: float) -> TrainedDraft:
    settings = given["train_draft"] | {"checkpoints": {}}
    _write_params(
        work, given | {"train_draft": settings, "import_draft": {"checkpoints": {name: {"model": str(folder)}}}}, name
    )
    _run_stage(work, "import_draft", name)
    return _replay(work, name, str(folder), seconds, None, [])


def _write_params(work: Path, params: dict[str, Any], name: str) -> None:
    """Write params.yaml with `name` as the one checkpoint that is replayed, and no cells, and what stages read of it."""
    path = work / "params.yaml"
    path.unlink()  # it is a link to that of the project
    workload = {"eval": {"prompts": "eval", "num_prompts": 1, "max_new_tokens": 1}}
    changed = {
        "replay_trees": params.get("replay_trees", {}) | GRID | {"checkpoints": [name]},
        "time_cycles": {"engines": [], "checkpoints": [], "workload": "eval"},
        "benchmark": {"workloads": workload, "torch_workloads": ["eval"], "checkpoints": [name], "trees": ["t3_1_4"]},
    }
    served = {key: value for key, value in params.items() if key.startswith("benchmark_")}
    for key, value in served.items():  # no cells, of no other checkpoint
        changed[key] = value | {"workloads": [], "checkpoints": [name]}
    YAML(typ="safe").dump(params | changed, path)
    subprocess.run([sys.executable, "-m", "stages.inputs"], cwd=work, check=True)


def _run_stage(work: Path, stage: str, name: str, environment: dict[str, str] | None = None) -> None:
    variables = os.environ | {"DVC_STAGE": f"{stage}@{name}"} | (environment or {})
    subprocess.run([sys.executable, "-m", f"stages.{stage}", f"{stage}@{name}"], cwd=work, env=variables, check=True)


def _replay(
    work: Path, name: str, trained_by: str, seconds: float, stage_seconds: float | None, epochs: list[dict[str, Any]]
) -> TrainedDraft:
    _run_stage(work, "replay_trees", name)
    rows = pl.read_csv(work / f"results/replay/{name}.csv").filter(pl.col("temperature").fill_null(0) == 0)
    taus = {f"t{r['num_steps']}_{r['topk']}_{r['num_draft_tokens']}": r for r in rows.iter_rows(named=True)}
    chain, others = taus[TREES[0]], [taus.get(tree, {}).get("tau") for tree in TREES[1:]]
    return TrainedDraft(
        name, trained_by, round(seconds, 1), stage_seconds and round(stage_seconds, 1), len(epochs) or None,
        epochs[-1]["step_accuracy"][0] if epochs else None, chain["tau"], chain["tau_low"], chain["tau_high"], *others,
    )  # fmt: skip


def _append(table: Path, draft: TrainedDraft) -> None:
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(TrainedDraft)])
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(draft))
    print(f"{draft.name}: {draft.seconds} s, t3_1_4 {draft.t3_1_4:.3f}", flush=True)


def draw(table: pl.DataFrame, path: Path) -> None:
    """Draw tau by seconds of training, a curve for each tree, with the drafts' names; other trainers' drafts are hollow."""
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    own, published = (
        table.filter(pl.col("epochs").is_not_null()).sort("seconds"),
        table.filter(pl.col("epochs").is_null()),
    )
    for tree, marker in zip(TREES, "o^s", strict=True):
        (line,) = axes.plot(own["seconds"], own[tree], marker=marker, label=tree)
        axes.plot(published["seconds"], published[tree], marker, color=line.get_color(), fillstyle="none")
    seconds, taus = table["seconds"].to_list(), table[TREES[0]].to_list()
    axes.margins(x=0.1, y=0.1)
    axes.set(xlabel="seconds of training, compiling included", ylabel="tau of new answers, temperature 0")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    textalloc.allocate(axes, seconds, taus, table["name"].to_list(), x_scatter=seconds, y_scatter=taus, textsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()
