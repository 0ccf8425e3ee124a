"""Take over the parameters and results of a run that had a workspace of its own.

params.yaml becomes the run's; a sweep's names join the lists of this checkout's params.yaml instead, so that rows which
the sweep did not touch stay in the table. Entries of the run's dvc.lock replace those of the same stages here. Neither
loses anything: DVC's run-cache has every result, and a params.yaml that is in no commit is kept in a copy.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline import dvc_graph, recipes
from pipeline.resources import try_lock
from pipeline.workspaces import LOCK_PATH, STARTED_PARAMS, copy_file, locate_run, run_dvc, run_git
from stages.params.schema import load_params
from stages.params.section import PARAMS_FILE
from stages.runtime import atomic

ADDED = Path(".scratch/added.json")  # in a sweep's workspace: the lists that it measured
Sections = dict[str, dict[str, list[str]]]  # section -> key -> names


def note_added(workspace: Path, sections: Sections) -> None:
    """Note that a workspace is a sweep's, with the lists of names that a promotion adds."""
    file = workspace / ADDED
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(sections), encoding="utf-8")


def promote_run(name: str) -> Iterator[str]:
    """Replace this checkout's parameters and results by those of a finished run; add to them those of a sweep.

    Raises:
        ValueError: before anything changes, if there is no such run, it has not finished, a run is at work, or there is an
            obstacle (`find_obstacle`); and if DVC cannot check out its results, with everything as before.
    """
    folder = locate_run(name)
    if obstacle := find_obstacle(name):
        raise ValueError(obstacle)
    added = _read_added(folder)
    with ExitStack() as stack:
        for path, where in ((LOCK_PATH, "here"), (folder / LOCK_PATH, "in that workspace")):
            if (held := try_lock(path)) is None:
                raise ValueError(f"a run is at work {where}; wait for its end, or cancel it")
            stack.enter_context(held)
        with chdir(folder):
            stale = list(dvc_graph.explain_stale())
        if stale:
            raise ValueError(f"{name} has not finished: {', '.join(stale)} would run; run it again, then promote it")
        if run_git("status", "--porcelain", "--", str(PARAMS_FILE)).strip():
            yield f"{PARAMS_FILE} as it was is kept in {recipes.keep_copy(name)}"
        _take_files(folder, added)
        if added:
            yield f"{PARAMS_FILE} lists what {name} measured too, and its results are here; git diff shows what changed"
            yield from _renew_table()
        else:
            files = f"{PARAMS_FILE} and {dvc_graph.LOCK_FILE}"
            yield f"{files} are those of {name}, and so are the results; git diff shows what changed"


def find_obstacle(name: str) -> str | None:
    """Return why `promote_run` would refuse a finished run: files here are not those with which it began. None if it would not.

    A changed dvc.lock is no obstacle, and no file is whose changes the run began with. Raises ValueError if there is no such run.
    """
    folder = locate_run(name)
    file = folder / STARTED_PARAMS
    started = file.read_text("utf-8") if file.exists() else run_git("show", f"HEAD:./{PARAMS_FILE}", cwd=folder)
    same_params = _strip_added(started, folder) == _strip_added(PARAMS_FILE.read_text("utf-8"), folder)
    entries = run_git("status", "--porcelain", "-z", "--untracked-files=no").split("\0")
    changed = [entry for entry in entries if entry and not _is_known(entry[3:], folder, same_params)]
    if changed:
        listed = "\n  ".join(changed)
        return f"files have changed since {name} began, expected none, so that nothing is lost; commit or stash them:\n  {listed}"
    if not same_params:
        return f"{PARAMS_FILE} of a later commit differs from that which {name} started with; run it again from here"
    return None


def _is_known(path: str, folder: Path, same_params: bool) -> bool:
    """Return whether a promotion loses nothing of a changed file."""
    if path == str(PARAMS_FILE):
        return same_params
    own_file, run_file = Path(path), folder / path
    if not (own_file.is_file() and run_file.is_file()):
        return own_file.exists() == run_file.exists()
    return path == str(dvc_graph.LOCK_FILE) or own_file.read_bytes() == run_file.read_bytes()


def _strip_added(text: str, folder: Path) -> Any:
    """Return params.yaml; of a sweep without the lists that it adds to, which another sweep may have added to meanwhile."""
    added = _read_added(folder)
    if not added:
        return text
    whole = YAML(typ="safe").load(text)
    for section, lists in added.items():
        for key in lists:
            whole.get(section, {}).pop(key, None)
    return whole


def _read_added(folder: Path) -> Sections:
    file = folder / ADDED
    found: Sections = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def _take_files(folder: Path, added: Sections) -> None:
    """Write both files and check out what they name. Raises ValueError if DVC cannot, with both as before."""
    files = (PARAMS_FILE, dvc_graph.LOCK_FILE)
    before = {file: file.read_bytes() if file.exists() else None for file in files}
    try:
        if added:
            recipes.write_sections(_join_sections(added))
        else:
            copy_file(folder / PARAMS_FILE, PARAMS_FILE)
        _merge_locks(folder / dvc_graph.LOCK_FILE, keep_last=bool(added))
        run_dvc("checkout", *(["--allow-missing"] if added else []))
    except BaseException:
        for file, content in before.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content)
        raise


def _join_sections(added: Sections) -> dict[str, dict[str, Any]]:
    now = load_params().model_dump(by_alias=True)
    return {
        section: {key: list(dict.fromkeys([*now[section][key], *names])) for key, names in lists.items()}
        for section, lists in added.items()
    }


def _merge_locks(run_lock: Path, keep_last: bool) -> None:
    """Write the entries of the run's dvc.lock into this one; not those of the last stages here, if `keep_last`.

    A sweep's report is of its own cells alone: the one here stays until it is made of both.
    """
    yaml, lock = YAML(typ="safe"), dvc_graph.LOCK_FILE
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    if not lock.exists():
        copy_file(run_lock, lock)
        return
    new, last = yaml.load(run_lock.read_text("utf-8")), _list_last_stages() if keep_last else set()
    with dvc_graph.open_repo(), atomic.write_file(lock) as temporary:
        whole = yaml.load(lock.read_text("utf-8"))
        kept = last & set(whole["stages"])
        whole["stages"] |= {name: entry for name, entry in new["stages"].items() if name not in kept}
        with temporary.open("w", encoding="utf-8") as file:
            yaml.dump(whole, file)


def _list_last_stages() -> set[str]:
    """Return the stages on which no other depends: the report."""
    upstream = dvc_graph.list_stages()
    return set(upstream) - {need for needs in upstream.values() for need in needs}


def _renew_table() -> Iterator[str]:
    """Make the report of old and new rows if all their cells are there, in seconds; else say which would run."""
    stale, last = dvc_graph.explain_stale(), _list_last_stages()
    if missing := [name for name in stale if name not in last]:
        yield f"the lists of both name {len(missing)} cells that neither has measured; `aerie run` does: {', '.join(missing)}"
        return
    if stale:
        dvc_graph.write_inputs()
    for name in stale:
        dvc_graph.reproduce_stage(name, lambda line: None)
        yield f"{name} is made of the rows that were here and those of the sweep"
