"""The graph of stages, as DVC has it: their order, which are stale and why; bring one or all of them up to date.

DVC alone decides whether a stage runs, is restored from the run-cache or stays as it is. Its status is asked in this process;
what it did with a stage is read from the line it prints. Of pipeline/, this module, checked_dvc.py,
workspaces.py and remote/dvc_remote.py use DVC; docs/dvc.md describes the behaviour of DVC 3.67.1 that they rely on.
"""

import hashlib
import json
import logging
import os
import re
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import freshness
from pipeline.checked_dvc import change_dvc
from pipeline.dvc_output import OUTCOME_LINES, PROGRESS_PATTERN, DvcOutput, Outcome, find_error
from pipeline.processes import DVC_MODULE, TAIL_LINES, StageError, is_transient, run_command, stop_stages
from pipeline.run_display import RunDisplay, locate_log, show_line
from stages.params import schema, stage_inputs
from stages.params.section import suggest_name

# The name of a stage in dvc.yaml, for a stage with a list also @VALUE; never a folder or an option.
STAGE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_-]*(@[A-Za-z0-9_][A-Za-z0-9_.-]*)?$"
LOCK_FILE = Path("dvc.lock")
# --wait-for-lock, which must come before `repro`: without it a stage that has *finished* is lost if DVC does not get its lock
# within 3 s.
REPRODUCE = [DVC_MODULE, "--wait-for-lock", "repro"]
RUN_AGAIN = "fix it and run again, what has finished is cached"
INPUTS_STAGE = "inputs"  # always runs first, and is never stale by itself


class BusyError(ValueError):
    """Another process holds one of DVC's locks."""


class GraphState(NamedTuple):
    """The stale stages, each with what changed, and all stages, each with those that it depends on."""

    reasons: dict[str, list[str]]
    stages: freshness.Upstream


def list_stages(root: Path | None = None) -> dict[str, list[str]]:
    """Return every stage with the stages it depends on, in an order in which they can run; of `root` or of this folder.

    Reads the graph that `dvc repro` itself plans by. `dvc dag --dot` prints the same, but a parser of its text that
    misses an edge fails silently, where a renamed attribute of DVC's does not.

    Raises:
        ValueError: dvc.yaml or params.yaml cannot be read; the message names the line.
    """
    if root is None and (known := freshness.read_fresh_stages()) is not None:
        return known
    with open_repo(root) as repo:
        return _sort_stages(repo)


@contextmanager
def open_repo(root: Path | None = None) -> Iterator[Any]:
    """Open the DVC repository of `root`, or of this folder, and hold its lock; cached copies are compared with their names.

    Without the lock dvc.lock may be half-written: `dvc repro` empties it, then writes. `release_lock` lets it go for a transfer.

    Raises:
        BusyError: another process holds one of DVC's locks.
        ValueError: with DVC's message, for any other error of DVC's, or of its record of files' hashes.
        OSError: the disk is full, or a folder of DVC's in the project can't be written.
    """
    from dvc.dirs import site_cache_dir
    from dvc.exceptions import DvcException
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo  # 0.4 s

    change_dvc()
    # Its bars, of which it draws one for each file of each stage on a terminal: they follow this logger's level.
    logging.getLogger("dvc.progress").setLevel(logging.CRITICAL)
    try:
        with Repo(root, _wait_for_lock=True) as repo, lock_repo(repo):
            yield repo
    except LockError as error:
        raise BusyError(str(error)) from error
    except DvcException as error:
        raise ValueError(str(error)) from error
    except sqlite3.OperationalError as error:  # of its cache of files' hashes
        where = f"{site_cache_dir()}, where DVC keeps the hashes of files (DVC_SITE_CACHE_DIR)"
        raise ValueError(f"{error}: {where}; make room there, or name another folder") from error


@contextmanager
def release_lock(repo: Any) -> Iterator[None]:
    """Let others have the lock of a repository that `open_repo` has opened; what was read of it stays."""
    repo.lock.unlock()
    try:
        yield
    finally:
        repo.lock.lock()


def _sort_stages(repo: Any) -> dict[str, list[str]]:
    graph = repo.index.graph
    needs = {_get_stage_name(stage): [_get_stage_name(other) for other in graph.successors(stage)] for stage in graph}
    return {name: needs[name] for name in TopologicalSorter(needs).static_order()}


def _get_stage_name(stage: Any) -> str:
    """Return the name that `dvc repro` takes in the stage's folder; in another folder DVC's has dvc.yaml before it."""
    return str(stage.addressing).rpartition(":")[2]


def explain_stale(names: list[str] | None = None) -> dict[str, list[str]]:
    return explain_graph(names).reasons


def explain_graph(names: list[str] | None = None) -> GraphState:
    """Return the stages of `names`, or of all, that are not up to date, each with what changed, and the graph.

    Takes 0.3 s where a DVC process takes 1 s, and almost nothing if no file has changed since all stages were up to date
    (pipeline/freshness.py). DVC does not look at what another process works on: then every stage asked about may be stale.
    Raises ValueError as `list_stages`.
    """
    try:
        return ask_stale(names)
    except BusyError as error:
        unknown, stages = f"DVC can't say, another process is at work: {str(error).splitlines()[0]}", list_stages()
        return GraphState({name: [unknown] for name in names or stages}, stages)


def ask_stale(names: list[str] | None = None) -> GraphState:
    """Return what `explain_graph` does. Raises BusyError where another process works on what is asked about."""
    if names is None and (known := freshness.read_fresh_stages()) is not None:
        return GraphState({}, known)
    with open_repo() as repo:
        paths = _list_watched_paths(repo) if names is None else []
        digest = freshness.digest_paths(paths)
        found = {name.rpartition(":")[2]: changes for name, changes in repo.status(targets=names).items()}
        new = {_get_stage_name(stage) for stage in repo.index.stages if not any(dep.hash_info for dep in stage.deps)}
        recorded, stages = _list_recorded_inputs(repo), _sort_stages(repo)
        texts = dict[Path, str]()
        if names:  # in a run, which has begun with `inputs`
            texts = {path: path.read_text(encoding="utf-8") for path in stage_inputs.INPUTS_FOLDER.glob("*.json")}
        elif recorded:
            texts = stage_inputs.render_all(schema.load_params(edited=True))
        changed = {
            name: _explain_inputs(repo, oid, texts[path])
            for name, (path, oid) in recorded.items()
            if path in texts and _hash_text(texts[path]) != oid
        }
        reasons = {
            name: ["new"]
            if name in new and name in found
            else [*changed.get(name, []), *_format_changes(found.get(name, []))]
            for name in stages
            if name != INPUTS_STAGE and (not names or name in names)
        }
        reasons = {name: lines for name, lines in reasons.items() if lines}
        if paths and not reasons:
            freshness.remember_fresh(paths, digest, stages)
    return GraphState(reasons, stages)


def _hash_text(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def _list_recorded_inputs(repo: Any) -> dict[str, tuple[Path, str]]:
    """Return the path of each stage's inputs, and the hash of those that it last ran with."""
    folder = stage_inputs.INPUTS_FOLDER.as_posix()
    return {
        _get_stage_name(stage): (Path(str(dep)), dep.hash_info.value)
        for stage in repo.index.stages
        for dep in stage.deps
        if str(dep).startswith(f"{folder}/") and dep.hash_info
    }


def _explain_inputs(repo: Any, oid: str, text: str) -> list[str]:
    try:
        old = json.loads(Path(repo.cache.local.oid_to_path(oid)).read_bytes())
    except (OSError, ValueError):
        return ["its parameters or code changed; those of its last run are not in this cache"]
    return stage_inputs.list_differences(old, json.loads(text))


def _list_watched_paths(repo: Any) -> list[str]:
    """Return every path on which the stages' being up to date depends, or [] if some of it is not on this machine."""
    deps_and_outs = [entry for stage in repo.index.stages for entry in (*stage.deps, *stage.outs)]
    if any(entry.protocol != "local" for entry in deps_and_outs):
        return []
    files = {stage.path_in_repo for stage in repo.index.stages} | {str(LOCK_FILE), ".dvcignore"}
    files |= {f"{repo.DVC_DIR}/{name}" for name in ("config", "config.local")}
    if _list_recorded_inputs(repo):
        files |= set(map(str, stage_inputs.list_sources(schema.load_params(edited=True))))
    return [*files, *{os.path.relpath(entry.fs_path) for entry in deps_and_outs}]


def _format_changes(found: list[Any]) -> Iterator[str]:
    """Yield DVC's status of a stage's data and command in words: `data/raw/rows.jsonl modified`."""
    for entry in found:
        if isinstance(entry, str):
            yield entry.replace("changed checksum", "the command changed")
            continue
        for path, change in next(iter(entry.values())).items():
            if isinstance(change, dict):  # parameters, of a stage that a user has added with some of its own
                yield from (f"{path}: {key} {how}" for key, how in change.items())
            elif not Path(path).is_relative_to(stage_inputs.INPUTS_FOLDER):  # explained by what is in them
                yield f"{path} {'missing' if change == 'deleted' else change}"  # DVC itself removes outputs before a run


def pull_inputs(name: str) -> list[str]:
    """Fetch the inputs of one stage that are missing here -> the outputs fetched. Stale outputs are not fetched.

    `dvc repro --pull` fetches inputs too, but reports an error for a folder that holds outputs of several stages, as
    `report` reads them.

    Raises:
        ValueError: there is no such stage, or no remote.
    """
    check_stage_name(name)
    with open_repo() as repo:
        known = [_get_stage_name(stage) for stage in repo.index.stages]
        if not any(stage_name == name or stage_name.startswith(f"{name}@") for stage_name in known):
            raise ValueError(f"there is no stage {name}{suggest_name(name, known)}; `dvc stage list` shows them all")
        inputs = [dep.fs_path for stage in repo.stage.collect(name) for dep in stage.deps if dep.protocol == "local"]
        missing = [
            out.fs_path
            for out in repo.index.outs
            if out.hash_info and not out.exists and any(Path(out.fs_path).is_relative_to(path) for path in inputs)
        ]
        if missing:
            repo.pull(targets=missing, allow_missing=True)
        return [os.path.relpath(path) for path in missing]


def reproduce_stage(
    name: str,
    on_line: Callable[[str], object],
    environment: dict[str, str] | None = None,
    held_files: Iterable[int] = (),
) -> Outcome:
    """Bring one stage up to date, not the stages it depends on. Lines of its log go to `on_line`, without DVC's noise.

    `environment` is added to this process's own; the open files
    `held_files`, and locks on them, stay open until DVC has ended.

    Raises:
        StageError: with the end of the log, if the stage or DVC failed.
    """
    outcome: Outcome | None = None
    tail: deque[str] = deque(maxlen=TAIL_LINES)

    def begin(_: str, found: Outcome) -> None:
        nonlocal outcome
        outcome = found

    def read_line(line: str) -> None:
        if not PROGRESS_PATTERN.search(line):
            tail.append(line)
        on_line(line)

    words = [*REPRODUCE, "--single-item", name]
    if status := run_command(words, DvcOutput([name], begin, read_line), environment, held_files):
        log = "\n  ".join(tail)
        raise StageError(
            f"stage {name} failed (dvc exited with {status}); fix the cause and run again, what has finished is cached. "
            f"The end of its log:\n  {log}",
            is_transient(log),
            find_error(tail) or f"{name} failed without a word; dvc exited with {status}",
        )
    expected = [text.pattern for text in OUTCOME_LINES]
    assert outcome, f"dvc printed none of {expected} for {name}; has a new version changed them? {list(tail)}"
    return outcome


def write_inputs() -> None:
    """Run the stage `inputs`, before others that run by themselves. Raises StageError as `reproduce_stage`."""
    if INPUTS_STAGE in list_stages():
        reproduce_stage(INPUTS_STAGE, lambda _: None)


def run_all_stages(stages: freshness.Upstream, verbose: bool = False, groups: Collection[list[str]] = ()) -> None:
    """Bring every stage, all of `stages`, up to date: a line for each, its output in logs/.

    One DVC process runs all but `groups` (`Params.group_served_cells`): after what does not depend on them, the stages of a
    group run side by side, each by a DVC of its own; then what depends on them. Stages that do not depend on a failed one
    still run: one draft that cannot be trained does not hold up the others. With `verbose` all that the stages print is
    shown, without DVC's advice, and no logs are written. Raises StageError after the end of a failed stage's log was printed.
    """
    if verbose:
        if status := run_command([*REPRODUCE, "--keep-going"], DvcOutput(stages, lambda *_: None, show_line)):
            raise StageError(f"a stage failed (dvc exited with {status}), see above; {RUN_AGAIN}")
        return
    grouped = {name for group in groups for name in group}
    later = grouped | {*list_below(grouped, stages)}
    failed = _run_shown(stages, [name for name in stages if name not in later] if later else [])
    for group in groups:
        blocked = list_below(failed, stages)
        ready = [name for name in group if name not in blocked]
        with ThreadPoolExecutor(len(group)) as threads:
            try:
                for found in threads.map(lambda x: _run_shown(stages, ["--single-item", x], has_bar=False), ready):
                    failed += found
            except BaseException:
                stop_stages()  # or the threads would wait for the stages of a run that was interrupted
                raise
    blocked = list_below(failed, stages)
    left = [name for name in stages if name in later - grouped and name not in blocked]
    if left:
        failed += _run_shown(stages, ["--single-item", *left])  # `inputs`, which always runs, not again
    if failed:
        logs = " and ".join(map(str, map(locate_log, failed)))
        raise StageError(f"{' and '.join(failed)} failed, see above and {logs}; {RUN_AGAIN}")


def _run_shown(stages: freshness.Upstream, words: list[str], has_bar: bool = True) -> list[str]:
    """Run `dvc repro` with these words, a line for each stage that it runs -> those that failed.

    Raises StageError if DVC failed by itself.
    """
    with RunDisplay(stages, has_bar) as display:
        read = DvcOutput(stages, display.begin, display.show)
        status = run_command([*REPRODUCE, "--keep-going", *words], read, on_silence=display.tell)
        display.finish(status)
    if status and not display.failed:
        raise StageError(f"dvc exited with {status}, see above; {RUN_AGAIN}")
    return display.failed


def list_below(names: Container[str], stages: freshness.Upstream) -> list[str]:
    """Return the stages that are not named and depend on one that is, over any number of steps, in the order of the graph."""
    reached: dict[str, None] = {}
    for name, needs in stages.items():
        if name not in names and any(need in names or need in reached for need in needs):
            reached[name] = None
    return list(reached)


def check_stage_name(name: str) -> str:
    """Return the name; raise ValueError unless dvc.yaml can have a stage of it, such as benchmark@eval-e003-t8_2_16.

    DVC would take any other name for a path or an option.
    """
    if not re.fullmatch(STAGE_NAME, name):
        raise ValueError(f"{name!r} is not the name of a stage, expected NAME or NAME@VALUE; see `dvc stage list`")
    return name
