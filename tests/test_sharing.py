"""A finished project in a remote, and a clone with git's files only; docs/sharing.md describes the same."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.cells.replay_records import ReplayedTree
from stages.reproduce import model_card
from tests.conftest import dvc

REPRO = ("repro", "--pull", "--allow-missing")


def git(project: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *words], cwd=project, check=True, capture_output=True)


def run_dvc(project: Path, *words: str) -> str:
    done = dvc(project, *words)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def published(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished project, committed with its dvc.lock, and pushed to a folder."""
    folder = tmp_path_factory.mktemp("shared")
    shutil.copytree(small_run, folder / "published", symlinks=True)
    run_dvc(folder / "published", "remote", "add", "--default", "shared", str(folder / "remote"))
    git(folder / "published", "add", "--all")
    git(folder / "published", "commit", "--quiet", "--message", "a run")
    run_dvc(folder / "published", "push")
    return folder / "published"


@pytest.fixture
def clone(published: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "--quiet", str(published), "clone")
    return tmp_path / "clone"


def list_ran(output: str) -> list[str]:
    return re.findall(r"Running stage '(.+)'", output)


def made(project: Path, *folders: str) -> Iterator[Path]:
    """Files below, but for those of git."""
    return (path.relative_to(project) for name in folders for path in (project / name).rglob("*") if path.is_file())


def test_a_clone_runs_nothing_and_has_the_report_and_a_draft(published: Path, clone: Path) -> None:
    assert list_ran(run_dvc(clone, *REPRO)) == ["inputs"]
    run_dvc(clone, "pull", "report")
    run_dvc(clone, "pull", "drafts/e003/draft")
    here = set(made(clone, "results", "drafts", "artifacts/target", "data/hiddens", "data/sampled"))
    outs = [Path(out["path"]) for out in YAML(typ="safe").load(clone / "dvc.lock")["stages"]["report"]["outs"]]
    names = {file for out in outs for file in ([out] if (published / out).is_file() else made(published, str(out)))}
    draft = {Path("drafts/e003/draft") / name for name in ("config.json", "model.safetensors")}
    assert here == draft | names and Path("results/report/index.html") in here
    assert all((clone / path).read_bytes() == (published / path).read_bytes() for path in here)
    assert list_ran(run_dvc(clone, *REPRO)) == ["inputs"]


def test_a_draft_with_its_card_is_ready_for_upload(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_run)
    folder, draft = tmp_path / "upload", Path("drafts/e003/draft")
    model_card.main("e003", str(folder), "apache-2.0")
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (draft / name).read_bytes()
    card = (folder / "README.md").read_text()
    head = YAML(typ="safe").load(card.split("---")[1])
    assert (head["license"], head["base_model"]) == ("apache-2.0", "builtin/weather-tiny")
    best = next(
        tree for tree in ReplayedTree.read("e003") if not tree.temperature and tree.shape.name in card_trees(card)
    )
    assert f"| {best.shape.name[1:]} | {best.tau:.2f} (" in card
    with pytest.raises(ValueError, match="exists, expected a new folder"):
        model_card.main("e003", str(folder), "apache-2.0")
    with pytest.raises(ValueError, match="e999 is no checkpoint of train_draft"):
        model_card.main("e999", "", "apache-2.0")


def card_trees(card: str) -> list[str]:
    return ["t" + line.split("|")[1].strip() for line in card.splitlines() if re.match(r"\| \d+_\d+_\d+ \|", line)]
