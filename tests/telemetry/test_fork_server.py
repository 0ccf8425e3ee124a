"""The fork server: a stage behaves as where it is started, and ends with its client."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline import processes
from stages.telemetry import fork_server

ROOT = Path(__file__).parents[2]
# As the real server, but for what it preloads; it marks its forks by a module of others that only it has loaded.
SERVER = """
import tempfile
from stages.telemetry import fork_server
fork_server.PRELOADED = ("sndhdr_of_no_stage",)
tempfile.gettempdir()  # torch's import asks for it
fork_server.main()
"""
STAGES = {
    "describe": """
        import os, sys
        from stages import own
        print(sys.argv[1:], os.getcwd(), os.environ["WORD"], own.TEXT, "AERIE_FORK_SERVER" in os.environ)
        print("forked" if "sndhdr_of_no_stage" in sys.modules else "started", file=sys.stderr)
    """,
    "late": """
        import atexit, threading, time
        atexit.register(lambda: print("at exit"))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("main")
    """,
    "fail": "raise LookupError('of this stage')",
    "refuse": "import sys; sys.exit('aerie: refused')",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "wait": """
        import os, signal, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
        print(os.getpid(), child.pid, flush=True)
        time.sleep(100)
    """,
    "temporary": "import tempfile; print(tempfile.gettempdir())",
    "own": "TEXT = 'first'",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with stages of its own, which start as aerie's do."""
    for file in ("stages/__init__.py", "stages/telemetry/__init__.py", "stages/telemetry/fork_server.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / file, tmp_path / file)
    for name, text in STAGES.items():
        (tmp_path / "stages" / f"{name}.py").write_text(textwrap.dedent(text))
    return tmp_path


@pytest.fixture
def environment(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a server in another folder than the stages' -> the environment of its clients."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "sndhdr_of_no_stage.py").touch()
    address = folder / "socket"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(address), str(os.getpid())],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    wait_for(address.exists)
    yield os.environ | {"WORD": "spoken", fork_server.ADDRESS_VARIABLE: str(address), "PYTHONPATH": ""}
    server.terminate()
    server.wait(30)


def wait_for(true: "processes.Callable[[], bool]") -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def run(project: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def test_a_fork_has_the_words_folder_environment_and_files_of_its_client(
    project: Path, environment: dict[str, str]
) -> None:
    done = run(project, environment, "stages.describe", "a b", "c")
    assert done.stdout == f"['a b', 'c'] {project} spoken first False\n"
    assert (done.stderr, done.returncode) == ("forked\n", 0)


def test_a_fork_runs_the_code_that_lies_there_now(project: Path, environment: dict[str, str]) -> None:
    run(project, environment, "stages.describe")
    (project / "stages/own.py").write_text("TEXT = 'edited'  # another size, or byte code of this second stays valid")
    assert " edited " in run(project, environment, "stages.describe").stdout


def test_threads_and_exit_functions_of_a_stage_run_to_their_end(project: Path, environment: dict[str, str]) -> None:
    done = run(project, environment, "stages.late")
    assert (done.stdout, done.returncode) == ("main\nthread\nat exit\n", 0)


@pytest.mark.parametrize("served", [True, False])
def test_the_end_of_a_stage_is_the_same_in_a_fork(project: Path, environment: dict[str, str], served: bool) -> None:
    if not served:
        environment = environment | {fork_server.ADDRESS_VARIABLE: "/nowhere"}
    described = run(project, environment, "stages.describe")
    assert described.stderr == ("forked\n" if served else "started\n")
    failed, refused = run(project, environment, "stages.fail"), run(project, environment, "stages.refuse")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "LookupError: of this stage")
    assert (refused.returncode, refused.stderr) == (1, "aerie: refused\n")
    killed = run(project, environment, "stages.killed").returncode
    assert killed == (128 + signal.SIGKILL if served else -signal.SIGKILL)  # a shell makes 137 of both


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stage_and_its_children_end_with_the_client(
    project: Path, environment: dict[str, str], number: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-m", "stages.wait"]
    client = subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True)
    assert client.stdout
    forked = [psutil.Process(int(word)) for word in client.stdout.readline().split()]
    assert client.pid not in [process.pid for process in forked]
    client.send_signal(number)
    assert client.wait(30) == status
    wait_for(lambda: not any(processes._is_alive(process) for process in forked))
    assert run(project, environment, "stages.describe").stderr == "forked\n"  # the server goes on


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise(
    project: Path, environment: dict[str, str], given: dict[str, str], spins: str | None
) -> None:
    """Bug: two threads that spin while they wait made training eight times slower beside other work."""
    (project / "stages/spins.py").write_text("import os; print(os.environ.get('GOMP_SPINCOUNT'))")
    clean = {name: value for name, value in environment.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    assert run(project, clean | given, "stages.spins").stdout == f"{spins}\n"


BARE_DVC = """
import os, subprocess, sys, time
from pathlib import Path
from stages.telemetry import fork_server
fork_server.start_for_dvc("report", os.getpid())
assert not fork_server.NOTE.exists()
fork_server.start_for_dvc("fix_data", os.getpid())
_, address = fork_server.read_note()
while not Path(address).exists():
    time.sleep(0.01)
print(address, flush=True)
subprocess.run([sys.executable, "-m", "stages.describe"], stderr=sys.stdout)
subprocess.run([sys.executable, "-m", "stages.wait"])
"""


def test_a_bare_dvc_has_a_server_that_ends_with_it(project: Path) -> None:
    """Killed, it leaves neither the server nor the stage that is at work; another DVC's stages do not ask its server."""
    code = project / "stages/telemetry/fork_server.py"
    text = code.read_text()
    begin = text.index("PRELOADED = (")
    code.write_text(f'{text[:begin]}PRELOADED = ("sndhdr_of_no_stage",){text[text.index(")", begin) + 1 :]}')
    (project / "sndhdr_of_no_stage.py").touch()
    environment = os.environ | {"WORD": "spoken", "PYTHONPATH": "", "TMPDIR": str(project)}
    environment.pop(fork_server.ADDRESS_VARIABLE, None)
    dvc = subprocess.Popen(
        [sys.executable, "-c", BARE_DVC], cwd=project, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert dvc.stdout
    address, described, forked = (dvc.stdout.readline().strip() for _ in range(3))
    assert (described.split()[-1], forked) == ("False", "forked")
    stage, child = (psutil.Process(int(word)) for word in dvc.stdout.readline().split())
    assert run(project, environment, "stages.describe").stderr == "started\n"
    dvc.kill()
    dvc.wait()
    wait_for(lambda: not any(processes._is_alive(process) for process in (stage, child)))
    wait_for(lambda: not Path(address).parent.exists())


def test_a_run_starts_a_server_that_has_torch_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with processes.preload_stages():
        address = Path(os.environ[fork_server.ADDRESS_VARIABLE])
        wait_for(address.exists)
        (server,) = [child for child in psutil.Process().children() if str(address) in child.cmdline()]
        assert any("libtorch" in mapped.path for mapped in server.memory_maps())
        assert address.parent.stat().st_mode & 0o077 == 0
    assert not processes._is_alive(server)
    assert fork_server.ADDRESS_VARIABLE not in os.environ and not address.parent.exists()
