"""What the dtype of stored hidden states costs in accept length.   python -m benchmarks.storage_cost PROJECT [--seeds 1 2 3]

In a copy of PROJECT, a checkout in which `make run` has run: training rows are extracted as float32, bfloat16 and fp8, a
draft is trained on each by the checkpoints of params.yaml, and replayed on the same float32 eval rows. So drafts differ by
what they learned from, and are asked the same. Each seed of training is a draft; their spread is what chance does.
Prints a table: tau of each tree, the last checkpoint.
"""

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

DTYPES, TREES = ("float32", "bfloat16", "fp8"), ((8, 1, 9), (8, 2, 16), (10, 3, 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("project", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp()) / "project"
    shutil.copytree(args.project, work, ignore=shutil.ignore_patterns(".dvc", ".git", ".venv", ".scratch"))
    yaml = YAML()
    settings = yaml.load((work / "params.yaml").read_text())
    chain, found = list(settings["train_draft"]["checkpoints"]), {}
    for dtype in DTYPES:
        settings["extract_hiddens"]["dtype"] = dtype
        write(work, yaml, settings)
        run(work, "extract_hiddens")
        if dtype == DTYPES[0]:
            shutil.copytree(work / "data/hiddens/eval", work / "exact")
        shutil.rmtree(work / "data/hiddens/eval")
        shutil.copytree(work / "exact", work / "data/hiddens/eval")
        for seed in args.seeds:
            settings["train_draft"]["seed"] = seed
            write(work, yaml, settings)
            for name in chain:
                run(work, "train_draft", name)
            run(work, "replay_trees", chain[-1])
            with (work / f"results/replay/{chain[-1]}.csv").open() as file:
                rows = {
                    (int(r["num_steps"]), int(r["topk"]), int(r["num_draft_tokens"])): float(r["tau"])
                    for r in csv.DictReader(file)
                    if float(r["temperature"]) == 0
                }
            found[dtype, seed] = [rows[tree] for tree in TREES]
            print(dtype, seed, [round(tau, 3) for tau in found[dtype, seed]], flush=True)
    print(f"\n{chain[-1]}, {len(args.seeds)} seeds: mean tau, least and most")
    print(f"{'stored as':10}" + "".join(f"{'t{}_{}_{}'.format(*tree):>24}" for tree in TREES))
    for dtype in DTYPES:
        columns = zip(*(found[dtype, seed] for seed in args.seeds), strict=True)
        told = (f"{statistics.mean(taus):.3f} ({min(taus):.3f}-{max(taus):.3f})" for taus in columns)
        print(f"{dtype:10}" + "".join(f"{x:>24}" for x in told))


def write(work: Path, yaml: YAML, settings: dict) -> None:
    with (work / "params.yaml").open("w") as file:
        yaml.dump(settings, file)


def run(work: Path, stage: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"stages.{stage}", *arguments], cwd=work, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
