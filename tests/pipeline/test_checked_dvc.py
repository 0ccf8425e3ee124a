"""A cached copy that was written into through its hard link is found before it is restored."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import dvc_graph
from pipeline.dvc_graph import Outcome
from pipeline.remote import dvc_remote
from tests.pipeline.conftest import REPO, Project, give_params, run_dvc_cli


@pytest.fixture
def linked(project: Project) -> Project:
    """The project with our link types, whose stages have run; each output has bytes of its own, so a copy of its own."""
    links = next(line for line in (REPO / ".dvc/config").read_text().splitlines() if line.strip().startswith("type ="))
    config = project.root / ".dvc/config"
    config.write_text(f"{config.read_text()}[cache]\n{links}\n")
    for name in ("first", "middle", "last"):
        script = project.root / f"{name}.py"
        script.write_text(f"{script.read_text().replace('shutil.copy', 'made = shutil.copy')}\n"
                          f"with open(made, 'a') as file:\n    file.write('made by {name}\\n')\n")  # fmt: skip
    run_dvc_cli("repro")
    return project


def run_all(on_line=print) -> dict[str, Outcome]:
    return {name: dvc_graph.reproduce_stage(name, on_line) for name in dvc_graph.list_stages()}


def write_in_place(path: Path) -> None:
    """As root does, whom a read-only mode does not stop; as anybody else could after a chmod."""
    path.chmod(0o644)
    with path.open("a") as file:
        file.write("an edit\n")
    path.chmod(0o444)


def test_an_output_edited_in_place_is_not_restored_as_the_stages_result(linked: Project) -> None:
    """Bug: outputs are hard links into DVC's cache, so the edit changed the cached copy, and going back to old parameters
    "restored" the edit as the result, with nothing stale afterwards."""
    edited, raw = linked.root / "middle.csv", linked.root / "raw.csv"
    whole, before = edited.read_text(), raw.read_text()
    assert edited.stat().st_nlink > 1
    write_in_place(edited)
    raw.write_text("tree,tau\nt5_1_6,2.6\n")
    assert set(run_all().values()) == {Outcome.RAN}
    raw.write_text(before)
    printed: list[str] = []
    outcomes = run_all(printed.append)
    assert outcomes == {"first": Outcome.RESTORED, "middle": Outcome.RAN, "last": Outcome.RESTORED}
    assert edited.read_text() == whole and dvc_graph.explain_stale() == {}
    (warning,) = [line for line in printed if "cached copy" in line]
    assert "does not have the bytes it was kept with" in warning
    (kept,) = (linked.root / ".dvc/cache/damaged").iterdir()
    assert kept.read_text() == f"{whole}an edit\n" and str(kept.relative_to(linked.root)) in warning


def test_an_output_edited_in_place_runs_again_where_it_lies(linked: Project, caplog) -> None:
    """Bug: DVC found the output modified, and restored it from the copy that held the edit too."""
    edited = linked.root / "middle.csv"
    whole = edited.read_text()
    write_in_place(edited)
    assert dvc_graph.explain_stale()["middle"] == ["middle.csv not in cache"]
    assert "does not have the bytes it was kept with" in caplog.text
    assert run_all() == {"first": Outcome.UNCHANGED, "middle": Outcome.RAN, "last": Outcome.UNCHANGED}
    assert edited.read_text() == whole


def test_a_damaged_copy_is_not_pushed_for_other_hosts(linked: Project, tmp_path: Path) -> None:
    """Bug: what a worker or a clone then pulled had the edit under the name of the whole result."""
    give_params(linked)
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "remote", "add", "-q", "-d", "store", str(tmp_path / "store")], check=True)
    linked.git("init", "-q")
    write_in_place(linked.root / "first.csv")
    dvc_remote.offer_stage("middle")
    held = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and b"an edit" in path.read_bytes()]
    assert held == []
