"""A workspace for each run whose parameters differ: a git worktree in .scratch/runs that shares the DVC cache.

Results of other runs are restored from that cache, so a workspace costs a checkout (hard links), and no two runs share a
params.yaml. It stays until it is dropped:

    aerie promote RUN     # pipeline/promotion.py
    aerie drop RUN        # removes the worktree; the cache keeps its results
"""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline import dvc_graph
from pipeline.processes import capture_output
from pipeline.resources import try_lock
from stages.params.engines import SERVED, list_environments
from stages.params.section import PARAMS_FILE, suggest_name
from stages.runtime import atomic

RUNS_FOLDER = Path(".scratch/runs")
LOCK_PATH = Path(".scratch/run.lock")
STARTED_PARAMS = Path(".scratch/started_params.yaml")  # params.yaml of this checkout when a workspace was made
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]+")
NAME_LENGTH = 64


@contextmanager
def hold_workspace(log: Callable[[str], object], path: Path = LOCK_PATH) -> Iterator[list[int]]:
    """Lock a workspace, by default this folder, for one run; wait for another run's end -> the files for `processes.guard_run`.

    They must stay open for as long as a stage runs. Every run of more than one stage starts with this.
    """
    if (held := try_lock(path)) is None:
        log("another run is at work here; waiting for its end")
        while (held := try_lock(path)) is None:
            time.sleep(1)
    with held:
        yield [held.fileno()]


def name_workspace(run: str, run_id: str) -> str:
    """Return the folder name of a run's workspace. A run's own name may be anything, ../../x too."""
    return f"{NOT_IN_NAMES.sub('-', run)[:NAME_LENGTH]}-{run_id[:8]}"


def make_workspace(name: str) -> Path:
    """Create a workspace with the files of this checkout, uncommitted ones too, and the cached outputs -> its folder.

    Raises:
        ValueError: the name is not one of a folder, this is no git repository with a commit, or git or DVC refuses.
    """
    folder = resolve_inside(RUNS_FOLDER, name)
    if folder.exists():  # a retry of the same run
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_git("worktree", "add", "--detach", str(folder), "HEAD")
    try:
        with dvc_graph.open_repo():  # dvc.lock among them
            for path in _list_uncommitted():
                copy_file(Path(path), folder / path)
        copy_file(PARAMS_FILE, folder / STARTED_PARAMS)
        share_settings(folder)
        if (folder / dvc_graph.LOCK_FILE).exists():
            run_dvc("checkout", "--quiet", "--force", "--allow-missing", cwd=folder)
    except BaseException:  # or a retry would find half a workspace
        run_git("worktree", "remove", "--force", str(folder))
        raise
    return folder


def share_settings(folder: Path) -> None:
    """Let DVC in `folder` use this checkout's cache and remotes, and stages its serving engines."""
    local = Path(".dvc/config.local")
    if local.exists():
        shutil.copy2(local, folder / local)
    with dvc_graph.open_repo() as repo:
        cache = Path(repo.cache.local_cache_dir).resolve()
        remotes = {name: remote["url"] for name, remote in repo.config["remote"].items()}
    # Absolute paths: .dvc/config may hold them relative to itself.
    with _edit_local_settings(folder) as settings:
        settings["cache"]["dir"] = str(cache)
        for name, path in remotes.items():
            if Path(path).is_absolute():  # a folder of this machine, or mounted here
                settings["remote"].setdefault(name, {})["url"] = path
    for environment in (path for engine in SERVED for path in list_environments(engine)):
        if environment.is_dir():  # of gigabytes, in no commit
            (folder / environment).parent.mkdir(exist_ok=True)
            (folder / environment).symlink_to(environment.resolve())


def make_bare_project(folder: Path) -> None:
    """Create a DVC project without files that uses this checkout's cache and remotes; keep an existing one."""
    (folder / ".dvc").mkdir(parents=True, exist_ok=True)
    shutil.copy2(".dvc/config", folder / ".dvc/config")
    share_settings(folder)
    with _edit_local_settings(folder) as settings:
        settings["core"]["no_scm"] = "true"


@contextmanager
def _edit_local_settings(folder: Path) -> Iterator[dict[str, Any]]:
    """Write .dvc/config.local of the project in `folder`, as `dvc config --local` does in a process for each setting.

    Raises:
        ValueError: with DVC's message.
    """
    from dvc.config import Config
    from dvc.exceptions import DvcException

    try:
        with Config(str(folder / ".dvc")).edit("local") as settings:
            yield settings
    except DvcException as error:
        raise ValueError(str(error)) from error


def drop_run(name: str) -> Iterator[str]:
    """Remove a run's workspace. Raises ValueError if there is none, or its run is at work."""
    folder = locate_run(name)
    if (held := try_lock(folder / LOCK_PATH)) is None:
        raise ValueError(f"{name} is at work; cancel it first")
    with held:
        run_git("worktree", "remove", "--force", str(folder))
    yield f"{folder} is gone; what it computed stays in DVC's cache until `dvc gc`"


def locate_run(name: str) -> Path:
    """Return the folder of a run's workspace. Raises ValueError if there is none, naming those there are."""
    known = sorted(found.name for found in RUNS_FOLDER.glob("*") if found.is_dir())
    if name not in known:
        nearest = suggest_name(name, known)
        raise ValueError(f"there is no run {name} in {RUNS_FOLDER}{nearest}; there are {', '.join(known) or 'none'}")
    return resolve_inside(RUNS_FOLDER, name)


def resolve_inside(parent: Path, name: str) -> Path:
    """Return the absolute path of the folder `name` in `parent`, whether it exists or not.

    Raises:
        ValueError: the name leads anywhere else. Names of runs come from users of Prefect's server.
    """
    if name in ("", ".", "..") or {"/", "\0", "\n"} & set(name):
        raise ValueError(f"{name!r} is not the name of a folder in {parent}, expected one without a slash")
    return parent.resolve() / name


def _list_uncommitted() -> list[str]:
    """Return the files that differ from the commit, are new, or are gone, without those that git ignores."""
    commands = [["diff", "--name-only", "-z", "HEAD"], ["ls-files", "-z", "--others", "--exclude-standard"]]
    return [name for command in commands for name in run_git(*command, "--", ".").split("\0") if name]


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically; if the source does not exist, remove the target."""
    if not source.exists():
        target.unlink(missing_ok=True)
        return
    with atomic.write_file(target) as temporary:
        shutil.copy2(source, temporary)


def run_dvc(*words: str, cwd: Path | None = None) -> str:
    return capture_output([sys.executable, "-m", "dvc", *words], cwd)


def run_git(*words: str, cwd: Path | None = None) -> str:
    return capture_output(["git", *words], cwd)
