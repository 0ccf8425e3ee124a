"""pipeline/scheduler.py and resources.py: what runs beside what, and that a real DVC then writes what it writes in a row."""

import shutil
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ruamel.yaml import YAML

from pipeline import dvc_graph, scheduler
from pipeline.resources import ResourceLease, ResourcePool
from stages.params.schedule import StageResources

ANY, ALONE = StageResources(gpus=0, exclusive=False), StageResources(gpus=0, exclusive=True)
GPU, ALL = StageResources(gpus=1, exclusive=False), StageResources(gpus="all", exclusive=False)


class StageRecorder:
    """Stages that record their start and end; with `together`, each waits until that many of its kind are running."""

    def __init__(self, stale: set[str], fails: frozenset[str] = frozenset(), together: int = 1) -> None:
        self.stale, self.fails = stale, fails
        self.events: list[str] = []
        self.gpus: dict[str, list[str] | None] = {}
        self.barrier = threading.Barrier(together)
        self.threads = ThreadPoolExecutor()
        self.asked: list[list[str]] = []

    def start(self, name: str, lease: ResourceLease, why: list[str]) -> "Future[None]":
        return self.threads.submit(self._work, name, lease, why)

    def _work(self, name: str, lease: ResourceLease, why: list[str]) -> None:
        if not why:
            return
        self.gpus[name] = lease.gpus
        self.events.append(f"{name} begins")
        if name.startswith("cell"):
            self.barrier.wait(60)
        self.events.append(f"{name} ends")

    def ended_as(self, name: str) -> bool | None:
        return None if name in self.fails else name in self.stale

    def ask(self, names: list[str]) -> dict[str, list[str]]:
        self.asked.append(names)
        return {name: ["changed"] for name in names if name in self.stale}

    def run(
        self,
        needs: dict[str, list[str]],
        wants: dict[str, StageResources],
        pool: ResourcePool,
        away: frozenset[str] = frozenset(),
    ) -> None:
        why = {name: ["changed"] for name in self.stale}
        scheduler.run_stages(scheduler.StageGraph(needs, wants, away), why, pool, self.start, self.ended_as, self.ask)


def test_four_cells_are_at_work_at_once_and_no_more(tmp_path: Path) -> None:
    cells = [f"cell{n}" for n in range(8)]
    watch = StageRecorder({"first", *cells}, together=4)
    watch.run(
        {"first": [], **{cell: ["first"] for cell in cells}},
        dict.fromkeys(["first", *cells], ANY),
        ResourcePool(4, [], tmp_path),
    )
    at_work = [
        sum(1 if event.endswith("begins") else -1 for event in watch.events[: n + 1]) for n in range(len(watch.events))
    ]
    assert max(at_work) == 4 and watch.events[:2] == ["first begins", "first ends"]
    assert watch.asked == [cells]  # all that the first has woken, in one question


def test_an_exclusive_stage_runs_alone(tmp_path: Path) -> None:
    """Also where it could begin before the others: they go first, and then it has the machine to itself."""
    names = ["timed1", "other1", "timed2", "other2"]
    watch = StageRecorder(set(names))
    wants = {name: ALONE if name.startswith("timed") else ANY for name in names}
    watch.run({name: [] for name in names}, wants, ResourcePool(4, [], tmp_path))
    for name in ("timed1", "timed2"):
        assert watch.events[watch.events.index(f"{name} begins") + 1] == f"{name} ends"
    assert watch.events.index("timed1 begins") > max(watch.events.index(f"other{n} ends") for n in (1, 2))


def test_no_gpu_is_given_twice_and_a_stage_sees_its_own(tmp_path: Path) -> None:
    watch = StageRecorder({"cell1", "cell2", "whole", "none"}, together=2)
    wants = {"cell1": GPU, "cell2": GPU, "whole": ALL, "none": ANY}
    watch.run({name: [] for name in wants}, wants, ResourcePool(4, ["4", "6"], tmp_path))
    assert sorted([watch.gpus["cell1"], watch.gpus["cell2"]]) == [["4"], ["6"]]
    assert (watch.gpus["whole"], watch.gpus["none"]) == (["4", "6"], [])
    assert ResourceLease(gpus=["6"]).environment == {"CUDA_VISIBLE_DEVICES": "6"} and ResourceLease().environment == {}


def test_without_gpus_those_that_ask_for_one_take_turns_at_the_cores(tmp_path: Path) -> None:
    """Two trainings at once on two cores took 400 seconds, one after the other 13: their threads waited for each other."""
    ours, theirs = ResourcePool(4, [], tmp_path), ResourcePool(4, [], tmp_path)
    at_work = theirs.try_lease(GPU)
    assert at_work and ours.try_lease(GPU) is None and ours.try_lease(ALL) is None and ours.try_lease(ANY)
    at_work.release()
    assert ours.try_lease(ALL)


def test_a_run_that_waits_for_the_machine_keeps_others_from_beginning(tmp_path: Path) -> None:
    """Else a timed cell could wait for ever beside a sweep of another run that always has something under way."""
    ours, theirs = ResourcePool(4, [], tmp_path), ResourcePool(4, [], tmp_path)
    at_work = theirs.try_lease(ANY)
    assert at_work and ours.try_lease(ALONE) is None
    assert theirs.try_lease(ANY) is None
    at_work.release()
    alone = ours.try_lease(ALONE)
    assert alone and theirs.try_lease(ANY) is None
    alone.release()
    assert theirs.try_lease(ANY)


def test_stages_below_a_failed_one_get_no_reasons_and_the_others_run(tmp_path: Path) -> None:
    watch = StageRecorder({"a", "b", "c"}, fails=frozenset("ac"))  # c: as Prefect says of a stage that is not ready
    watch.run({"a": [], "b": [], "c": ["a"]}, dict.fromkeys("abc", ANY), ResourcePool(1, [], tmp_path))
    assert "b ends" in watch.events and "c begins" not in watch.events


# With a real DVC

CELLS = """
stages:
  first: {cmd: cp raw.csv first.csv, deps: [raw.csv], outs: [first.csv]}
  cell:
    matrix: {n: [1, 2, 3, 4, 5, 6]}
    cmd: (cat first.csv; echo ${item.n}) > cell${item.n}.csv
    deps: [first.csv]
    outs: ["cell${item.n}.csv"]
"""


def test_cells_at_once_leave_the_lock_file_that_a_run_in_a_row_leaves(project, tmp_path: Path) -> None:
    (project.root / "dvc.yaml").write_text(CELLS)
    shutil.copytree(project.root, tmp_path / "serial")
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], cwd=tmp_path / "serial", check=True)
    needs = dvc_graph.list_stages()
    outcomes: dict[str, dvc_graph.Outcome] = {}

    def bring(name: str, lease: ResourceLease, why: list[str]) -> None:
        held = [file.fileno() for file in lease.files]
        outcomes[name] = (
            dvc_graph.reproduce_stage(name, print, lease.environment, held) if why else dvc_graph.Outcome.UNCHANGED
        )

    def once() -> dict[str, dvc_graph.Outcome]:
        outcomes.clear()
        with ThreadPoolExecutor() as threads:
            scheduler.run_stages(
                scheduler.StageGraph(needs, dict.fromkeys(needs, ANY)),
                dvc_graph.explain_stale(),
                ResourcePool(4, [], tmp_path / "locks"),
                lambda *given: threads.submit(bring, *given),
                lambda name: outcomes[name] != dvc_graph.Outcome.UNCHANGED,
                dvc_graph.explain_stale,
            )
        return outcomes

    assert once() == dict.fromkeys(needs, dvc_graph.Outcome.RAN)
    locks = [YAML(typ="safe").load(root / "dvc.lock") for root in (project.root, tmp_path / "serial")]
    assert locks[0] == locks[1] and len(locks[0]["stages"]) == 7
    assert (project.root / "cell6.csv").read_bytes() == (tmp_path / "serial/cell6.csv").read_bytes()
    assert once() == dict.fromkeys(needs, dvc_graph.Outcome.UNCHANGED)
    (project.root / "raw.csv").write_text("another\n")
    assert dvc_graph.explain_stale() == {"first": ["raw.csv modified"]}
