"""Measure tau of SGLang 0.5.17 with a multimodal target, with and without the vision patch, beside the replayed tau.

    python3 -m benchmarks.vision_patch PROJECT FOLDER [--trees ...] [--unpatched ...] [--jobs 6]

PROJECT has a target, the draft, prompts of workload `eval` and a replay of the same conversations; FOLDER becomes copies of it.
The engine is that of serving-env. With `--jobs` several servers share a GPU: taus are what they are, times are not.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path

from ruamel.yaml import YAML

from stages.results import replay_records, served_records

TREES = ["t5_1_6", "t8_2_16", "t10_3_32", "t5_4_16", "t6_10_32"]
CHECKPOINT = "e009"
KV_TOKENS = 50_000  # of each server, of several on a GPU
CODE = ("params.yaml", "dvc.yaml", "stages", "templates", "published")
DATA = ("artifacts", "drafts", "data", "results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--unpatched", nargs="*", default=TREES[:3], help="trees to serve without the patch too")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=6)
    told = parser.parse_args()
    for name, patch, trees in (("patched", True, told.trees), ("unpatched", False, told.unpatched)):
        if not trees:
            continue
        project = copy_project(told.project, told.folder / name)
        set_params(project, patch, told)
        cells = [["eval"], *(["eval", CHECKPOINT, tree] for tree in trees)]
        with ThreadPoolExecutor(told.jobs) as pool:
            list(pool.map(run_cell, [project] * len(cells), cells))
        with chdir(project):
            print_table(name, trees)


def copy_project(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in CODE:
        source = Path(__file__).parent.parent / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder)
    for name in DATA:
        shutil.copytree(source / name, folder / name)
    (folder / "serving-env").symlink_to(Path("serving-env").resolve())
    shutil.copy(source / "params.yaml", folder)
    return folder


def set_params(project: Path, patch: bool, told: argparse.Namespace) -> None:
    yaml, path = YAML(), project / "params.yaml"
    params = yaml.load(path)
    params["target"] |= {"device": "cuda", "dtype": told.dtype}
    params["benchmark"]["workloads"]["eval"] |= {"concurrency": told.concurrency}
    params["benchmark_served"] |= {"workloads": ["eval"], "checkpoints": [CHECKPOINT], "trees": told.trees}
    server = params["benchmark_served"]["server"]
    server |= {"vision_patch": patch, "mem_fraction": 0.1, "max_total_tokens": KV_TOKENS}
    with path.open("w") as file:
        yaml.dump(params, file)


def run_cell(project: Path, words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])}
    line = [sys.executable, "-m", "stages.benchmark_served", *words]
    done = subprocess.run(line, cwd=project, env=environment, capture_output=True, text=True)
    print(*done.stdout.strip().splitlines()[-1:], flush=True)
    if done.returncode:
        print(" ".join(words), "failed:", done.stderr[-3000:], flush=True)


def print_table(name: str, trees: list[str]) -> None:
    (plain,) = served_records.read_served_cell("eval", None, None).points
    answers = {(row.id, row.turn): row.answer for row in plain.requests}
    replayed = replay_records.select_temperature(replay_records.read_replay(CHECKPOINT), 0)
    taus = {tree.shape.name: tree.tau for tree in replayed}
    print(f"{name}: tree, served tau, replayed tau, difference, share of the plain server's answers, notices")
    for tree in trees:
        if not served_records.locate_served_cell("eval", CHECKPOINT, tree).exists():
            continue
        (point,) = served_records.read_served_cell("eval", CHECKPOINT, tree).points
        assert point.acceptance is not None
        same = sum(row.answer == answers[row.id, row.turn] for row in point.requests) / len(point.requests)
        tau, expected = point.acceptance.tau, taus[tree]
        print(f"{tree:10}{tau:9.4f}{expected:9.4f}{tau / expected - 1:9.2%}{same:7.0%}  {point.warnings}", flush=True)


if __name__ == "__main__":
    main()
