"""Run the Prefect server, its pages and the flows of prefect.yaml until Ctrl-C, on this machine only.

make ui                    # or aerie ui: http://127.0.0.1:4200; another port: AERIE_PORT=4300 make ui
"""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import httpx
import psutil

from pipeline import password
from pipeline.prefect_server import HOST, list_origins

if TYPE_CHECKING:
    from prefect.runner import Runner

START_TIMEOUT_S = 120.0  # 6 s warm, 12 s cold on two cores; the first start creates a database
END_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 45.0  # from Ctrl-C; Prefect kills a cancelled flow after 30
LOST_FLOW_S = 5.0  # for a flow whose server is gone: it would try to report for minutes, and its guard ends its stages
TAIL_LINES = 30
RUNS_AT_ONCE = 4


def main() -> None:
    for number in _list_end_signals():
        # As an exception, so that everything started below is ended.
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        port = read_port()
        check_port_free(port)
        with run_prefect_server(port) as server:
            serve_flows(port, server)
    except ValueError as error:
        sys.exit(f"aerie: {error}")


def read_port() -> int:
    """Return AERIE_PORT, or 4200. Raises ValueError if it is no port."""
    text = os.environ.get("AERIE_PORT", "4200")
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f"AERIE_PORT is {text!r}; expected a port, 1 to 65535")
    return int(text)


def check_port_free(port: int) -> None:
    """Raise ValueError if something listens on the port: another project's server would take this one's runs."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {HOST} can't be used ({error}): is `make ui` open in another terminal? "
                "Or name another port: AERIE_PORT=4300 make ui"
            ) from None


@contextmanager
def run_prefect_server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Prefect server, put its settings into os.environ and wait until it answers; end it on leaving.

    If it ends before, this process says so and ends too: nothing that Prefect's client then does comes to an end.

    Raises:
        ValueError: with the end of its log, if it does not answer in time.
    """
    home = password.get_prefect_home()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    password.exempt_loopback()
    secret, _ = password.read_or_create_password(home)
    os.environ |= {
        "PREFECT_HOME": str(home),
        password.CLIENT: secret,  # for the runner, its flows and their guards
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",  # without it the pages of another port ask 4200
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "DO_NOT_TRACK": "1",
    }
    # Version 1 of Prefect's pages: links in logs lead to them, log lines name their stage, and they ask nothing of other
    # hosts. Version 2 loads a configuration from amplitude.com even with analytics off.
    os.environ.setdefault("PREFECT_SERVER_UI_V2_ENABLED", "false")
    os.environ.setdefault("PREFECT_RUNNER_POLL_FREQUENCY", "2")  # seconds from Run to running; Prefect's default is 10
    log = home / "server.log"
    print(f"starting the Prefect server on port {port}; its log is {log}", flush=True)
    with log.open("wb") as file:
        # A group of its own, so that Ctrl-C reaches the flow first, which still reports to the server.
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.prefect_server", str(port)],
            stdin=subprocess.PIPE,  # the server ends with this pipe, and so with this process
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {password.SERVER: secret, "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(list_origins(port))},
            start_new_session=True,
        )
    is_leaving = threading.Event()

    def watch() -> None:
        status = process.wait()
        if not is_leaving.is_set():
            _end_at_once(process, f"the Prefect server has ended ({status}), its log is {log}; run `make ui` again")

    try:
        _wait_until_answering(process, log)
        threading.Thread(target=watch, daemon=True).start()
        yield process
    finally:
        is_leaving.set()
        _end_group(process)


def _end_at_once(server: subprocess.Popen[bytes], message: str) -> NoReturn:
    """Say why, end the flows and the server, and this process from whichever thread. A flow's guard ends its stages."""
    print(f"aerie: {message}", file=sys.stderr, flush=True)
    flows = [child for child in psutil.Process().children() if child.pid != server.pid]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for flow in flows:
            with suppress(psutil.NoSuchProcess):
                end(flow)
        _, flows = psutil.wait_procs(flows, LOST_FLOW_S)
    _end_group(server)
    os._exit(1)


def serve_flows(port: int, server: subprocess.Popen[bytes]) -> None:
    """Execute runs started in the pages, by schedules or by `prefect deployment run`, until a signal ends this process."""
    # Only now: Prefect reads its settings from the environment once, when it is imported.
    from prefect.deployments.runner import EntrypointType
    from prefect.runner import Runner
    from prefect.schedules import Cron

    from pipeline import flows
    from pipeline.remote import dispatch

    crash_lost_runs()
    runner = Runner(name="aerie", limit=RUNS_AT_ONCE)  # runs in one workspace wait for each other
    for name, deployment in dispatch.read_deployments().items():
        if name == dispatch.STAGE:
            continue
        # By module path: each run imports the flow again, in this folder.
        runner.add_flow(
            getattr(flows, deployment["entrypoint"].partition(":")[2]),
            name=name,
            description=deployment["description"],
            schedules=[Cron(s["cron"], timezone=s["timezone"], active=s["active"]) for s in deployment["schedules"]],
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
    # By its path: the user's terminal may not have .venv activated.
    prefect = os.path.relpath(Path(sys.executable).with_name("prefect"))
    show = f"cat {shlex.quote(os.path.relpath(password.get_prefect_home() / password.NAME))}"
    print(
        "",
        f"open   http://{HOST}:{port}/login   with the whole line that this shows: {show}",
        "run    build -> Run -> Quick run",
        f'or run PREFECT_API_URL={os.environ["PREFECT_API_URL"]} {password.CLIENT}="$({show})" '
        f"{prefect} deployment run build/build",
        "end    Ctrl-C; a running stage is ended too\n",
        sep="\n",
        flush=True,
    )
    asyncio.run(_run_until_signal(runner, server))


def crash_lost_runs() -> None:
    """Mark runs as crashed that are recorded as running although their process has ended; they could not be cancelled."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Crashed, State

    # A flow that a script of the user's calls has no deployment, and may be alive.
    unfinished = FlowRunFilter.model_validate(
        {"deployment_id": {"is_null_": False}, "state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
    )
    message = "`make ui` or the machine ended under this run; run it again, what finished is cached"
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=unfinished):
            lost: State[None] = Crashed(message=message)
            client.set_flow_run_state(run.id, lost, force=True)


async def _run_until_signal(runner: "Runner", server: subprocess.Popen[bytes]) -> None:
    """Serve until a signal, then cancel runs; a second signal, or CANCEL_TIMEOUT_S, ends all at once.

    Prefect 3.8's own `serve()` kills the flow outright, and its stage lives on.
    """
    signalled = asyncio.Event()

    def begin_end() -> None:
        if signalled.is_set():
            _end_at_once(server, "ended by a second signal")
        signalled.set()
        late = f"the runs were not cancelled in {CANCEL_TIMEOUT_S:.0f} s, and are ended"
        timer = threading.Timer(CANCEL_TIMEOUT_S, _end_at_once, (server, late))
        timer.daemon = True
        timer.start()

    serving = asyncio.create_task(runner.start())
    await asyncio.sleep(0)  # start() installs a SIGTERM handler that does not await stop(); it is replaced here
    for number in _list_end_signals():
        asyncio.get_running_loop().add_signal_handler(number, begin_end)
    waiting = asyncio.create_task(signalled.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if runner.started:
        await runner.astop()  # cancels the flow, which ends its stage and reports to the server
    else:
        serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


def _wait_until_answering(process: subprocess.Popen[bytes], log: Path) -> None:
    # Not /health, which needs no password: the server that answers must be the one started here.
    url = f"{os.environ['PREFECT_API_URL']}/admin/version"
    deadline = time.monotonic() + START_TIMEOUT_S
    headers = password.build_auth_header(os.environ[password.CLIENT])
    with httpx.Client(headers=headers, timeout=2) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if client.get(url).is_success:
                    return
            time.sleep(0.2)
    status = process.returncode
    ended = f"not up in {START_TIMEOUT_S:.0f} s" if status is None else f"ended with {status}"
    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    raise ValueError(f"the Prefect server: {ended}, nothing answers at {url}. The end of {log}:\n  {tail}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number, timeout in ((signal.SIGTERM, END_TIMEOUT_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
            return


def _list_end_signals() -> list[signal.Signals]:
    """Return the signals of Ctrl-C, kill and a closed terminal that are not ignored, as nohup ignores SIGHUP."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


if __name__ == "__main__":
    main()
