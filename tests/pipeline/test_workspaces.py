"""A run's own workspace: what it begins with, and what promote and drop refuse."""

import contextlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline import dvc_graph, promotion, recipes, workspaces
from pipeline.forms import Sweep
from pipeline.resources import try_lock
from stages.params.schema import load_params
from tests.pipeline.conftest import give_params, run_dvc_cli


@pytest.fixture
def in_git(finished_run):
    project = finished_run
    (project.root / ".gitignore").write_text("/.scratch/\n/.dvc/tmp\n/.dvc/cache\nconfig.local\n*.csv\n!raw.csv\n")
    (project.root / "params.yaml").write_text("a: 1\n")
    project.git("init", "-q")
    project.commit()
    return project


def test_a_new_workspace_has_the_files_here_and_no_stale_stage(in_git, monkeypatch) -> None:
    in_git.write_stage("last", "# edited")
    (in_git.root / "new.py").write_text("new\n")
    (in_git.root / "raw.csv").unlink()
    (in_git.root / "raw.csv").write_text("tree,tau\nt5_1_6,2.512345678901\n")
    made = workspaces.make_workspace("one")
    assert (made / "new.py").read_text() == "new\n" and "# edited" in (made / "last.py").read_text()
    monkeypatch.chdir(made)
    assert dvc_graph.explain_stale() == {"last": ["last.py modified"]}
    assert (made / "middle.csv").stat().st_size and not (made / ".dvc/cache").exists()


def test_a_workspace_that_could_not_be_created_is_removed(in_git) -> None:
    (in_git.root / "dvc.lock").write_text("schema: [")
    with pytest.raises(ValueError, match="checkout"):
        workspaces.make_workspace("one")
    assert not list(workspaces.RUNS_FOLDER.iterdir())
    assert "runs/one" not in subprocess.run(["git", "worktree", "list"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", ["../../../x", "..", ".", "", "a/../b", "/x"])
def test_a_run_whose_name_is_a_path_gets_no_workspace(in_git, name: str) -> None:
    """Bug: a run's name, which users of Prefect's server choose, was joined to .scratch/runs unchecked."""
    with pytest.raises(ValueError, match="not the name of a folder"):
        workspaces.make_workspace(name)
    for act in (promotion.promote_run, workspaces.drop_run):
        with pytest.raises(ValueError, match="there is no run"):
            list(act(name))
    assert not (in_git.root / ".scratch").exists() and not (in_git.root.parent / "x").exists()
    assert (
        workspaces.name_workspace("../../../elsewhere", "0123456789ab") == "-elsewhere-01234567"
    )  # as a flow makes it


def promote(name: str) -> str:
    with pytest.raises(ValueError, match=r"\w") as refused:
        list(promotion.promote_run(name))
    return str(refused.value)


def test_promote_refuses_what_would_lose_something(in_git) -> None:
    assert "there is no run one in .scratch/runs; there are none" in promote("one")
    made = workspaces.make_workspace("one")
    assert "there is no run ../runs/one" in promote("../runs/one")
    held = try_lock(workspaces.LOCK_PATH)
    assert held and "a run is at work here" in promote("one")
    held.close()
    held = try_lock(made / workspaces.LOCK_PATH)
    assert held and "a run is at work in that workspace" in promote("one")
    with pytest.raises(ValueError, match="is at work"):
        list(workspaces.drop_run("one"))
    held.close()
    (made / "raw.csv").write_text("another\n")
    assert "one has not finished: first would run" in promote("one")
    (in_git.root / "params.yaml").write_text("a: 2\n")
    assert promote("one").endswith("commit or stash them:\n   M params.yaml")
    in_git.commit()
    assert "params.yaml of a later commit differ" in promote("one")
    list(workspaces.drop_run("one"))
    assert not made.exists()


TREES = """
import shutil, sys
from ruamel.yaml import YAML
trees = YAML(typ="safe").load(open("params.yaml"))["benchmark"]["trees"]
open("results/benchmark.csv", "w").write("\\n".join(["tree", *trees, ""]))
"""


@pytest.fixture
def in_git_with_trees(in_git) -> Any:
    """A project whose last stage makes a row of each tree of params.yaml, with one tree there; dvc.lock is in no commit."""
    give_params(in_git)
    params = in_git.root / "params.yaml"
    params.write_text(re.sub(r"(?s)(benchmark:.*?\n  trees:) \[.*?\]", r"\1 [t5_1_6]", params.read_text(), count=1))
    (in_git.root / "last.py").write_text(TREES)
    graph = in_git.root / "dvc.yaml"
    graph.write_text(graph.read_text().replace("last.py]", "last.py]\n    params: [benchmark.trees]"))
    in_git.commit()
    run_dvc_cli("repro")  # changes dvc.lock, as a fresh user's first run does
    return in_git


def sweep(name: str, trees: list[str]) -> None:
    """Run a sweep of these trees in a workspace, as its flow does."""
    with contextlib.chdir(workspaces.make_workspace(name)):
        sections = Sweep(trees=trees).build_sections()
        promotion.note_added(Path.cwd(), sections)
        recipes.write_sections(sections)
        run_dvc_cli("repro")


def test_promoted_sweeps_join_the_rows_that_were_there(in_git_with_trees) -> None:
    """Bug: a fresh user's changed dvc.lock was an obstacle, and a sweep's rows replaced all others."""
    assert load_params().benchmark.trees == ["t5_1_6"]
    sweep("one", ["t4_2_8"])
    sweep("two", ["t8_2_16"])
    assert promotion.find_obstacle("one") is None
    list(promotion.promote_run("one"))
    printed = list(promotion.promote_run("two"))
    assert printed[0].startswith("params.yaml as it was is kept in params.yaml.before-two")
    assert Path("results/benchmark.csv").read_text().split() == ["tree", "t5_1_6", "t4_2_8", "t8_2_16"]
    assert load_params().benchmark.trees == ["t5_1_6", "t4_2_8", "t8_2_16"]
    assert dvc_graph.explain_stale() == {}


def test_a_file_edited_since_a_run_began_is_an_obstacle_and_one_edited_before_is_none(in_git_with_trees) -> None:
    in_git_with_trees.write_stage("middle", "# edited")
    sweep("one", ["t4_2_8"])
    assert promotion.find_obstacle("one") is None
    in_git_with_trees.write_stage("middle", "# edited again")
    assert str(promotion.find_obstacle("one")).endswith("commit or stash them:\n   M middle.py")
