"""The flows on a real Prefect server, started as by `make ui`: the content of its pages, read through its API."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import password, processes, serve
from stages.runtime import free_port
from tests.conftest import has_ended
from tests.pipeline.conftest import make_served

REPO = Path(__file__).resolve().parents[2]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


# Of a server on a copy of a database, which is neither brought up to date, nor given the types of Prefect's blocks.
READY = {"PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false", "PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}


def wait_for(what: Callable[[], Any], seconds: float = 300.0) -> Any:
    """The first true thing `what` gives. It asks less and less often: each question costs the server CPU time."""
    deadline, pause = time.monotonic() + seconds, 0.1
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(pause)
        pause = min(1.2 * pause, 0.5)
    raise AssertionError(f"still not so after {seconds} s")


class Server:
    """`python -m pipeline.serve` in a toy project, and its API."""

    def __init__(self, project: Any, home: str, tables: Path | None = None) -> None:
        """Without the database `tables` (prefect_tables) the server makes its own."""
        self.project = project
        self.home = home
        self.settings: dict[str, str] = {}
        if tables:
            Path(home).mkdir(mode=0o700, exist_ok=True)
            shutil.copy(tables, home)
            self.settings = READY
        self.port = free_port.find_free_port()
        self.log = project.root / "serve.log"
        self.start()

    def start(self) -> None:
        home = self.home
        settings = {"AERIE_PORT": str(self.port), "PREFECT_HOME": home, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
        settings |= self.settings
        # As on a company's machine. Bug: the proxy was asked for 127.0.0.1, and no run began.
        settings |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
        settings["TMPDIR"] = home  # slots of its own, or a run beside these tests would share them
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.serve"],
                cwd=self.project.root,
                env=os.environ | settings | {"PYTHONPATH": str(REPO), "DVC_SITE_CACHE_DIR": f"{home}/site"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "end    Ctrl-C" in self.log.read_text()

    @property
    def password(self) -> str:
        """As a user finds it."""
        return password.read_password(Path(self.home, password.NAME))

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **password.build_auth_header(self.password)}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/{path}", data, headers)
        answers = 0
        while True:
            try:
                with DIRECT.open(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                answers += 1
                if error.code != 503 or answers == 10:  # 503: its database is busy; Prefect's own clients ask again
                    raise
                time.sleep(1)

    def run(self, name: str = "build/build", **parameters: object) -> str:
        deployment = self.ask(f"deployments/name/{name}")["id"]
        return self.ask(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]

    def ended(self, run: str) -> dict[str, Any]:
        """The final state of a run."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
        return wait_for(lambda: (state := self.ask(f"flow_runs/{run}")["state"])["type"] in ends and state)

    def tasks(self, run: str) -> dict[str, dict[str, Any]]:
        """The three task runs by name; they reach the database a moment after the run ends."""
        ask = {"flow_runs": {"id": {"any_": [run]}}}
        settled = ("COMPLETED", "FAILED", "CRASHED", "PENDING")

        def found() -> dict[str, dict[str, Any]] | None:
            tasks = {task["name"]: task for task in self.ask("task_runs/filter", ask)}
            return tasks if len(tasks) == 3 and all(t["state_type"] in settled for t in tasks.values()) else None

        return wait_for(found)

    def outcomes(self, run: str) -> dict[str, str]:
        return {name: task["state_name"] for name, task in self.tasks(run).items()}

    def artifacts(self, run: str) -> dict[str, dict[str, Any]]:
        found = self.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return {artifact["key"]: artifact for artifact in found}

    def messages(self, run: str) -> list[str]:
        found = self.ask("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})
        return [log["message"] for log in found]

    def find_sleeping_command(self, run: str) -> psutil.Process:
        """Return the command that printed `asleep`, as soon as the server has its line."""
        printed = wait_for(lambda: [line for line in self.messages(run) if line.startswith("asleep")])
        return psutil.Process(int(printed[0].split()[1]))


@contextmanager
def run_server(project: Any, home: Path, tables: Path | None = None) -> Iterator[Server]:
    """Serve a project until the end of the block; its Prefect home is the folder `home`."""
    started = Server(project, str(home), tables)
    try:
        wait_for(started.up, 600)
        yield started
    finally:
        started.process.terminate()
        started.process.wait(60)


@pytest.fixture(scope="session")
def server(served_project: Any, prefect_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with run_server(served_project, tmp_path_factory.mktemp("prefect"), prefect_tables) as started:
        yield started


@pytest.mark.long
def test_a_first_start_makes_its_own_database(tmp_path: Path) -> None:
    with run_server(make_served(tmp_path), tmp_path / "prefect") as started:
        assert started.ended(started.run())["type"] == "COMPLETED"


def test_a_run_shows_the_graph_the_outcomes_and_the_table(server: Server) -> None:
    run = server.run()
    assert server.ended(run)["message"] == "3 stages: 3 ran"
    assert server.ask(f"flow_runs/{run}")["name"] == "build: first, middle, last"
    tasks = server.tasks(run)
    assert {name: task["state_name"] for name, task in tasks.items()} == dict.fromkeys(
        ["first", "middle", "last"], "Ran"
    )
    edges = {name: [upstream["id"] for upstream in task["task_inputs"]["wait_for"]] for name, task in tasks.items()
             if "wait_for" in task["task_inputs"]}  # fmt: skip
    assert edges == {"middle": [tasks["first"]["id"]], "last": [tasks["middle"]["id"]]}
    artifacts = server.artifacts(run)
    assert json.loads(artifacts["benchmark"]["data"]) == [{"tree": "t5_1_6", "tau": "2.512"}]
    assert "| middle | ran |" in artifacts["outcomes"]["data"]
    wait_for(lambda: "this is middle" in server.messages(run))


def test_after_a_failure_nothing_downstream_runs_and_the_rest_stays(server: Server) -> None:
    server.project.write_stage(
        "middle", "from tqdm import tqdm\nfor _ in tqdm(range(3)): pass\nsys.exit('aerie: out of cheese')"
    )
    run = server.run()
    state = server.ended(run)
    assert (state["type"], state["message"]) == (
        "FAILED",
        "middle failed: out of cheese; 3 stages: 1 unchanged, 1 failed, 1 not run",
    )
    assert server.outcomes(run) == {"first": "Unchanged", "middle": "Failed", "last": "NotReady"}
    assert {name: task["state"]["message"] for name, task in server.tasks(run).items() if name != "first"} == {
        "middle": "out of cheese",
        "last": "not run: middle failed",
    }
    log = wait_for(lambda: (printed := server.messages(run)) and state["message"] in printed and printed)
    # Bug: a state's representation with escaped line ends, twice, `NoneType: None`, and every line of a bar.
    whole = "\n".join(log)
    assert (
        "aerie: out of cheese" in log and whole.count("out of cheese") == 2
    )  # the stage's own line, and the run's last
    assert not [noise for noise in ("Traceback", "NoneType", "\\n", "%|", "Failed(") if noise in whole]
    why = json.loads(server.artifacts(run)["plan"]["data"])
    assert why == [{"stage": "middle", "because": "middle.py modified"}]
    assert "| middle | failed | middle.py modified |" in server.artifacts(run)["outcomes"]["data"]
    assert set(server.artifacts(run)) == {
        "outcomes",
        "plan",
        "progress-middle",
    }  # the bar; the table on disk is from before the failure
    server.project.write_stage("middle")
    run = server.run()
    assert server.ended(run)["type"] == "COMPLETED"
    assert server.outcomes(run) == {"first": "Unchanged", "middle": "Restored", "last": "Unchanged"}


def test_cancelling_in_the_pages_ends_the_stage(server: Server) -> None:
    server.project.write_sleeping_stage("middle")
    run = server.run()
    command = server.find_sleeping_command(run)
    server.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    assert server.ended(run)["type"] == "CANCELLED"
    assert has_ended(command.pid)
    assert "first" in server.project.locked()


def test_changed_parameters_run_in_a_workspace_of_their_own_until_promoted(server: Server) -> None:
    root = server.project.root
    server.project.write_stage("middle")
    assert server.ended(server.run())["type"] == "COMPLETED"
    server.project.commit()
    before = [(root / name).read_text() for name in ("params.yaml", "dvc.lock")]
    run = server.run(changes={"other": {"report.title": "another"}})
    assert server.ended(run)["type"] == "COMPLETED"
    assert server.outcomes(run) == {"first": "Unchanged", "middle": "Unchanged", "last": "Ran"}
    assert "| last | ran | params.yaml: report.title modified |" in server.artifacts(run)["outcomes"]["data"]
    assert before == [(root / name).read_text() for name in ("params.yaml", "dvc.lock")]
    (workspace,) = [found.name for found in (root / ".scratch/runs").iterdir()]
    assert wait_for(lambda: [line for line in server.messages(run) if f"aerie promote {workspace}" in line])

    def pipeline(*words: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(REPO), "DVC_SITE_CACHE_DIR": f"{server.home}/site"}
        command = [sys.executable, "-m", "pipeline", *words]
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)

    server.project.write_stage("middle", "# edited")
    assert "commit or stash them:\n   M middle.py" in pipeline("promote", workspace).stderr
    server.project.write_stage("middle")
    done = pipeline("promote", workspace)
    assert done.returncode == 0, done.stderr
    assert "title: another" in (root / "params.yaml").read_text()
    assert server.ended(server.run())["message"] == "3 stages: 3 unchanged"
    assert pipeline("drop", workspace).returncode == 0 and not (root / ".scratch/runs" / workspace).exists()
    assert "there is no run" in pipeline("drop", workspace).stderr


def test_a_flow_killed_outright_leaves_no_stage(server: Server) -> None:
    """Bug: nothing ended its stage, which worked on beside the next run."""
    server.project.commit()
    server.project.write_sleeping_stage("middle")
    command = server.find_sleeping_command(server.run())
    flow = command.parents()[1]  # its parent is DVC
    while processes.DVC_MODULE in flow.cmdline():
        flow = flow.parent()
    flow.kill()
    assert has_ended(command.pid, 30)
    server.project.write_stage("middle")
    run = server.run()
    assert server.ended(run)["type"] == "COMPLETED"
    assert set(server.outcomes(run).values()) <= {"Unchanged", "Restored"}


def test_a_make_ui_killed_outright_leaves_no_stage_and_the_next_one_starts(server: Server) -> None:
    """The stage used to work on, beside the next run, and the server held the port.

    And a run that could not report its end was recorded as running for ever; cancelling it did nothing.
    """
    server.project.write_sleeping_stage("middle")
    run = server.run()
    command = server.find_sleeping_command(run)
    server.process.kill()
    server.process.wait()
    assert has_ended(command.pid, 120)
    server.start()
    wait_for(server.up, 600)
    assert server.ended(run)["type"] == "CRASHED"


def test_a_make_ui_whose_server_dies_under_a_run_says_so_and_ends(server: Server) -> None:
    """Bug: it went on with Prefect's tracebacks, the run started no further stage, and Ctrl-C did not end it."""
    server.project.write_sleeping_stage("middle")
    command = server.find_sleeping_command(server.run())
    children = psutil.Process(server.process.pid).children()
    (died,) = [child for child in children if "pipeline.prefect_server" in child.cmdline()]
    died.kill()
    assert server.process.wait(120) == 1
    said = [line for line in server.log.read_text().splitlines() if line.startswith("aerie:")]
    assert len(said) == 1 and "the Prefect server has ended (-9), its log is " in said[0]
    assert has_ended(command.pid, 120) and all(has_ended(child.pid, 10) for child in children)
    server.project.write_stage("middle")
    server.start()
    wait_for(server.up, 600)


def test_a_worker_without_a_server_is_refused_in_one_line(project: Any, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    env |= {"PYTHONPATH": str(REPO), "PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    env |= {"PREFECT_API_AUTH_STRING": "aerie:word"}
    command = [sys.executable, "-m", "pipeline.start_worker"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "no Prefect server answers at PREFECT_API_URL" in done.stderr and done.stderr.count("\n") == 1


def test_a_port_in_use_is_refused() -> None:
    """Another project's server may listen there, and would take our runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="name another port: AERIE_PORT="):
            serve.check_port_free(taken.getsockname()[1])
