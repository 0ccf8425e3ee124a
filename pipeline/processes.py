"""Start, watch and end the processes that run stages.

A process started here is a DVC (pipeline/checked_dvc.py), which has the command of a stage below it, another module of
`pipeline`, or the process from which stages are forked (stages/telemetry/fork_server.py). A run's processes carry a mark in
their environment, by which the run's guard (pipeline/orphan_guard.py) finds and ends them if the run is killed outright.
"""

import codecs
import os
import queue
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil

from pipeline import password
from pipeline.dvc_output import PROGRESS_PATTERN, find_error, list_error_lines
from stages.telemetry import fork_server

COMMAND_GRACE_S = 5.0  # seconds between SIGTERM and SIGKILL for a stage's command
DVC_GRACE_S = 15.0  # seconds for DVC to write its lock file after that; Prefect kills a cancelled flow after 30
POLL_S = 0.05  # seconds
MAX_SEARCHES = 10  # for what a run has left; a process that the kernel can't end would be found forever
LEFT_OUTPUT_S = 1.0  # seconds to wait for more output of a command before asking whether it has ended
TAIL_LINES = 10  # of a failed stage's log in the error
RUN_MARK_VARIABLE = "AERIE_RUN"  # environment variable of every process that a run has started
DVC_MODULE = "pipeline.checked_dvc"  # in the command line of a DVC process, and of none that it started

# What the end of a log says of a failure that another attempt may fix; everything else fails at once.
TRANSIENT_ERRORS = (
    "ConnectionError", "Connection refused", "Connection reset", "ConnectTimeout", "ReadTimeout", "RemoteDisconnected",
    "ServerDisconnectedError", "TimeoutError", "Temporary failure in name resolution", "Max retries exceeded",
    "server was not ready", "429 Too Many Requests", "502 Bad Gateway", "503 Service", "504 Gateway",
)  # fmt: skip

_live: set[psutil.Popen] = set()
_live_lock = threading.Lock()
_mark: str | None = None
_guard: IO[bytes] | None = None
_stopped = threading.Event()


class StageError(RuntimeError):
    """A failure of a stage or of DVC; the message is for the user and ends with the end of the log. `line` is the error alone."""

    def __init__(self, message: str, transient: bool = False, line: str | None = None) -> None:
        super().__init__(message)
        self.transient = transient
        self.line = line or " ".join(message.split())


def is_transient(log: str) -> bool:
    """Return whether another attempt may succeed after a log that ends like this."""
    return any(text in log for text in TRANSIENT_ERRORS)


# A run's guard


@contextmanager
def guard_run(held_files: Iterable[int] = ()) -> Iterator[None]:
    """Have another process watch this one, and end its stages if this one is killed outright.

    The guard shares the open files `held_files`, so a lock on one is free only after those stages have ended. Runs on
    other hosts are made known to it with `notify_guard`.
    """
    global _mark, _guard
    _mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "pipeline.orphan_guard", _mark]
    pipe = subprocess.PIPE
    # A session of its own, so that signals to this process's group do not reach it; it ends when the pipe closes.
    guard = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=list(held_files), start_new_session=True)
    assert guard.stdin and guard.stdout
    guard.wait()  # it forks and goes on without a parent
    _guard = guard.stdin
    try:
        yield
    finally:
        _guard = None
        guard.stdin.close()
        guard.stdout.read()  # until it has ended and freed the files it shares
        guard.stdout.close()
        _mark = None


@contextmanager
def preload_stages() -> Iterator[None]:
    """Have the stages that this process starts forked from one that has imported torch (stages/telemetry/fork_server.py).

    Does nothing where the current folder has no `stages`, so that no stage is one of ours. Until it is done, beside what a
    run does before and the first stages, they start as without it. Needs Linux, for process handles.
    """
    if not Path("stages").is_dir() or not hasattr(os, "pidfd_open"):
        yield
        return
    with TemporaryDirectory(prefix="aerie-") as folder:  # readable by this user only
        notify_guard(f"made {folder}")
        address = str(Path(folder) / "fork_server")
        server = fork_server.start_server(address, os.getpid(), _build_environment())
        os.environ[fork_server.ADDRESS_VARIABLE] = address
        try:
            yield
        finally:
            del os.environ[fork_server.ADDRESS_VARIABLE]
            server.terminate()
            server.wait()


def notify_guard(line: str) -> None:
    """Send the run's guard a line on what this run has begun (pipeline/orphan_guard.py); without a guard do nothing."""
    if _guard:
        _guard.write(f"{line}\n".encode())  # short writes to a pipe are atomic, whichever thread writes
        _guard.flush()


def end_marked(mark: str) -> None:
    """End every process that a run of this mark has left, each child-first, all at the same time.

    They are looked for again until none is found: a parent may end by itself, as a fork server does whose run has ended,
    before its children are looked up.
    """
    for _ in range(MAX_SEARCHES):
        processes = psutil.process_iter(["environ", "cmdline", "status"])
        found = {
            one.pid: one
            for one in processes
            if (one.info["environ"] or {}).get(RUN_MARK_VARIABLE) == mark and one.info["status"] != psutil.STATUS_ZOMBIE
        }
        if not found:
            return
        _end_together([process for process in found.values() if _unless_ended(process.ppid) not in found])


# Start and end


def run_command(
    words: list[str],
    on_line: Callable[[str], object],
    environment: dict[str, str] | None = None,
    held_files: Iterable[int] = (),
    on_silence: Callable[[], object] = lambda: None,
) -> int:
    """Run `python -m` with these words to its end -> its exit status.

    Each line of output goes to `on_line`; `on_silence` is called in each second without one. `environment` is added to
    this process's own; the open files `held_files`, and locks on them, stay open until the command has ended.
    """
    process = _start_command(words, environment or {}, held_files)
    try:
        for line in _read_lines(process):
            on_silence() if line is None else on_line(line)
        return process.wait()
    except BaseException:  # cancelled, interrupted, or on_line failed: the stage must not outlive its run
        _end_process(process)
        process.wait()
        raise
    finally:
        with _live_lock:
            _live.discard(process)


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a command's output; a progress bar as soon as it is drawn, for its line ends when the next begins."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    for chunk in chunks:
        *lines, rest = re.split(r"\r\n|\r|\n", rest + decode(chunk))
        if PROGRESS_PATTERN.search(rest):
            lines, rest = [*lines, rest], ""
        yield from map(str.rstrip, lines)
    if rest:
        yield rest.rstrip()


def _read_lines(process: psutil.Popen) -> Iterator[str | None]:
    """Yield the lines of a command's output as they come, until it has ended, and None in each second without one.

    What it has left running is ended then: the stage of a DVC that was killed outright holds the pipe open. A thread
    reads, and goes on after an interruption: a full pipe would block DVC, which then could not end.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in split_lines(iter(partial(process.stdout.read1, 2**16), b"")):
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    has_ended = False
    while True:
        try:
            if (line := lines.get(timeout=LEFT_OUTPUT_S)) is None:
                return
            yield line
        except queue.Empty:
            if has_ended:  # the pipe is open in a process of another session; the run's guard ends it
                return
            yield None
        if not has_ended and process.poll() is not None:
            has_ended = True
            _end_together([one for one in psutil.process_iter() if _get_session(one.pid) == process.pid])


def _get_session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def run_module(words: list[str]) -> list[str]:
    """Run `python -m` with these words -> its lines of output. `stop_stages` ends it like a stage.

    Raises StageError with the end of its output if it fails.
    """
    lines: list[str] = []
    if run_command(words, lines.append):
        log = "\n  ".join(lines[-TAIL_LINES:])
        raise StageError(f"{' '.join(words)}: {log}", is_transient(log), find_error(lines))
    return lines


def run_silent(module: str, *words: object) -> str:
    """Return what `python -m` prints with these words, without a download. Raises ValueError with the error that it ends with."""
    command, offline = [sys.executable, "-m", module, *map(str, words)], os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=offline)
    if done.returncode:
        said = list_error_lines(done.stderr.splitlines()) or [f"{module} ended with {done.returncode}: {done.stderr}"]
        raise ValueError("\n  ".join(map(str.strip, said)))
    return done.stdout


def capture_output(command: list[str], folder: Path | None = None) -> str:
    """Return what a command prints that runs no stage. Raises ValueError with its message if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command[-4:])}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def end_children() -> None:
    """End every stage that this process runs now. Safe to call twice, and without any stage."""
    with _live_lock:
        running = list(_live)
    _end_together(running)


def stop_stages() -> None:
    """End every stage of this process and let it start no other: neither one that is due now nor another attempt."""
    _stopped.set()
    end_children()


def wait_before_retry(seconds: float) -> bool:
    """Wait before another attempt. Return False, at once, after `stop_stages`."""
    return not _stopped.wait(seconds)


def _build_environment() -> dict[str, str]:
    """Return the environment of DVC, of what it starts and of the fork server, with the run's mark."""
    # dvc.yaml says `python -m stages.NAME`: that must be this Python, whether its environment is activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # Without the Prefect server's password: stages start servers and graders.
    open_env = {name: value for name, value in os.environ.items() if name not in (password.CLIENT, password.SERVER)}
    return open_env | {"PATH": path, "PYTHONUNBUFFERED": "1"} | ({RUN_MARK_VARIABLE: _mark} if _mark else {})


def _start_command(words: list[str], environment: dict[str, str], held_files: Iterable[int]) -> psutil.Popen:
    """Start the command in a session of its own: a Ctrl-C or a group kill must not reach DVC before its command."""
    with _live_lock:
        if _stopped.is_set():
            raise StageError(f"{' '.join(words)} was not started: the run is cancelled")
        process = psutil.Popen(
            [sys.executable, "-m", *words],
            env=_build_environment() | environment,
            pass_fds=list(held_files),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _live.add(process)
    return process


def _end_together(processes: list[psutil.Process]) -> None:
    """End several at the same time: a cancelled flow has 30 s in all."""
    with ThreadPoolExecutor(len(processes) or 1) as threads:
        list(threads.map(_end_process, processes))


def _end_process(process: psutil.Process) -> None:
    """End a running stage child-first: its command, so that DVC reports a failure, frees its locks and exits itself.

    The other order is wrong twice: a command outlives a DVC that is killed, and the next run would work beside it on the
    same files; and a DVC that is killed while it writes dvc.lock leaves that file empty.
    """
    started = time.monotonic()
    commands: set[psutil.Process] = set()  # kept, since after its shell has ended a command has no parent to find it by
    signalled: set[psutil.Process] = set()
    if DVC_MODULE not in _unless_ended(process.cmdline, []):  # a command whose DVC has ended before it
        commands.add(process)
    while (elapsed := time.monotonic() - started) < COMMAND_GRACE_S + DVC_GRACE_S and _is_alive(process):
        # Looked up each time: DVC may be about to start its command.
        commands |= set(_unless_ended(partial(process.children, recursive=True), []))
        for command in commands:
            if elapsed > COMMAND_GRACE_S:
                _unless_ended(command.kill)
            elif command not in signalled:
                _unless_ended(command.terminate)
        signalled |= commands
        time.sleep(POLL_S)
    _unless_ended(process.kill)  # no effect on one that has ended; a DVC that is alive after all this hangs
    while (alive := [c for c in commands if _is_alive(c)]) and time.monotonic() - started < COMMAND_GRACE_S:
        time.sleep(POLL_S)
    for command in alive:
        _unless_ended(command.kill)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs. A zombie has ended; in many containers process 1 never reaps it."""
    return bool(_unless_ended(process.status, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE)


def _unless_ended(ask: Callable[[], Any], ended: Any = None) -> Any:
    """Ask a process for something, or signal it; return `ended` if it has ended meanwhile."""
    try:
        return ask()
    except psutil.NoSuchProcess:
        return ended
