"""Stages made by workers: two worker processes, each in a checkout of its own, and one DVC remote that all share."""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from pipeline import flows, password, start_worker
from tests.conftest import has_ended
from tests.pipeline.conftest import IGNORED, Project, give_params
from tests.pipeline.test_flows import Server, wait_for

REPO = Path(__file__).resolve().parents[2]
CELLS = 2
GRAPH = f"""
stages:
  first: {{cmd: cp raw.csv first.csv, deps: [raw.csv], outs: [first.csv]}}
  other: {{cmd: echo another > other.csv, deps: [raw.csv], outs: [other.csv]}}
  cell:
    matrix: {{n: {list(range(1, CELLS + 1))}}}
    cmd: python cells/${{item.n}}.py ${{item.n}}
    deps: [first.csv, "cells/${{item.n}}.py", secret.txt]
    params: [report.title]
    outs: ["results/cells/${{item.n}}.csv"]
  last: {{cmd: cat other.csv results/cells/*.csv > last.csv, deps: [other.csv, results/cells], outs: [last.csv]}}
"""
CELL = """
import os, pathlib, sys, time
n = sys.argv[1]
{before}
pathlib.Path("results/cells").mkdir(parents=True, exist_ok=True)
pathlib.Path("results/cells", n + ".csv").write_text(pathlib.Path("first.csv").read_text() + n + "\\n")
"""
# Waits until all cells have begun, so that no worker takes two of them because another one is slow.
MEETS = f"""
begun = pathlib.Path({{folder!r}})
(begun / n).touch()
until = time.time() + 60
while len(list(begun.iterdir())) < {CELLS} and time.time() < until:
    time.sleep(0.05)
"""
SLEEPS = """
beside = pathlib.Path({printed!r})
if not (beside / "awake").exists():
    (beside / "asleep").write_text(str(os.getpid()))
    time.sleep(600)
"""


class WorkerProject(Server):
    """A server, a project whose cells are sent, a remote, and workers with clones of the project."""

    def __init__(self, root: Path, tables: Path) -> None:
        self.root = root
        project = Project(root / "project")
        (project.root / ".dvc").mkdir(parents=True)
        config = (
            f"[core]\n    analytics = false\n    remote = store\n['remote \"store\"']\n    url = {root / 'store'}\n"
        )
        (project.root / ".dvc/config").write_text(config)
        (project.root / "dvc.yaml").write_text(GRAPH)
        (project.root / "raw.csv").write_text("tree,tau\n")
        (project.root / ".gitignore").write_text(f"{IGNORED}*.csv\n!raw.csv\nsecret.txt\n")
        (project.root / "secret.txt").write_text("a file that no commit has\n")
        give_params(project)
        edit(project, stages={name: {"gpus": 0, "exclusive": False} for name in ("first", "other", "cell", "last")})
        edit(project, runner="workers", remote_stages=["cell"])
        (project.root / "cells").mkdir()
        for n in range(1, CELLS + 1):
            self.write_cell(project, n)
        project.git("init", "-q")
        project.commit()
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(project, str(root / "prefect"), tables)

    def write_cell(self, project: Project, n: int, before: str = "") -> None:
        (project.root / f"cells/{n}.py").write_text(CELL.format(before=before))

    def start_worker(self, name: str) -> None:
        """As `make worker`; heartbeats come often, or a test of their absence would take minutes."""
        clone = self.root / name
        if not clone.exists():
            subprocess.run(["git", "clone", "-q", self.project.root, clone], check=True)
        env = os.environ | {
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_HOME": str(self.root / f"{name}-home"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            password.FILE: str(Path(self.home, password.NAME)),
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "2",
            "PYTHONPATH": str(REPO),
            "DVC_SITE_CACHE_DIR": str(self.root / f"{name}-site"),
            "TMPDIR": str(self.root / f"{name}-tmp"),  # slots of its own, as on another host
        }
        Path(env["TMPDIR"]).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "pipeline.start_worker", "--name", name]
        with (self.root / f"{name}.log").open("ab") as log:
            self.workers[name] = subprocess.Popen(
                [*command, "--limit", "1"], cwd=clone, env=env, stdout=log, stderr=subprocess.STDOUT
            )
        wait_for(lambda: name in self.list_online_workers())

    def ensure_two_workers(self) -> None:
        """Those of them that aren't there yet: a test may be run alone."""
        for name in {"one", "two"} - self.workers.keys():
            self.start_worker(name)

    def list_online_workers(self) -> set[str]:
        found = self.ask("work_pools/aerie-stages/workers/filter", {})
        return {worker["name"] for worker in found if worker["status"] == "ONLINE"}

    def list_sent_runs(self, run: str) -> list[dict[str, Any]]:
        """The runs of workers for that run."""
        run_filter = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
        return self.ask("flow_runs/filter", run_filter)

    def find_sleeping_command(self, run: str) -> psutil.Process:
        """The command of cell 2, which sleeps after `sleeps`."""
        path = self.root / "asleep"
        wait_for(lambda: path.exists() and path.read_text())
        return psutil.Process(int(path.read_text()))

    def find_worker(self, command: psutil.Process) -> str:
        """Return the name of the worker that runs this command, in a folder of its own clone."""
        (name,) = [name for name in self.workers if str(self.root / name) in command.cwd()]
        return name

    def start_sleeping_cell(self) -> None:
        self.ensure_two_workers()
        for name in ("asleep", "awake"):
            (self.root / name).unlink(missing_ok=True)
        self.write_cell(self.project, 2, SLEEPS.format(printed=str(self.root)) + f"# {os.urandom(4).hex()}")

    def flow(self) -> psutil.Process:
        """Return the process of the running flow."""
        (found,) = [p for p in psutil.Process(self.process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
        return found

    def lock(self) -> dict[str, Any]:
        return YAML(typ="safe").load(self.project.root / "dvc.lock")


def edit(project: Project, **keys: object) -> None:
    """Change keys of `schedule` in a project's params.yaml."""
    yaml, text = YAML(), io.StringIO()
    params = yaml.load(project.root / "params.yaml")
    params["schedule"] |= keys
    yaml.dump(params, text)
    (project.root / "params.yaml").write_text(text.getvalue())


def test_a_worker_in_a_shells_background_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: started as a job that ignores SIGINT, it ignored SIGTERM too, which Prefect passes on as SIGINT."""
    found = []
    for name in (password.CLIENT, "PREFECT_WORKER_QUERY_SECONDS", "PREFECT_WORKER_ENABLE_CANCELLATION", "PWD"):
        monkeypatch.setenv(name, "as before")
    monkeypatch.setattr(password, "find_password", lambda: "aerie:secret")
    monkeypatch.setattr(flows, "require_server", lambda: None)
    monkeypatch.setattr(os, "execv", lambda *_: found.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start_worker.main([])
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_DFL]


@pytest.fixture(scope="module")
def worker_project(prefect_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProject]:
    started = WorkerProject(tmp_path_factory.mktemp("wide"), prefect_tables)
    try:
        wait_for(started.up, 600)
        yield started
    finally:
        for process in [*started.workers.values(), started.process]:
            process.terminate()
        for process in [*started.workers.values(), started.process]:
            process.wait(60)


def test_without_a_worker_the_run_says_what_to_start(worker_project: WorkerProject) -> None:
    state = worker_project.ended(worker_project.run())
    assert state["type"] == "FAILED" and "no worker of the pool aerie-stages is online; start one" in state["message"]


def test_cells_of_two_workers_leave_the_lock_file_of_a_run_in_a_row(worker_project: WorkerProject) -> None:
    worker_project.ensure_two_workers()
    serial, started_file = worker_project.root / "serial", worker_project.root / "begun"
    started_file.mkdir()
    for n in range(1, CELLS + 1):
        worker_project.write_cell(worker_project.project, n, MEETS.format(folder=str(started_file)))
        (started_file / str(n)).touch()
    worker_project.project.commit()
    shutil.copytree(worker_project.project.root, serial)
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], cwd=serial, check=True)
    for file in started_file.iterdir():
        file.unlink()
    run = worker_project.run()
    state = worker_project.ended(run)
    assert state["message"] == f"{CELLS + 3} stages: {CELLS + 3} ran", worker_project.messages(run)
    assert worker_project.lock() == YAML(typ="safe").load(serial / "dvc.lock")
    assert (worker_project.project.root / "last.csv").read_bytes() == (serial / "last.csv").read_bytes()
    assert {tuple(sent["tags"]) for sent in worker_project.list_sent_runs(run)} == {("one",), ("two",)}
    assert worker_project.ended(worker_project.run())["message"] == f"{CELLS + 3} stages: {CELLS + 3} unchanged"


def test_a_worker_has_fetched_what_its_cells_need_and_nothing_else(worker_project: WorkerProject) -> None:
    outs = {out["path"]: out["md5"] for stage in worker_project.lock()["stages"].values() for out in stage["outs"]}
    for name in ("one", "two"):
        cache = worker_project.root / name / ".dvc/cache/files/md5"
        has = {path for path, md5 in outs.items() if (cache / md5[:2] / md5[2:]).exists()}
        assert has - {f"results/cells/{n}.csv" for n in range(1, CELLS + 1)} == {"first.csv"}
        assert not list((worker_project.root / name / ".scratch/sent").glob("cell@*/*"))


def test_a_failure_on_a_worker_is_reported_here_and_other_stages_run(worker_project: WorkerProject) -> None:
    worker_project.write_cell(worker_project.project, 1, "time.sleep(1)")
    worker_project.write_cell(worker_project.project, 2, "sys.exit('aerie: out of cheese')")
    run = worker_project.run()
    state = worker_project.ended(run)
    assert state["message"].startswith("cell@2 failed: ") and f"; {CELLS + 3} stages: " in state["message"]
    assert "1 ran" in state["message"] and state["message"].endswith("1 failed, 1 not run")
    printed = wait_for(lambda: [line for line in worker_project.messages(run) if "out of cheese" in line])
    assert any("cell@2, made by " in line for line in printed)
    assert len(worker_project.list_sent_runs(run)) == 2


def test_cancelling_ends_the_stages_on_workers(worker_project: WorkerProject) -> None:
    worker_project.start_sleeping_cell()
    run = worker_project.run()
    command = worker_project.find_sleeping_command(run)
    worker_project.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    assert has_ended(command.pid, 30)
    assert worker_project.ended(run)["type"] == "CANCELLED"
    wait_for(lambda: {sent["state_type"] for sent in worker_project.list_sent_runs(run)} <= {"COMPLETED", "CANCELLED"})


@pytest.mark.long
def test_a_run_killed_outright_leaves_nothing_at_work_on_workers_and_the_next_one_recovers(
    worker_project: WorkerProject,
) -> None:
    worker_project.start_sleeping_cell()
    run = worker_project.run()
    command = worker_project.find_sleeping_command(run)
    worker_project.flow().kill()
    assert has_ended(command.pid, 30)
    assert worker_project.ended(run)["type"] == "CRASHED"
    (worker_project.root / "awake").touch()
    assert worker_project.ended(worker_project.run())["type"] == "COMPLETED"


@pytest.mark.long
def test_a_worker_killed_outright_leaves_no_stage_and_another_makes_it(worker_project: WorkerProject) -> None:
    """The run that a killed worker had begun lived on, and the stage with it."""
    worker_project.start_sleeping_cell()
    run = worker_project.run()
    command = worker_project.find_sleeping_command(run)
    name = worker_project.find_worker(command)
    (worker_project.root / "awake").touch()
    worker_project.workers[name].kill()
    assert has_ended(command.pid, 30)
    state = worker_project.ended(run)
    assert state["type"] == "COMPLETED", worker_project.messages(run)
    assert [line for line in worker_project.messages(run) if "that may pass: attempt 2 of 3" in line]
    worker_project.workers.pop(name).wait()
    worker_project.start_worker(name)


@pytest.mark.long
def test_a_lost_host_is_detected_and_another_runs_its_stage(worker_project: WorkerProject) -> None:
    """Nothing was left there to say so: the run of the lost worker says it runs for ever."""
    worker_project.start_sleeping_cell()
    run = worker_project.run()
    command = worker_project.find_sleeping_command(run)
    name = worker_project.find_worker(command)
    (worker_project.root / "awake").touch()
    started_in = str(worker_project.root / name)
    lost = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("PWD") == started_in]
    for process in lost:
        process.send_signal(signal.SIGSTOP)  # none may see another end, as when a machine goes down
    for process in lost:
        process.kill()
    assert worker_project.ended(run)["type"] == "COMPLETED", worker_project.messages(run)
    assert [line for line in worker_project.messages(run) if f"nothing is heard of {name}" in line]
    worker_project.workers.pop(name).wait()
