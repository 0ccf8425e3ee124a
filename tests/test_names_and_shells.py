"""Names in params.yaml that a shell would run: `dvc repro` without `make run` must run none of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.telemetry import run_stage
from tests.conftest import EVAL, copy_project, dvc

# A shell would run parts of it without quotes and within either kind.
HOSTILE = "x' ; touch ran ; '\" ; touch ran ; \"; touch ran; $(touch ran) `touch ran`\ntouch ran"


def write_everywhere(project: Path, name: str) -> None:
    """Put `name` in each key of params.yaml whose value dvc.yaml makes stages of."""
    yaml = YAML()
    given = yaml.load((project / "params.yaml").read_text())
    given["train_draft"]["checkpoints"] = {name: {"from": "e000", "epochs": 1}}
    given["import_draft"]["checkpoints"] = {name + "i": {"model": "m", "revision": None, "rope_theta": None}}
    given["replay_trees"]["checkpoints"] = given["time_cycles"]["checkpoints"] = [name]
    given["benchmark"]["workloads"] = {name: EVAL}
    given["benchmark"] |= {"torch_workloads": [name], "checkpoints": [name], "trees": [name]}
    given["benchmark_served"] |= {"engines": [name], "workloads": [name], "checkpoints": [name], "trees": [name]}
    given["time_cycles"] |= {"engines": [name], "workload": name}
    with (project / "params.yaml").open("w") as file:
        yaml.dump(given, file)


def without_deps(project: Path) -> list[str]:
    """Take the deps out of dvc.yaml, so that every stage's command runs at once -> the stages made from lists."""
    yaml = YAML()
    graph = yaml.load((project / "dvc.yaml").read_text())
    for stage in graph["stages"].values():
        stage.get("do", stage)["deps"] = ["params.yaml"]
    with (project / "dvc.yaml").open("w") as file:
        yaml.dump(graph, file)
    return [name for name, stage in graph["stages"].items() if "foreach" in stage or "matrix" in stage]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = copy_project(tmp_path_factory.mktemp("names"))
    dvc(project, "init", "-q")
    return project


@pytest.fixture(scope="module")
def recording_python(project: Path) -> Path:
    """A program called python, first on the PATH, which only notes its arguments: stages take seconds to import torch."""
    folder = project / "first"
    folder.mkdir()
    (folder / "python").write_text('#!/bin/sh\nprintf "%s|" "$@" >> told; echo >> told; exit 1\n')
    (folder / "python").chmod(0o755)
    return folder


def test_no_shell_runs_a_name_of_params_yaml(project: Path, recording_python: Path) -> None:
    """Bug: dvc.yaml put names into its commands, so that a tree called "t8_1_9; touch x" ran `touch x` under `dvc repro`."""
    groups, name = without_deps(project), HOSTILE
    write_everywhere(project, name)
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", "--keep-going", *groups]
    env = {**os.environ, "PATH": f"{recording_python}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert not (project / "ran").exists(), done.stdout
    heard = (project / "told").read_text()
    assert heard.count("-m|stages.") == len(groups) == 10, done.stderr
    assert f"|train_draft@{name}|" in heard
    for stage in ("benchmark_served_baseline", "time_cycles"):
        assert f"|{stage}@{name}-{name}|" in heard
    assert f"|benchmark@{name}-{name}-{name}|" in heard


def test_a_stage_finds_its_words_in_its_name(home: Path) -> None:
    assert run_stage.split_stage_name(["benchmark@eval-e003-t5_1_6"]) == ["eval", "e003", "t5_1_6"]
    assert run_stage.split_stage_name(["a folder@home/dvc.yaml:train_draft@e003"]) == ["e003"]
    assert run_stage.split_stage_name(["eval", "e003", "t5_1_6"]) == ["eval", "e003", "t5_1_6"]
    assert run_stage.split_stage_name([]) == []
