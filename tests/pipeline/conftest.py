"""A DVC project of three small stages, for the tests of what runs stages. No torch, no model, under a second a stage."""

import io
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path

import dvc.cli
import pytest
from ruamel.yaml import YAML

from pipeline import processes
from tests.conftest import ROOT as REPO
from tests.conftest import share_path

# What these tests start is this checkout's, whichever one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))

# Out of order on purpose: the order to run in must come from the dependencies.
GRAPH = """
stages:
  last:
    cmd: python last.py
    deps: [middle.csv, last.py]
    outs: [results/benchmark.csv]
  first:
    cmd: python first.py
    deps: [raw.csv, first.py]
    outs: [first.csv]
  middle:
    cmd: python middle.py
    deps: [first.csv, middle.py]
    outs: [middle.csv]
"""
IGNORED = """.scratch/
*.log
/first.csv
/middle.csv
/results/
/.dvc/tmp
/.dvc/cache
config.local
"""
COPIES = {"first": ("raw.csv", "first.csv"), "middle": ("first.csv", "middle.csv")}
COPIES["last"] = ("middle.csv", "results/benchmark.csv")


class Project:
    """The project's folder, and its stages' scripts."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write_stage(self, stage: str, before: str = "") -> None:
        """Let `stage` run the lines `before`, then copy its input to its output."""
        lines = ["import os, shutil, signal, sys, time", before, f"print('this is {stage}')"]
        (self.root / f"{stage}.py").write_text("\n".join([*lines, "shutil.copy({!r}, {!r})".format(*COPIES[stage])]))

    def write_sleeping_stage(self, stage: str, first: str = "") -> None:
        """Let `stage` say its process id and sleep."""
        self.write_stage(stage, f"{first}\nprint('asleep', os.getpid(), flush=True)\ntime.sleep(600)")

    def git(self, *words: str) -> None:
        who = ["-c", "user.name=aerie", "-c", "user.email=aerie@example.org"]
        subprocess.run(["git", *who, *words], cwd=self.root, check=True)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "as it is")

    def locked(self) -> set[str]:
        """The stages in dvc.lock; fails where that is not valid YAML."""
        return set(YAML(typ="safe").load(self.root / "dvc.lock")["stages"])


def make_project(root: Path) -> Project:
    (root / ".dvc").mkdir(parents=True)
    (root / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    (root / "results").mkdir()
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "raw.csv").write_text("tree,tau\nt5_1_6,2.512345678901\n")
    project = Project(root)
    for stage in COPIES:
        project.write_stage(stage)
    return project


def run_dvc_cli(*words: str) -> str:
    """Run DVC's own command line, in this process: a start of it takes a second."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setenv("DVC_TEST", "1")  # else it prints JSON to where stdout went when colorama was imported
        assert dvc.cli.main(list(words)) == 0
    return printed.getvalue()


def give_params(project: Project) -> None:
    """A valid params.yaml, ours, with raw data that exists."""
    (project.root / "params.yaml").write_text(_write_params())


@cache
def _write_params() -> str:
    """Return its text; once for all projects, since comments are kept by a slow parser."""
    yaml = YAML()
    params = yaml.load(REPO / "params.yaml")
    params["fix_data"]["raw"] = "raw.csv"
    stages = {stage: {"gpus": 0, "exclusive": False} for stage in COPIES}
    params["schedule"] = {"stages": stages, "retry_pause_s": 0, "remote_stages": []}
    text = io.StringIO()
    yaml.dump(params, text)
    return text.getvalue()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The current directory, for one test."""
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    made = make_project(tmp_path / "project")
    monkeypatch.chdir(made.root)
    return made


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run modules of stages that know torch in this process: importing it takes seconds."""

    def run(module: str, *words: object) -> str:
        with redirect_stdout(io.StringIO()) as printed:
            import_module(module).main(*map(str, words))
        return printed.getvalue()

    monkeypatch.setattr(processes, "run_silent", run)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose three stages have run."""
    folder = tmp_path_factory.mktemp("made_once")
    made = make_project(folder / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", str(folder / "site"))
        patch.chdir(made.root)
        run_dvc_cli("repro")
    return made.root


@pytest.fixture
def finished_run(project: Project, made_once: Path) -> Project:
    """The current directory, where all stages have run."""
    shutil.copytree(made_once, project.root, dirs_exist_ok=True)
    return project


@pytest.fixture(scope="session")
def prefect_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of Prefect without rows, to start a server on a copy of: a server makes its own in 13 s of a core."""
    with share_path(tmp_path_factory, "prefect.db") as database:
        if not database.exists():
            home = tmp_path_factory.mktemp("tables")
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            environment = os.environ | {"PREFECT_HOME": str(home), "DO_NOT_TRACK": "1"}
            subprocess.run(command, env=environment, check=True, capture_output=True)
            shutil.copy(home / "prefect.db", database)
    return database


@pytest.fixture(scope="session")
def served_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Another, which a server can keep for a whole session."""
    return make_served(tmp_path_factory.mktemp("served"))


def make_served(root: Path) -> Project:
    """In git, and its last stage reads a parameter."""
    made = make_project(root / "project")
    give_params(made)
    graph = made.root / "dvc.yaml"
    graph.write_text(graph.read_text().replace("last.py]", "last.py]\n    params: [report.title]"))
    (made.root / "recipes").mkdir()
    (made.root / "recipes/ours.yaml").write_text("report: {title: ours}\n")
    (made.root / ".gitignore").write_text(IGNORED)
    made.git("init", "-q")
    made.commit()
    return made
