"""aerie rerun: one timed stage runs again, alone, and what was there stays until it has ended."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import dvc_graph, rerun
from pipeline.processes import StageError
from tests.pipeline.conftest import run_dvc_cli

CELL = "results/cells/eval-e003-t5_1_6.json"
OTHER = "results/cells/eval-e003-t5_2_8.json"
GRAPH = """
stages:
  benchmark:
    matrix: {tree: [t5_1_6, t5_2_8]}
    cmd: test ! -e broken && date +%s%N > results/cells/eval-e003-${item.tree}.json
    outs: ["results/cells/eval-e003-${item.tree}.json"]
  report:
    cmd: cat results/cells/* > table.txt
    deps: [results/cells]
    outs: [table.txt]
"""


@pytest.fixture
def measured(project: SimpleNamespace) -> Path:
    """A project with two cells that hold the time at which they were made, and a report of both."""
    root: Path = project.root
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "results/cells").mkdir(parents=True)
    run_dvc_cli("repro")
    assert dvc_graph.explain_stale() == {}
    return root


def test_one_cell_is_measured_again_and_no_other_stage(measured: Path) -> None:
    before = {name: (measured / name).read_text() for name in (CELL, OTHER, "table.txt")}
    lines = list(rerun.rerun_cells(["eval-e003-t5_1_6"]))
    assert lines == ["benchmark@t5_1_6 was measured again; the table follows with: aerie run"]
    assert (measured / CELL).read_text() > before[CELL]
    assert all((measured / name).read_text() == before[name] for name in (OTHER, "table.txt"))
    assert list(dvc_graph.explain_stale()) == ["report"]


def test_a_cell_stays_where_it_could_not_be_measured_again(measured: Path) -> None:
    """DVC removes a stage's outputs before it runs it."""
    before = (measured / CELL).read_text()
    (measured / "broken").touch()
    with pytest.raises(StageError, match="stage benchmark@t5_1_6 failed"):
        list(rerun.rerun_cells(["benchmark@t5_1_6"]))
    assert (measured / CELL).read_text() == before
    assert dvc_graph.explain_stale() == {}


@pytest.mark.parametrize(
    "name",
    [
        "benchmark@eval-e009-t8_2_16",
        "eval-e009-t8_2_16",
        "eval-e009-t8_2_16.json",
        "results/cells/eval-e009-t8_2_16.json",
    ],
)
def test_a_cell_is_named_by_its_stage_or_its_file(name: str) -> None:
    outputs = {
        "benchmark@eval-e009-t5_1_6": ["results/cells/eval-e009-t5_1_6.json"],
        "benchmark@eval-e009-t8_2_16": ["results/cells/eval-e009-t8_2_16.json"],
    }
    assert rerun.find_timed_stage(name, outputs) == "benchmark@eval-e009-t8_2_16"


def test_an_unknown_cell_is_refused_with_those_that_are_like_it() -> None:
    outputs = {f"benchmark@eval-e009-{tree}": [] for tree in ("t5_1_6", "t8_2_16")}
    with pytest.raises(ValueError, match=r"no cell 'eval-e009-t8_2_17' .* as benchmark@eval-e009-t8_2_16, "):
        rerun.find_timed_stage("eval-e009-t8_2_17", outputs)
    with pytest.raises(ValueError, match=r"params\.yaml lists none"):
        rerun.find_timed_stage("report", {})
