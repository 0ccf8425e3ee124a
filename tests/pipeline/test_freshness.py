"""pipeline/freshness.py: quick only where DVC itself would find nothing; any change of a file, and DVC is asked."""

import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from pipeline import dvc_graph, freshness, workspaces
from pipeline.cli import run_command_line
from pipeline.commands import describe_outdated
from tests.pipeline.conftest import Project, give_params, make_project, run_dvc_cli


@pytest.fixture(scope="module")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has run; the last stage reads a parameter, the first a folder, where byte code may lie."""
    folder = tmp_path_factory.mktemp("fresh")
    project = make_project(folder / "project")
    text = (project.root / "dvc.yaml").read_text()
    text = text.replace("last.py]", "last.py]\n    params: [report.title]").replace("[raw.csv,", "[raw.csv, more,")
    (project.root / "dvc.yaml").write_text(text)
    give_params(project)
    (project.root / ".dvcignore").write_text("__pycache__/\n")
    (project.root / "more/__pycache__").mkdir(parents=True)
    (project.root / "more/one.txt").write_text("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", str(folder / "site"))
        patch.chdir(project.root)
        run_dvc_cli("repro")
    return project.root


@pytest.fixture
def fresh_project(finished_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of it, all up to date, and known to be."""
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    project = Project(tmp_path / "project")
    shutil.copytree(finished_project, project.root)
    monkeypatch.chdir(project.root)
    assert dvc_graph.explain_stale() == {}
    return project


def edit_title() -> None:
    """Change the one parameter that a stage reads."""
    edited = Path("params.yaml").read_text().replace("title: weather-tiny", "title: two")
    Path("params.yaml").write_text(edited)


def stale_by_dvc() -> set[str]:
    """Return the stages that DVC's own command line finds changed."""
    return set(json.loads(run_dvc_cli("status", "--json")))


CHANGES: dict[str, Callable[[], object]] = {
    "a file, at the same length": lambda: Path("raw.csv").write_text(Path("raw.csv").read_text().replace("2", "3")),
    "another file in a folder": lambda: Path("more/two.txt").write_text("two"),
    "an output gone": lambda: Path("middle.csv").unlink(),
    "a parameter": edit_title,
    "a command": lambda: Path("dvc.yaml").write_text(
        Path("dvc.yaml").read_text().replace("python last", "python  last")
    ),
    "the lock file": lambda: Path("dvc.lock").write_text("schema: '2.0'\nstages: {}\n"),
    "the lock file gone": lambda: Path("dvc.lock").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_any_change_dvc_is_asked(fresh_project: Project, change: str) -> None:
    CHANGES[change]()
    stale = dvc_graph.explain_stale()
    assert stale and set(stale) == stale_by_dvc()
    run_dvc_cli("repro")
    assert dvc_graph.explain_stale() == {} and freshness.read_fresh_stages() and stale_by_dvc() == set()


def test_the_record_is_of_one_version_of_dvc_and_a_broken_one_is_ignored(
    fresh_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert freshness.read_fresh_stages()
    monkeypatch.setattr(freshness, "version", lambda name: "0.0")
    assert freshness.read_fresh_stages() is None
    freshness.KNOWN_STATE_FILE.write_text("{")
    assert freshness.read_fresh_stages() is None and dvc_graph.explain_stale() == {}


def test_results_of_an_earlier_state_are_told(fresh_project: Project) -> None:
    """Bug: `aerie launch` and `aerie table` printed results of another target without a word."""
    assert list(describe_outdated()) == []
    edit_title()
    (line,) = describe_outdated()
    assert line == "note: of an earlier state, for these stages are stale: last; see aerie stale, and run: aerie run"
    Path("dvc.yaml").write_text("stages: {first: 1}")
    (line,) = describe_outdated()
    assert line.startswith("note: it is not known whether this is of params.yaml as it is now: ")
    # Bug: while a run was at work, all stages were told to be stale.
    with workspaces.hold_workspace(print):
        (line,) = describe_outdated()
    assert line.endswith(f"a run is at work here (process {os.getpid()}); ask again when it has ended")


def test_stale_says_what_and_why_and_fails_where_something_is(fresh_project: Project) -> None:
    def asked() -> tuple[int, str]:
        with redirect_stdout(io.StringIO()) as printed:
            try:
                run_command_line(["stale"])
            except SystemExit as ended:
                return int(str(ended.code)), printed.getvalue()
        return 0, printed.getvalue()

    assert asked() == (0, "nothing is stale\n")
    edit_title()
    Path("middle.csv").unlink()
    assert asked() == (
        1,
        ("stale: middle (middle.csv missing)\nstale: last (middle.csv missing; params.yaml: report.title modified)\n"),
    )
    shutil.rmtree(".dvc/cache")
    for output in ("first.csv", "results/benchmark.csv"):
        Path(output).unlink()
    assert asked() == (1, "stale: first, middle, last (its results are not here)\n")
    Path("dvc.lock").unlink()
    assert asked() == (1, "stale: first, middle, last (new)\n")
