"""pipeline/dvc_graph.py against a real DVC: the order, the three outcomes, a failure, and an end that leaves nothing."""

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import dvc_graph, processes
from pipeline.dvc_graph import Outcome
from pipeline.remote import dvc_remote
from stages.params import schema
from stages.params.benchmark_sections import BenchmarkServed
from tests.conftest import ROOT, has_ended
from tests.pipeline.conftest import Project, run_dvc_cli


def run_all() -> dict[str, Outcome]:
    return {name: dvc_graph.reproduce_stage(name, lambda line: None) for name in dvc_graph.list_stages()}


class StageThread:
    """A stage at work on another thread, as Prefect may run it; its log, and how it ended."""

    def __init__(self, stage: str) -> None:
        self.lines: list[str] = []
        self.problem: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(stage,))
        self.thread.start()

    def _run(self, stage: str) -> None:
        try:
            dvc_graph.reproduce_stage(stage, self.lines.append)
        except BaseException as problem:
            self.problem = problem

    def find_sleeping_command(self) -> psutil.Process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if printed := [line for line in self.lines if line.startswith("asleep")]:
                return psutil.Process(int(printed[0].split()[1]))
            time.sleep(0.02)
        raise AssertionError(f"the stage never slept: {self.lines}")


def test_stages_made_from_lists_are_there_and_a_data_file_under_dvc_runs_too(project):
    (project.root / "params.yaml").write_text("trees: [t5_1_6, t5_2_8]\n")
    (project.root / "dvc.yaml").write_text(
        "stages:\n  cell:\n    matrix: {tree: '${trees}'}\n    cmd: echo ${item.tree}\n    deps: [raw.csv]\n"
    )
    (project.root / "raw.csv.dvc").write_text(f"outs:\n- md5: {'a' * 32}\n  hash: md5\n  path: raw.csv\n")
    needs = dvc_graph.list_stages()
    assert needs == {"raw.csv.dvc": [], "cell@t5_1_6": ["raw.csv.dvc"], "cell@t5_2_8": ["raw.csv.dvc"]}
    assert [dvc_graph.reproduce_stage("raw.csv.dvc", print) for _ in range(2)] == [Outcome.RAN, Outcome.UNCHANGED]
    assert dvc_graph.reproduce_stage("cell@t5_2_8", print) == Outcome.RAN


def test_a_stage_runs_then_stays_then_comes_back_from_the_cache(project):
    def run_first() -> Outcome:
        return dvc_graph.reproduce_stage("first", lambda line: None)

    assert [run_first(), run_first()] == [Outcome.RAN, Outcome.UNCHANGED]
    raw = project.root / "raw.csv"
    before = raw.read_text()
    raw.write_text("tree,tau\nt5_1_6,2.6\n")
    assert run_first() == Outcome.RAN
    raw.write_text("tree,tau\nt5_1_6,2.7\n")
    assert dvc_graph.explain_stale()["first"] == ["raw.csv modified"]
    raw.write_text(before)
    assert dvc_graph.explain_stale()["first"] == ["raw.csv modified"]
    assert run_first() == Outcome.RESTORED
    assert (project.root / "first.csv").read_text() == before


def test_after_a_failure_stages_that_do_not_need_it_still_run(project, capfd):
    project.write_stage("first", "sys.exit('out of cheese')")
    other = "  other:\n    cmd: cp raw.csv other.csv\n    deps: [raw.csv]\n    outs: [other.csv]\n"
    (project.root / "dvc.yaml").write_text((project.root / "dvc.yaml").read_text() + other)
    with pytest.raises(processes.StageError, match="first failed, see above"):
        dvc_graph.run_all_stages(dvc_graph.list_stages())
    printed = "".join(capfd.readouterr())
    assert re.search(r"^first +failed after", printed, re.MULTILINE)
    assert re.search(r"^other +\d+\.\d s$", printed, re.MULTILINE)
    assert "failed to reproduce 'first'" in printed and "out of cheese" in printed and "will be skipped" in printed
    assert project.locked() == {"other"} and set(dvc_graph.explain_stale()) == {"first", "middle", "last"}


def test_stages_of_a_group_run_side_by_side_and_a_failure_stops_only_what_is_below(project, capfd):
    """Each cell waits until the other is at work, as their servers start together; one fails."""
    meet = """import pathlib, sys, time
mine, other = sys.argv[1:3]
pathlib.Path(mine + '.here').touch()
ends = time.monotonic() + 60
while not pathlib.Path(other + '.here').exists():
    assert time.monotonic() < ends, 'alone'
    time.sleep(0.05)
sys.exit('no engine') if mine == 'two' else pathlib.Path(mine + '.csv').touch()
"""
    (project.root / "meet.py").write_text(meet)
    more = "".join(
        f"  {name}:\n    cmd: python meet.py {name} {other}\n    deps: [first.csv]\n    outs: [{name}.csv]\n"
        for name, other in (("one", "two"), ("two", "one"))
    )
    for name in ("one", "two"):
        more += (
            f"  of_{name}:\n    cmd: cp {name}.csv of_{name}.csv\n    deps: [{name}.csv]\n    outs: [of_{name}.csv]\n"
        )
    (project.root / "dvc.yaml").write_text((project.root / "dvc.yaml").read_text() + more)
    with pytest.raises(processes.StageError, match=r"^two failed, see above and logs/two\.log; "):
        dvc_graph.run_all_stages(dvc_graph.list_stages(), groups=[["one", "two"]])
    printed = "".join(capfd.readouterr())
    assert re.search(r"^one +\d+\.\d s$", printed, re.MULTILINE) and printed.count("failed after") == 1
    assert project.locked() == {"first", "middle", "last", "one", "of_one"}
    assert "no engine" in Path("logs/two.log").read_text()


def test_served_cells_whose_servers_fit_on_a_gpu_are_grouped():
    sized = {"mem_fraction": 0.3, "max_total_tokens": 40_000}
    cells = [f"benchmark_served{name}" for name in ("_baseline@sglang-eval", "@sglang-eval-e009-t5_1_6")]
    cells += ["benchmark_served@vllm-eval-e009-t5_1_6", "report", "benchmark_served@sglang-eval-e009-t8_2_16"]
    of_sglang = [[*cells[:2], cells[-1]]]

    def group(device: str = "cuda", **edits: Any) -> list[list[str]]:
        served = {"engines": ["sglang", "vllm"], "servers": {"sglang": sized | edits}, "interleave": False}
        params = schema.load_params(ROOT / "params.yaml")
        target = params.target.model_copy(update={"device": device})
        section = BenchmarkServed.model_validate(params.benchmark_served.model_dump() | served)
        changed = params.model_copy(update={"target": target, "benchmark_served": section})
        return changed.group_served_cells(cells)

    assert group() == of_sglang
    assert group(mem_fraction=0.5) == [cells[:2], cells[-1:]]
    assert group("cpu") == group(max_total_tokens=None) == group(mem_fraction=0.6) == []


@pytest.mark.parametrize("first", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["polite", "stubborn"])
def test_end_children_ends_the_command_and_dvc_leaves_a_valid_lock(project, monkeypatch, first):
    monkeypatch.setattr(processes, "COMMAND_GRACE_S", 0.5)
    dvc_graph.reproduce_stage("first", print)
    project.write_sleeping_stage("middle", first)
    watched = StageThread("middle")
    command = watched.find_sleeping_command()
    started = time.monotonic()
    processes.end_children()
    assert time.monotonic() - started < 60  # the command would sleep for ten minutes
    watched.thread.join(60)
    assert has_ended(command.pid)
    assert "stage middle failed" in str(watched.problem)
    assert project.locked() == {"first"}
    project.write_stage("middle")
    assert run_all()["middle"] == Outcome.RAN
    processes.end_children()  # nothing to end, nothing to say


# `dvc repro` typed by hand, which stops between emptying dvc.lock and writing it until a line comes in.
BARE_REPRO = """
import sys
from dvc.cli import main
from dvc.utils.serialize import _common
dump = _common._dump_data
def pause(path, *words, **keys):
    open(path, "w").close()
    print("emptied", flush=True)
    sys.stdin.readline()
    dump(path, *words, **keys)
_common._dump_data = pause
sys.exit(main(["repro", "-q", "first"]))
"""
READERS = {
    "explain_stale": lambda: "first" not in dvc_graph.explain_stale(),
    "collect_stage": lambda: dvc_remote.collect_stage("first") is None,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_lock_file_that_dvc_is_writing_is_read_whole(finished_run, tmp_path: Path, reader: str) -> None:
    """Bug: DVC empties dvc.lock and then writes it; read meanwhile, two workers' cells failed."""
    run_dvc_cli("remote", "add", "-d", "store", str(tmp_path / "store"))
    finished_run.git("init", "-q")
    (finished_run.root / "raw.csv").write_text("tree,tau\nt5_1_6,2.6\n")
    command = [sys.executable, "-c", BARE_REPRO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bare:
        assert bare.stdin and bare.stdout
        while "emptied" not in (line := bare.stdout.readline()):
            assert line, "dvc repro wrote nothing"
        release = threading.Timer(1.5, lambda: (bare.stdin.write("\n"), bare.stdin.flush()))
        release.start()
        try:
            assert READERS[reader]()
        finally:
            release.join()
    assert bare.returncode == 0 and finished_run.locked() == {"first", "middle", "last"}
    assert dvc_graph.explain_stale(["first"]) == {}


def test_our_dvc_replaces_the_lock_file_whole(project: Project) -> None:
    """Bug: a kill between the two left it empty, and a reader without DVC's lock found it so."""
    dvc_graph.reproduce_stage("first", print)
    lock = project.root / "dvc.lock"
    lock.chmod(0o640)
    with lock.open() as before:
        dvc_graph.reproduce_stage("middle", print)
        assert "middle" not in before.read()  # the old file, whole, is still what a reader has open
    assert project.locked() == {"first", "middle"} and lock.stat().st_mode & 0o777 == 0o640


def test_a_stopped_run_starts_nothing_more(project, monkeypatch):
    """A thread whose stage came to its turn, or waited for another attempt, began it after the cancellation."""
    monkeypatch.setattr(processes, "_stopped", threading.Event())
    assert processes.wait_before_retry(0)
    processes.stop_stages()
    assert not processes.wait_before_retry(600)
    with pytest.raises(processes.StageError, match="the run is cancelled"):
        dvc_graph.reproduce_stage("first", print)
    assert not (project.root / "first.csv").exists()


def test_pull_fetches_the_outputs_of_others_below_a_folder_that_a_stage_reads(project):
    """`dvc repro --pull` of a stage that reads such a folder ended with: 'cells' does not exist as an output or a stage."""
    (project.root / "dvc.yaml").write_text(
        "stages:\n"
        "  cell:\n    matrix: {n: [1, 2]}\n    cmd: cp raw.csv cells/${item.n}.csv\n    deps: [raw.csv]\n"
        "    outs: ['cells/${item.n}.csv']\n"
        "  alone: {cmd: cp raw.csv alone.csv, deps: [raw.csv], outs: [alone.csv]}\n"
        "  report: {cmd: cat cells/1.csv cells/2.csv > report.csv, deps: [cells, last.py], outs: [report.csv]}\n"
    )
    (project.root / "cells").mkdir()
    run_dvc_cli("repro")
    run_dvc_cli("remote", "add", "--default", "shared", str(project.root.parent / "remote"))
    run_dvc_cli("push")
    whole = (project.root / "report.csv").read_text()
    for name in ("cells/1.csv", "cells/2.csv", "alone.csv", "report.csv"):
        (project.root / name).unlink()
    shutil.rmtree(project.root / "cells")
    shutil.rmtree(project.root / ".dvc/cache")
    project.write_stage("last", "# edited, so that report runs")
    assert sorted(dvc_graph.pull_inputs("report")) == ["cells/1.csv", "cells/2.csv"]
    assert not (project.root / "alone.csv").exists() and dvc_graph.pull_inputs("report") == []
    run_dvc_cli("repro", "--pull", "--allow-missing")
    assert (project.root / "report.csv").read_text() == whole and not (project.root / "alone.csv").exists()
