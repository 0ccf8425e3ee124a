"""Start stages in processes forked from one that has imported torch and transformers: 0.3 s each instead of seconds.

    aerie run ── starts ──> fork server: imports PRELOADED once, then waits at a Unix socket
      └─ DVC ── python -m stages.benchmark ... ──> client: sends its words, environment, folder and open files
                                                      └──> the server forks; the fork runs the stage, the client waits

Of a bare `dvc repro` the first stage that is more than a moment's work starts the server, which ends with that DVC. The command
lines of dvc.yaml are unchanged: where no server listens, or not yet, they run where they are started. Only packages of others
are preloaded, never a module of aerie, so a fork runs the code that lies in its folder, as a new process does.

A stage has a process group of its own. A signal to the client goes to the whole group; the end of the client ends it, and so
does the end of the run or the DVC that owns the server.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ADDRESS_VARIABLE = "AERIE_FORK_SERVER"
# the address in a fork, for the ranks that its stage starts, and for them only
RANKS_VARIABLE = "AERIE_RANKS_FORK_SERVER"
# What most stages import. Not polars: it starts threads, which a fork does not have.
PRELOADED = (
    "torch", "transformers.modeling_utils", "transformers.models.qwen3.modeling_qwen3",
    "pydantic.json_schema", "ruamel.yaml",
)  # fmt: skip
DVC_VARIABLE = "AERIE_DVC"  # the process id of the bare DVC that a fork's stage is of
NOTE = Path(".scratch/fork_server")  # of a bare DVC: its process id, and the address of its server
BRIEF = {"inputs", "report", "prepare_prompts"}  # stages that import no torch: alone stale, they start no server
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STANDARD_FILES = (0, 1, 2)
LENGTH = struct.Struct("!I")  # of a request, before it


@dataclass(frozen=True)
class StageRequest:
    """A command line `python -m MODULE WORDS`, and where it runs."""

    module: str
    words: list[str]
    folder: str
    environment: dict[str, str]


# The client


def run_forked() -> None:
    """Run the stage of this process's command line in a fork and exit with its status.

    Return without doing anything where this process is no `python -m stages.NAME`, or no server listens.
    """
    is_stage = sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith("stages.")
    if is_stage and sys.orig_argv[2] != __name__ and (address := _find_server()):
        run_module_forked(address, sys.orig_argv[2], sys.orig_argv[3:])


def _find_server() -> str | None:
    """Return the address of the server of the run, or of the DVC, that this process belongs to."""
    if address := os.environ.pop(ADDRESS_VARIABLE, None):
        return address
    owner, address = read_note()
    if owner not in _list_ancestors():
        return None
    os.environ[DVC_VARIABLE] = str(owner)
    return address


def read_note() -> tuple[int, str | None]:
    """Return the process that owns the noted server, and the server's address; (0, None) without a note."""
    try:
        owner, address = NOTE.read_text(encoding="utf-8").split("\n")
        return int(owner), address
    except (OSError, ValueError):
        return 0, None


def _list_ancestors() -> Iterator[int]:
    process = os.getppid()  # not by psutil, which each client would import
    while process > 1:
        yield process
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def run_module_forked(address: str, module: str, words: list[str]) -> None:
    """Run `python -m MODULE WORDS` in a fork of the server at `address` and exit with its status.

    Return without doing anything where no server listens.
    """
    request = StageRequest(module, words, str(Path.cwd()), os.environ | {RANKS_VARIABLE: address})
    message = json.dumps(asdict(request)).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        return
    socket.send_fds(connection, [LENGTH.pack(len(message))], STANDARD_FILES)
    connection.sendall(message)
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
    status = connection.recv(1)  # Python takes it up again after a signal
    if not status:
        print("aerie: the fork server ended before the stage; run again", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status[0] if status else 1)


# The server


def start_server(address: str, owner: int, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """Start a server at an address in a folder of its own; it ends with the process `owner`, and removes the folder."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, address, str(owner)],
        # torch counts GPUs at import through NVML, since a process that has initialised CUDA cannot be forked.
        env={**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a stage that cannot import torch says so itself
        start_new_session=True,
    )


def start_for_dvc(stage: str, owner: int) -> None:
    """Start the server of a bare DVC, process `owner`, for the stages after this one; unless it has one, or needs none."""
    if stage.partition("@")[0] in BRIEF or read_note()[0] == owner or not hasattr(os, "pidfd_open"):
        return
    address = str(Path(tempfile.mkdtemp(prefix="aerie-")) / "fork_server")  # readable by this user only
    NOTE.parent.mkdir(exist_ok=True)
    NOTE.write_text(f"{owner}\n{address}", encoding="utf-8")
    start_server(address, owner)


def serve(listener: socket.socket, owner: int) -> StageRequest:
    """Fork for each client -> in a fork the client's request. The server itself exits when the process `owner` ends."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(owner, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}  # by the process id of their stage
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                if request := _fork_stage(listener.accept()[0], selector, clients):
                    return request
            elif key.data is None:  # the owner has ended; stages are left only where it was killed
                for stage in clients:
                    os.killpg(stage, signal.SIGKILL)
                with suppress(OSError):
                    Path(listener.getsockname()).unlink()
                    Path(listener.getsockname()).parent.rmdir()
                os._exit(0)
            elif key.data in clients:  # else the stage's end was read just before its client's
                if key.fileobj is clients[key.data]:
                    _signal_stage(clients[key.data], key.data, selector)
                else:
                    _report_end(key.data, clients.pop(key.data), key.fd, selector)


def _fork_stage(
    client: socket.socket, selector: selectors.BaseSelector, clients: dict[int, socket.socket]
) -> StageRequest | None:
    """Read a client's request and fork -> the request in the fork, None in the server."""
    length, files, _, _ = socket.recv_fds(client, LENGTH.size, len(STANDARD_FILES))
    message = client.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL) if length else b""
    try:
        request = StageRequest(**json.loads(message))
    except ValueError:  # the client was killed meanwhile
        client.close()
        return None
    with warnings.catch_warnings(action="ignore"):  # of the threads of OpenBLAS, which ends and restarts them at a fork
        stage = os.fork()
    if stage == 0:
        os.setpgid(0, 0)
        selector.close()
        for inherited in (client, *clients.values()):
            inherited.close()
        for number, file in zip(STANDARD_FILES, files, strict=True):
            os.dup2(file, number)
    else:
        os.setpgid(stage, stage)  # in both, since either may be first
        clients[stage] = client
        selector.register(client, selectors.EVENT_READ, stage)
        selector.register(os.pidfd_open(stage), selectors.EVENT_READ, stage)
    for file in files:
        os.close(file)
    return request if stage == 0 else None


def _signal_stage(client: socket.socket, stage: int, selector: selectors.BaseSelector) -> None:
    """Pass a client's signal on to its stage and that one's children; kill them where the client has been killed."""
    received = client.recv(1)
    if not received:
        selector.unregister(client)
    os.killpg(stage, received[0] if received else signal.SIGKILL)


def _report_end(stage: int, client: socket.socket, handle: int, selector: selectors.BaseSelector) -> None:
    """Reap an ended stage and send its exit status to its client."""
    code = os.waitstatus_to_exitcode(os.waitpid(stage, 0)[1])
    selector.unregister(handle)
    os.close(handle)
    if client in selector.get_map():
        selector.unregister(client)
    with client, suppress(OSError):  # of a client that was killed
        client.send(bytes([code if code >= 0 else 128 - code]))  # 128 + the signal that ended it, as a shell says it


def _become(request: StageRequest) -> None:
    """Make this fork what a new process of the request would be, without a module of aerie loaded."""
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # the server's TMPDIR, which what it imported has asked for
    os.chdir(request.folder)
    sys.path[0] = request.folder
    sys.argv = ["-m", *request.words]
    for name in [name for name in sys.modules if name.partition(".")[0] == "stages"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def main() -> None:
    address, owner = sys.argv[1], os.pidfd_open(int(sys.argv[2]))
    gc.disable()  # what is imported stays; looking through it again and again takes a sixth of the time
    for module in PRELOADED:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # or each fork would copy the memory of all modules when it collects garbage and when it ends: 1.5 s
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        request = serve(listener, owner)
    os.close(owner)
    _become(request)
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    # A stage that ended well leaves here; taking the interpreter apart would copy the memory it shares with the server: 0.4 s.
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its forks: wait for threads, call atexit, flush
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
