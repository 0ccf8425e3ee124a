"""DVC, as the rest of `pipeline` sees it: the stages in order, run one, end all. Nothing else here calls DVC.

DVC alone decides whether a stage runs, comes back from the cache or stays as it is; we read its verdict from the line
it prints. Measured facts behind the choices below: research/dvc_prefect.md, sections 2, 3 and 5.
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import psutil

TAIL_LINES = 10  # of a failed stage in its state, which Prefect prints twice; the log above it has all
COMMAND_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for a stage's command
DVC_GRACE = 15.0  # seconds for DVC to write its lock file after that; Prefect kills a cancelled flow after 30


class Outcome(StrEnum):
    RAN = "ran"
    RESTORED = "restored"  # from the run-cache: the same command on the same inputs was run before
    UNCHANGED = "unchanged"


# What DVC 3 prints of a stage, the name in quotes, before the stage's own command prints anything.
VERDICTS = {
    "Running stage '{}'": Outcome.RAN,
    "Verifying data sources in stage: '{}'": Outcome.RAN,  # a file put under DVC by `dvc add` and changed since
    "Stage '{}' is cached - skipping run": Outcome.RESTORED,
    "'{}' didn't change, skipping": Outcome.UNCHANGED,
}

# What DVC 3 advises after each stage, about git and remotes: without it a run's log is half as long, and lacks nothing.
ADVICE = (
    "To track the changes with git, run:",
    "git add ",
    "To enable auto staging, run:",
    "dvc config core.autostage true",
    "Use `dvc push` to send your updates to remote storage.",
)

_live: set[subprocess.Popen[str]] = set()
_live_lock = threading.Lock()


class StageError(RuntimeError):
    """A stage failed, or DVC did; the message is for the user and holds the end of the log."""


def stages(root: Path | None = None) -> dict[str, list[str]]:
    """Every stage with the stages it depends on, in an order in which they can run; of another folder than this one.

    In process, from the graph that `dvc repro` itself plans by: `dvc dag --dot` says the same, but as text that is
    ours to parse, and a parser that misses an edge is silent where a renamed attribute is not. Neither takes a lock.

    Raises:
        dvc.exceptions.DvcException: where dvc.yaml or params.yaml can't be read; its message names the place.
    """
    from dvc.repo import Repo  # 0.4 s, so only where a flow runs

    with Repo(root) as repo:
        graph = repo.index.graph
        needs = {_name(stage): [_name(other) for other in graph.successors(stage)] for stage in graph}
    return {name: needs[name] for name in TopologicalSorter(needs).static_order()}


def _name(stage: Any) -> str:
    """As `dvc repro` takes it in the stage's folder; of another folder DVC names dvc.yaml too."""
    return str(stage.addressing).rpartition(":")[2]


def run_stage(name: str, on_line: Callable[[str], object]) -> Outcome:
    """Bring one stage up to date; its upstream is the caller's business. Each line that says something goes to `on_line`.

    Raises:
        StageError: with the end of the log, where the stage or DVC failed.
    """
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    outcome = None
    process = _start(name)
    assert process.stdout
    try:
        for line in map(str.rstrip, process.stdout):
            outcome = outcome or _verdict(name, line)
            if line and not line.lstrip().startswith(ADVICE):
                tail.append(line)
                on_line(line)
        status = process.wait()
    except BaseException:  # cancelled, interrupted, or on_line failed: a stage must not outlive whoever watches it
        # Someone has to go on reading, or what is still printed fills the pipe and DVC can't end.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        _end(process)
        raise
    finally:
        with _live_lock:
            _live.discard(process)
    if status:
        raise StageError(
            f"stage {name} failed (dvc exited with {status}); mend it and run again, what has finished is cached. "
            f"The end of its log:\n" + "\n".join(tail)
        )
    assert outcome, f"dvc said none of {list(VERDICTS)} of {name}; has a new version changed its messages? {list(tail)}"
    return outcome


def end_children() -> None:
    """End every stage that is running now. Safe to call twice, and when none is."""
    with _live_lock:
        processes = list(_live)
    for process in processes:
        _end(process)


def _start(name: str) -> subprocess.Popen[str]:
    # --wait-for-lock, which must stand before `repro`: without it a stage that has *finished* is lost when DVC can't
    # get its lock within 3 s. Its own session: a Ctrl-C or a group kill must not hit DVC before its command.
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", name]
    # dvc.yaml says `python -m stages.NAME`: that python must be ours, activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with _live_lock:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        _live.add(process)
    return process


def _verdict(name: str, line: str) -> Outcome | None:
    return next((outcome for text, outcome in VERDICTS.items() if text.format(name) in line), None)


def _end(process: subprocess.Popen[str]) -> None:
    """End a running stage child-first: the command, so that DVC reports a failure, frees its locks and exits itself.

    The other way round is wrong twice: a command outlives a DVC that is killed, and the next run would work beside it
    on the same files; and DVC killed while it writes dvc.lock leaves that file empty.
    """
    started = time.monotonic()
    commands: set[psutil.Process] = set()  # remembered: the command of a shell that has ended is nobody's descendant
    signalled: set[psutil.Process] = set()
    while (late := time.monotonic() - started) < COMMAND_GRACE + DVC_GRACE and process.poll() is None:
        commands |= _descendants(process)  # looked for again each time: DVC may be about to start its command
        for command in commands:
            if late > COMMAND_GRACE:
                _quietly(command.kill)
            elif command not in signalled:
                _quietly(command.terminate)
        signalled |= commands
        time.sleep(0.05)
    process.kill()  # no effect on one that has ended; a DVC still here after all this hangs
    process.wait()
    while (alive := [c for c in commands if _alive(c)]) and time.monotonic() - started < COMMAND_GRACE:
        time.sleep(0.05)
    for command in alive:
        _quietly(command.kill)


def _alive(process: psutil.Process) -> bool:
    """A zombie has ended, though nobody has asked how: in many containers process 1 never does."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _descendants(process: subprocess.Popen[str]) -> set[psutil.Process]:
    try:
        return set(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _quietly(act: Callable[[], None]) -> None:
    """Signal a process that may have ended meanwhile."""
    try:
        act()
    except psutil.NoSuchProcess:
        pass
