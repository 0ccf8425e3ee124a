"""DVC, as the rest of `pipeline` sees it: the stages in order, what is stale and why, run one or all, end all.

Nothing else here calls DVC. It alone decides whether a stage runs, comes back from the cache or stays as it is: we ask its
status in this process, and read its verdict from the line it prints. What it takes from its cache is compared with its name
first (pipeline/checked_dvc.py). Measured facts behind the choices below: research/dvc_prefect.md, sections 2, 3 and 5.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from graphlib import TopologicalSorter
from pathlib import Path
from typing import IO, Any

import psutil
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline import freshness, password
from pipeline.checked_dvc import check_cached_copies

TAIL_LINES = 10  # of a failed stage in its state, which Prefect prints twice; the log above it has all
COMMAND_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for a stage's command
DVC_GRACE = 15.0  # seconds for DVC to write its lock file after that; Prefect kills a cancelled flow after 30


class Outcome(StrEnum):
    RAN = "ran"
    RESTORED = "restored"  # from the run-cache: the same command on the same inputs was run before
    UNCHANGED = "unchanged"


# What DVC 3 prints of a stage, the name in quotes, before the stage's own command prints anything.
OUTCOME_LINES = {
    "Running stage '{}'": Outcome.RAN,
    "Verifying data sources in stage: '{}'": Outcome.RAN,  # a file put under DVC by `dvc add` and changed since
    "Stage '{}' is cached - skipping run": Outcome.RESTORED,
    "'{}' didn't change, skipping": Outcome.UNCHANGED,
}

# What DVC 3 advises after each stage, about git and remotes: without it a run's log is half as long, and lacks nothing.
DVC_ADVICE = (
    "To track the changes with git, run:",
    "git add ",
    "To enable auto staging, run:",
    "dvc config core.autostage true",
    "Use `dvc push` to send your updates to remote storage.",
)

# What the end of a log says of a failure that another attempt may mend; everything else fails at once.
TRANSIENT_ERRORS = (
    "ConnectionError", "Connection refused", "Connection reset", "ConnectTimeout", "ReadTimeout", "RemoteDisconnected",
    "ServerDisconnectedError", "TimeoutError", "Temporary failure in name resolution", "Max retries exceeded",
    "server was not ready", "429 Too Many Requests", "502 Bad Gateway", "503 Service", "504 Gateway",
)  # fmt: skip

# A name of dvc.yaml, or with the value of a list; no folder, no option.
STAGE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_-]*(@[A-Za-z0-9_][A-Za-z0-9_.-]*)?$"
RUN_MARK_VARIABLE = (
    "AERIE_RUN"  # in the environment of all that a run has started, by which a killed run's stages are found
)
LOCK_FILE = Path("dvc.lock")
DVC_MODULE = "pipeline.checked_dvc"  # as a word of its command line, by which DVC is told from what it started
CONFLICT = "<<<<<<< "  # begins what git leaves in a file that it could not merge

_live: set[subprocess.Popen[str]] = set()
_live_lock = threading.Lock()
_mark: str | None = None
_guard: IO[bytes] | None = None
_stopped = threading.Event()


class StageError(RuntimeError):
    """A stage failed, or DVC did; the message is for the user and holds the end of the log."""

    def __init__(self, message: str, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class BusyError(ValueError):
    """Another process holds one of DVC's locks."""


def list_stages(root: Path | None = None) -> dict[str, list[str]]:
    """Every stage with the stages it depends on, in an order in which they can run; of another folder than this one.

    In process, from the graph that `dvc repro` itself plans by: `dvc dag --dot` says the same, but as text that is
    ours to parse, and a parser that misses an edge is silent where a renamed attribute is not. Neither takes a lock.

    Raises:
        ValueError: where dvc.yaml or params.yaml can't be read; its message names the place.
    """
    if root is None and (known := freshness.read_fresh_stages()) is not None:
        return known
    with open_repo(root) as repo:
        return _sort_stages(repo)


@contextmanager
def open_repo(root: Path | None = None) -> Iterator[Any]:
    """Open the DVC repository of `root`, or of the current folder; cached copies are compared with their names.

    Raises:
        BusyError: where another process holds one of DVC's locks.
        ValueError: with DVC's message, for any other error of DVC's.
    """
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo  # 0.4 s

    check_cached_copies()
    try:
        with Repo(root, _wait_for_lock=True) as repo:
            yield repo
    except LockError as error:
        raise BusyError(str(error)) from error
    except DvcException as error:
        raise ValueError(str(error)) from error


def _sort_stages(repo: Any) -> dict[str, list[str]]:
    graph = repo.index.graph
    needs = {_get_stage_name(stage): [_get_stage_name(other) for other in graph.successors(stage)] for stage in graph}
    return {name: needs[name] for name in TopologicalSorter(needs).static_order()}


def explain_stale(names: list[str] | None = None) -> dict[str, list[str]]:
    """Each stage that is not up to date, of `names` or of all, with what changed; in process, 0.3 s where a DVC takes 1,
    and next to nothing where no file has changed since all were up to date (pipeline/freshness.py).

    What another process works on, DVC doesn't look at: then all that were asked about may be stale.

    Raises:
        ValueError: as `list_stages`.
    """
    if names is None and freshness.read_fresh_stages() is not None:
        return {}
    try:
        with open_repo() as repo:
            paths = _list_watched_paths(repo) if names is None else []
            looked = freshness.digest_paths(paths)
            found = repo.status(targets=names)
            if paths and not found:
                freshness.remember_fresh(paths, looked, _sort_stages(repo))
            new = {
                _get_stage_name(stage) for stage in repo.index.stages if not any(dep.hash_info for dep in stage.deps)
            }
    except BusyError as error:
        unknown = f"DVC can't say, another process is at work: {str(error).splitlines()[0]}"
        return {name: [unknown] for name in names or list_stages()}
    why = {name.rpartition(":")[2]: list(_format_reasons(changes)) for name, changes in found.items()}
    return {name: ["it is new"] if name in new else reasons for name, reasons in why.items()}


def _list_watched_paths(repo: Any) -> list[str]:
    """All that a stage's being up to date depends on, from here; nothing where some of it is not on this machine."""
    given = [one for stage in repo.index.stages for one in (*stage.deps, *stage.outs)]
    if any(one.protocol != "local" for one in given):
        return []
    files = {stage.path_in_repo for stage in repo.index.stages} | {str(LOCK_FILE), ".dvcignore"}
    files |= {f"{repo.DVC_DIR}/{name}" for name in ("config", "config.local")}
    return [*files, *{os.path.relpath(one.fs_path) for one in given}]


def _format_reasons(found: list[Any]) -> Iterator[str]:
    """DVC's status of a stage in words: `stages/report.py modified`, `params.yaml: report.title modified`."""
    for entry in found:
        if isinstance(entry, str):
            yield entry.replace("changed checksum", "the command changed")
            continue
        for path, change in next(iter(entry.values())).items():
            if isinstance(change, dict):  # parameters
                yield from (f"{path}: {key} {how}" for key, how in change.items())
            else:
                yield f"{path} {change}"


def pull_inputs(name: str) -> list[str]:
    """Fetch what one stage reads and isn't here -> the outputs asked for; none that no remote has or that is stale.

    `dvc repro --pull` does so too, but for a folder of several stages' outputs, as the report reads, it only finds an error.

    Raises:
        ValueError: where there is no such stage, or no remote.
    """
    check_stage_name(name)
    with open_repo() as repo:
        read = [dep.fs_path for stage in repo.stage.collect(name) for dep in stage.deps if dep.protocol == "local"]
        missing = [
            out.fs_path
            for out in repo.index.outs
            if out.hash_info and not out.exists and any(Path(out.fs_path).is_relative_to(path) for path in read)
        ]
        if missing:
            repo.pull(targets=missing, allow_missing=True)
        return [os.path.relpath(path) for path in missing]


def heal_lock() -> str | None:
    """Where dvc.lock is not valid, cut by a kill, take back the one of the last commit -> what was done, None if nothing.

    What ran since comes back from the run-cache, without running.

    Raises:
        ValueError: where it holds the conflicts of a merge, which a person must resolve.
    """
    if freshness.read_fresh_stages() is not None:  # to read it all takes a second, with 200 cells
        return None
    if not LOCK_FILE.exists():
        return None
    text = LOCK_FILE.read_text(encoding="utf-8", errors="replace")
    if _is_valid_lock(text):
        return None
    if any(line.startswith(CONFLICT) for line in text.splitlines()):
        raise ValueError(
            f"{LOCK_FILE} holds conflicts of a merge, expected none; resolve them (either side will do: what ran before "
            f"comes from DVC's run-cache), as with git checkout --ours {LOCK_FILE}, and run again"
        )
    asked = subprocess.run(["git", "show", f"HEAD:./{LOCK_FILE}"], capture_output=True, text=True)
    if asked.returncode == 0 and _is_valid_lock(asked.stdout):
        beside = LOCK_FILE.with_suffix(".healed")
        beside.write_text(asked.stdout, encoding="utf-8")
        shutil.copymode(LOCK_FILE, beside)
        os.replace(beside, LOCK_FILE)
        return f"{LOCK_FILE} was cut by a kill; restored from the last commit, what ran since comes from the run-cache"
    LOCK_FILE.unlink()
    return f"{LOCK_FILE} was cut by a kill and no commit has it; removed, what ran comes from the run-cache"


def _is_valid_lock(text: str) -> bool:
    try:
        found = YAML(typ="safe").load(text)
    except (YAMLError, ValueError):
        return False
    return isinstance(found, dict) and "schema" in found


@contextmanager
def guard_run(hold: Iterable[int] = ()) -> Iterator[None]:
    """While this lasts, another process watches this one, and ends its stages should it be killed outright.

    It shares the open files `hold`: a lock on one is free only when those stages have ended. What it is told with
    `tell_guard` meanwhile, it ends too.
    """
    global _mark, _guard
    _mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "pipeline.orphan_guard", _mark]
    # A session of its own, so that what is sent to our group leaves it be; it ends when the pipe does.
    pipe = subprocess.PIPE
    guard = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=list(hold), start_new_session=True)
    assert guard.stdin and guard.stdout
    guard.wait()  # it goes on as nobody's child, since Ray kills the children of a process that it kills
    _guard = guard.stdin
    try:
        yield
    finally:
        _guard = None
        guard.stdin.close()
        guard.stdout.read()  # until it has ended, and freed what it holds
        guard.stdout.close()
        _mark = None


def tell_guard(line: str) -> None:
    """A line for `pipeline.orphan_guard`, of what runs elsewhere; nothing where nobody watches."""
    if _guard:
        _guard.write(f"{line}\n".encode())  # a short line goes into a pipe whole, whichever thread writes it
        _guard.flush()


def end_marked(mark: str) -> None:
    """End every stage that a run of that mark has left, each child-first, all at once."""
    found = {process.pid: process for process in psutil.process_iter(["environ", "cmdline"])
             if (process.info["environ"] or {}).get(RUN_MARK_VARIABLE) == mark}  # fmt: skip
    tops = [process for process in found.values() if _get_parent_pid(process) not in found]
    ends = [threading.Thread(target=_end_process, args=(process,)) for process in tops]
    for end in ends:
        end.start()
    for end in ends:
        end.join()


def _get_parent_pid(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None


def _get_stage_name(stage: Any) -> str:
    """As `dvc repro` takes it in the stage's folder; of another folder DVC names dvc.yaml too."""
    return str(stage.addressing).rpartition(":")[2]


def reproduce_stage(
    name: str,
    on_line: Callable[[str], object],
    environment: dict[str, str] | None = None,
    hold: Iterable[int] = (),
) -> Outcome:
    """Bring one stage up to date; its upstream is the caller's business. Each line that says something goes to `on_line`.

    `environment` is added to ours; the open files `hold` stay open, and with them their locks, until DVC has ended.

    Raises:
        StageError: with the end of the log, where the stage or DVC failed.
    """
    outcome: Outcome | None = None
    tail: deque[str] = deque(maxlen=TAIL_LINES)

    def on_any(line: str) -> None:
        nonlocal outcome
        outcome = outcome or _match_outcome(name, line)
        if line and not line.lstrip().startswith(DVC_ADVICE):
            tail.append(line)
            on_line(line)

    # --wait-for-lock, which must stand before `repro`: without it a stage that has *finished* is lost when DVC can't
    # get its lock within 3 s.
    if status := _run_command(
        [DVC_MODULE, "--wait-for-lock", "repro", "--single-item", name], on_any, environment or {}, hold
    ):
        log = "\n".join(tail)
        raise StageError(
            f"stage {name} failed (dvc exited with {status}); mend it and run again, what has finished is cached. "
            f"The end of its log:\n{log}",
            is_transient(log),
        )
    assert outcome, (
        f"dvc said none of {list(OUTCOME_LINES)} of {name}; has a new version changed its messages? {list(tail)}"
    )
    return outcome


def run_all_stages(hold: Iterable[int] = ()) -> None:
    """Bring every stage up to date by one DVC, which prints as it likes to where this process prints.

    Raises:
        StageError: where a stage or DVC failed; DVC has printed why.
    """
    if status := _run_command([DVC_MODULE, "--wait-for-lock", "repro"], None, {}, hold):
        raise StageError(
            f"a stage failed (dvc exited with {status}), see above; mend it and run again, what has finished is cached"
        )


def run_module(words: list[str]) -> list[str]:
    """`python -m` one of ours, which `stop_stages` ends as it ends stages -> the lines it said.

    Raises:
        StageError: with the end of what it said, where it refuses.
    """
    said: list[str] = []
    if _run_command(words, said.append, {}, ()):
        log = "\n".join(said[-TAIL_LINES:])
        raise StageError(f"{' '.join(words)}: {log}", is_transient(log))
    return said


def is_transient(log: str) -> bool:
    """Whether another attempt may mend what ends a log so."""
    return any(text in log for text in TRANSIENT_ERRORS)


def _run_command(
    words: list[str], on_line: Callable[[str], object] | None, environment: dict[str, str], hold: Iterable[int]
) -> int:
    """`python -m` these words until it has ended -> its exit status; each line to `on_line`, or where we print."""
    process = _start_command(words, environment, hold, piped=on_line is not None)
    try:
        if on_line and process.stdout:
            for line in map(str.rstrip, process.stdout):
                on_line(line)
        return process.wait()
    except BaseException:  # cancelled, interrupted, or on_line failed: a stage must not outlive whoever watches it
        if process.stdout:  # someone has to go on reading, or what is still printed fills the pipe and DVC can't end
            threading.Thread(target=process.stdout.read, daemon=True).start()
        _end_process(psutil.Process(process.pid))
        process.wait()
        raise
    finally:
        with _live_lock:
            _live.discard(process)


def end_children() -> None:
    """End every stage that is running now. Safe to call twice, and when none is."""
    with _live_lock:
        processes = list(_live)
    ends = [threading.Thread(target=_end_pid, args=(process.pid,)) for process in processes]
    for end in ends:  # together: a cancelled flow has 30 s in all
        end.start()
    for end in ends:
        end.join()


def stop_stages() -> None:
    """End every stage, and let this process start none any more: not one whose turn came just now, nor another attempt."""
    _stopped.set()
    end_children()


def wait_before_retry(seconds: float) -> bool:
    """Before another attempt; False, and at once, where there is to be none."""
    return not _stopped.wait(seconds)


def _end_pid(pid: int) -> None:
    try:
        _end_process(psutil.Process(pid))
    except psutil.NoSuchProcess:
        pass


def _start_command(
    words: list[str], environment: dict[str, str], hold: Iterable[int], piped: bool = True
) -> subprocess.Popen[str]:
    """Its own session: a Ctrl-C or a group kill must not hit DVC before its command."""
    command = [sys.executable, "-m", *words]
    # dvc.yaml says `python -m stages.NAME`: that python must be ours, activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with _live_lock:
        if _stopped.is_set():
            raise StageError(f"{' '.join(words)} was not started: the run is cancelled")
        process = subprocess.Popen(
            command,
            env=_without_secrets()
            | {"PATH": path, "PYTHONUNBUFFERED": "1"}
            | ({RUN_MARK_VARIABLE: _mark} if _mark else {})
            | environment,
            pass_fds=list(hold),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        _live.add(process)
    return process


def _without_secrets() -> dict[str, str]:
    """Our environment without the Prefect server's password: no stage talks to it, and stages start servers and graders."""
    return {name: value for name, value in os.environ.items() if name not in (password.CLIENT, password.SERVER)}


def check_stage_name(name: str) -> str:
    """Return the name where it is one that dvc.yaml can give, as report or benchmark@eval-e003-t8_2_16.

    DVC would take any other for a path or an option.

    Raises:
        ValueError: where it is not.
    """
    if not re.fullmatch(STAGE_NAME, name):
        raise ValueError(
            f"{name!r} is not the name of a stage, expected NAME or NAME@VALUE; `dvc stage list` shows them"
        )
    return name


def _match_outcome(name: str, line: str) -> Outcome | None:
    return next((outcome for text, outcome in OUTCOME_LINES.items() if text.format(name) in line), None)


def _end_process(process: psutil.Process) -> None:
    """End a running stage child-first: the command, so that DVC reports a failure, frees its locks and exits itself.

    The other way round is wrong twice: a command outlives a DVC that is killed, and the next run would work beside it
    on the same files; and DVC killed while it writes dvc.lock leaves that file empty.
    """
    started = time.monotonic()
    commands: set[psutil.Process] = set()  # remembered: the command of a shell that has ended is nobody's descendant
    signalled: set[psutil.Process] = set()
    if DVC_MODULE not in _read_command_line(process):  # a command whose DVC has gone before it
        commands.add(process)
    while (late := time.monotonic() - started) < COMMAND_GRACE + DVC_GRACE and _is_alive(process):
        commands |= _list_descendants(process)  # looked for again each time: DVC may be about to start its command
        for command in commands:
            if late > COMMAND_GRACE:
                _ignore_ended(command.kill)
            elif command not in signalled:
                _ignore_ended(command.terminate)
        signalled |= commands
        time.sleep(0.05)
    _ignore_ended(process.kill)  # no effect on one that has ended; a DVC still here after all this hangs
    while (alive := [c for c in commands if _is_alive(c)]) and time.monotonic() - started < COMMAND_GRACE:
        time.sleep(0.05)
    for command in alive:
        _ignore_ended(command.kill)


def _read_command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _is_alive(process: psutil.Process) -> bool:
    """A zombie has ended, though nobody has asked how: in many containers process 1 never does."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _list_descendants(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _ignore_ended(act: Callable[[], None]) -> None:
    """Signal a process that may have ended meanwhile."""
    try:
        act()
    except psutil.NoSuchProcess:
        pass
