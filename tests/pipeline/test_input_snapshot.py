"""Inputs that are edited while a stage is at work: it is recorded with what it began with."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import dvc_graph, input_snapshot
from pipeline.dvc_graph import StageError
from stages.params import schema
from stages.params.section import PARAMS_FILE
from stages.params.started_params import COPY_VARIABLE
from tests.pipeline.conftest import REPO, Project, give_params, run_dvc_cli

GRAPH = """
stages:
  first:
    cmd: python first.py
    deps: [raw.csv, first.py]
    params: [number]
    outs: [first.csv]
"""
# Reads the parameter twice, before and after the edit, as a process of many that starts late does.
SCRIPT = """
import os, time
from pathlib import Path
def read():
    return Path(os.environ.get("AERIE_STARTED_PARAMS", "params.yaml")).read_text().split()[1]
early = read()
Path("at_work").touch()
while not Path("edited").exists():
    time.sleep(0.01)
Path("first.csv").write_text(early + " " + read())
"""


@pytest.fixture
def edited(project: Project) -> Project:
    """A stage whose result is the parameter that it read, early and late, and that waits for an edit between."""
    (project.root / "dvc.yaml").write_text(GRAPH)
    (project.root / "params.yaml").write_text("number: 1\nother: 1\n")
    (project.root / "first.py").write_text(SCRIPT)
    return project


def run_with_edit(project: Project, name: str, text: str) -> str:
    """Run the stage, write a file while it is at work, and return what is printed."""
    for mark in ("at_work", "edited"):
        (project.root / mark).unlink(missing_ok=True)
    run = subprocess.Popen(
        [sys.executable, "-m", "pipeline.checked_dvc", "repro"],
        env=os.environ | {"PYTHONPATH": str(REPO), "DVC_TEST": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + 60
    while not Path("at_work").exists():
        assert run.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    Path(name).write_text(text)
    Path("edited").touch()
    return run.communicate()[0]


def test_an_edit_of_params_while_a_stage_is_at_work_is_not_recorded_as_what_it_read(edited: Project) -> None:
    """Bug: DVC reads parameters again after the command, so the result was recorded, and later returned, as that of the edit."""
    printed = run_with_edit(edited, "params.yaml", "number: 2\nother: 1\n")
    assert (
        "first is recorded with what it began with: number changed while it was at work. It is stale again" in printed
    )
    assert Path("first.csv").read_text() == "1 1"
    assert dvc_graph.explain_stale() == {"first": ["params.yaml: number modified"]}
    assert not list(Path(".scratch/stage_params").iterdir())

    assert dvc_graph.reproduce_stage("first", print) is dvc_graph.Outcome.RAN, "not restored as the result of 2"
    assert Path("first.csv").read_text() == "2 2" and dvc_graph.explain_stale() == {}
    Path("params.yaml").write_text("number: 1\nother: 5\n")
    assert dvc_graph.reproduce_stage("first", print) is dvc_graph.Outcome.RESTORED
    assert Path("first.csv").read_text() == "1 1"


def test_an_edit_of_other_params_changes_nothing(edited: Project) -> None:
    assert "began with" not in run_with_edit(edited, "params.yaml", "number: 1\nother: 2\n")
    assert dvc_graph.explain_stale() == {} and Path("first.csv").read_text() == "1 1"


@pytest.mark.parametrize("text", ["number: [", "other: 1\n"])
def test_params_that_cannot_be_read_when_a_stage_ends_are_an_edit(edited: Project, text: str) -> None:
    assert "number changed while it was at work" in run_with_edit(edited, "params.yaml", text)
    Path("params.yaml").write_text("number: 1\n")
    assert dvc_graph.explain_stale() == {} and Path("first.csv").read_text() == "1 1"


def test_an_edit_of_code_makes_the_stage_stale(edited: Project) -> None:
    code = Path("first.py").read_text()
    assert "first.py changed while it was at work" in run_with_edit(edited, "first.py", f"{code}# edited\n")
    assert dvc_graph.explain_stale() == {"first": ["first.py modified"]}
    Path("first.py").write_text(code)
    assert dvc_graph.explain_stale() == {}


def test_data_that_change_while_they_are_read_give_no_result(edited: Project) -> None:
    printed = run_with_edit(edited, "raw.csv", "edited\n")
    assert "raw.csv changed while first was at work; what it made may be of both, so it is not recorded" in printed
    assert not Path("dvc.lock").exists()


def test_a_stage_that_fails_is_recorded_as_never_begun(edited: Project) -> None:
    script = Path("first.py").read_text()
    Path("first.py").write_text("raise SystemExit(1)")
    with pytest.raises(StageError):
        dvc_graph.reproduce_stage("first", print)
    Path("first.py").write_text(script)
    Path("edited").touch()
    run_dvc_cli("repro")
    assert dvc_graph.explain_stale() == {}


def test_stages_know_the_variable_and_the_file_by_the_same_names() -> None:
    names = input_snapshot.COPY_VARIABLE, input_snapshot.PARAMS_FILE
    assert names == (COPY_VARIABLE, PARAMS_FILE)


def test_a_stage_reads_the_params_that_it_began_with(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    give_params(project)
    copy = Path("copy.yaml")
    copy.write_text(Path("params.yaml").read_text().replace("context: 128", "context: 64"))
    assert schema.load_params().time_trees.context == 128
    monkeypatch.setenv(COPY_VARIABLE, str(copy.absolute()))
    assert schema.load_params().time_trees.context == 64
    copy.write_text(copy.read_text().replace("context: 64", "context: none"))
    with pytest.raises(ValueError, match=r"^params.yaml has 1 problem"):
        schema.load_params()
