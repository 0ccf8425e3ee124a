"""Fixtures that many tests share: a copy of the project, and the whole pipeline run once on a small scale."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent

EVAL = YAML(typ="safe").load((ROOT / "params.yaml").read_text())["benchmark"]["workloads"]["eval"]

# Products this small gain nothing by a second thread, and where two tests run at once they lose a hundred times as much:
# the threads wait for each other in turn. Before torch is imported, here and in what tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# What makes the whole graph run in about a minute. The target says little sense, which no test minds: lossless, exact and
# resumable must hold for any target. `straight` is e001 and then e003 in one go.
SMALL = {
    "target": {"num_threads": 1},
    "prepare_target": {"steps": 60},
    "sample_target": {"train_rows": 32, "eval_rows": 6, "max_new_tokens": 60},
    "check_overfit": {"steps": 60, "min_tau": 1.5},
    "train_draft": {
        "checkpoints": {
            "e001": {"from": "e000", "epochs": 1},
            "e003": {"from": "e001", "epochs": 2},
            "straight": {"from": "e000", "epochs": 3},
        }
    },
    "replay_trees": {
        "checkpoints": ["e001", "e003", "straight"],
        "steps": [1, 2, 3, 5, 8],
        "topk": [1, 2, 3],
        "tokens": [4, 8, 16],
    },
    "benchmark": {
        "workloads": {"eval": {**EVAL, "num_prompts": 6, "warmup": 0, "max_new_tokens": 60}},
        "checkpoints": ["e003"],
        "trees": ["t5_1_6", "t8_2_16", "t8_3_16"],
    },
    "benchmark_served": {"checkpoints": ["e003"]},
}


def copy_project(to: Path) -> Path:
    """The files of the working tree, without what was made from them, as a DVC project of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file() and name != "dvc.lock":
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)
    return to


def edit_params(project: Path, changes: dict) -> None:
    """Set the given keys of the project's params.yaml; what is not named stays."""
    yaml = YAML()
    params = yaml.load((project / "params.yaml").read_text())
    for section, values in changes.items():
        params[section].update(values)
    with (project / "params.yaml").open("w") as file:
        yaml.dump(params, file)


def dvc(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run dvc in the project, with the stages' `python` being this one."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=project, env=env, capture_output=True, text=True
    )


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Whether the process ends in time. A zombie has ended: where process 1 reaps nobody, as in many containers, it stays
    one for good if its parent went before it (bug of a test that took it for alive, seen in CI only).
    """
    until = time.monotonic() + within_s
    while True:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which the whole graph has run, small. Read it; copy it before you change it."""
    project = copy_project(tmp_path_factory.mktemp("small_run"))
    edit_params(project, SMALL)
    done = dvc(project, "repro")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return project
