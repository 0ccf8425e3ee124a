"""Tau of the default trees by seed of the draft: how far a README's tau may be from one's own.

    python -m benchmarks.seed_spread /tmp/seeds --seeds 5 6 7 [--jobs 3]

Makes hidden states once in a copy of this project, then for each seed a copy in which the draft is initialised and trained with
it, and replays every tree. What lies in FOLDER/base already, as answers from another machine, is taken as it is. Appends a row
for each seed, checkpoint and tree to SPREAD.csv in the folder, with the kind of CPU, so that runs on several machines can be
put together. Needs torch, but neither DVC nor Prefect. Of two machines: docs/results/2026-11-22-seed-spread.csv.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from ruamel.yaml import YAML

from stages.params.tree_shape import TreeShape
from stages.results import replay_records, torch_records

UPSTREAM = {  # stage: what it makes
    "fix_data": "data/fixed",
    "prepare_target": "artifacts/target",
    "sample_target": "data/sampled",
    "extract_hiddens": "data/hiddens",
}
COLUMNS = ["cpu", "torch", "seed", "checkpoint", "tree", "tau", "tau_low", "tau_high"]
COPIED = ("params.yaml", "data/raw", "data/targets", "data/nothing", "draft_configs", "templates", "stages")


def main() -> None:
    takes = argparse.ArgumentParser()
    takes.add_argument("folder", type=Path)
    takes.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    takes.add_argument("--jobs", type=int, default=1, help="seeds at a time, each on one thread")
    options = takes.parse_args()
    base = options.folder / "base"
    copy_project(Path(), base)
    for stage, made in UPSTREAM.items():
        if not (base / made).exists():  # else brought from another machine
            run(base, stage)
    with ThreadPoolExecutor(options.jobs) as threads:
        rows = [row for found in threads.map(lambda seed: train_and_replay(base, seed), options.seeds) for row in found]
    with (options.folder / "SPREAD.csv").open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    print_spread(rows)


def copy_project(source: Path, folder: Path) -> None:
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(source / name, folder / name)


def run(folder: Path, *words: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, ["", os.environ.get("PYTHONPATH")]))}
    log = folder / "log.txt"
    with log.open("a") as file:
        command = [sys.executable, "-m", f"stages.{words[0]}", *words[1:]]
        if subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=file).returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n" + "\n".join(log.read_text().splitlines()[-20:]))


def train_and_replay(base: Path, seed: int) -> list[list[object]]:
    folder = base.parent / f"seed{seed}"
    copy_project(base, folder)
    for name in ("artifacts", "data/fixed", "data/hiddens", "data/sampled"):
        shutil.copytree(base / name, folder / name)
    yaml = YAML()
    params = yaml.load((folder / "params.yaml").read_text())
    params["init_draft"]["seed"] = params["train_draft"]["seed"] = seed
    yaml.dump(params, folder / "params.yaml")
    run(folder, "init_draft")
    run(folder, "check_overfit")
    for name in params["train_draft"]["checkpoints"]:
        run(folder, "train_draft", name)
    rows: list[list[object]] = []
    cpu = torch_records.describe_hardware("cpu", 1)["cpu"]
    shapes = {TreeShape.parse(name): name for name in params["benchmark"]["trees"]}
    for checkpoint in params["replay_trees"]["checkpoints"]:
        run(folder, "replay_trees", checkpoint)
        file = folder / replay_records.locate_replay(checkpoint)
        found = replay_records.ReplayedTree.read_csv(file, "replay_trees")
        for tree in replay_records.select_temperature(found, 0):
            if tree.shape in shapes:
                taus = [round(value or 0, 4) for value in (tree.tau, tree.tau_low, tree.tau_high)]
                rows.append([cpu, torch.__version__, seed, checkpoint, shapes[tree.shape], *taus])
    return rows


def print_spread(rows: list[list[object]]) -> None:
    """Print tau by seed, and half the range over seeds."""
    found = defaultdict[tuple[object, object], list[float]](list)
    for _, _, _, checkpoint, tree, tau, *_ in rows:
        found[checkpoint, tree].append(float(str(tau)))
    for (checkpoint, tree), taus in found.items():
        half = (max(taus) - min(taus)) / 2
        print(f"{checkpoint} {tree:10} {' '.join(f'{tau:.2f}' for tau in taus)}  ±{half:.2f}")


if __name__ == "__main__":
    main()
