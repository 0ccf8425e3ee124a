"""Run a recipe, and lay what comes of it beside what was published.

What knows models and results is `stages.reproduce`, run as a command like every stage. Each function yields lines to print.
"""

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline import dvc_graph, recipes, workspaces
from stages.params import schema
from stages.params.section import PARAMS_FILE

GIB = 2**30


def reproduce_recipe(name: str) -> Iterator[str]:
    """Take the recipe into params.yaml, bring every stage up to date, compare; alone in this workspace, as any run.

    Raises:
        ValueError: before anything is changed, where the recipe is not valid, files are missing or the disk is too small;
            at the end, where stages failed.
    """
    with workspaces.one_run(print) as held:
        yield from take_recipe(name)
        needs, failed = dvc_graph.list_stages(), list[str]()
        with dvc_graph.guard_run(held):
            yield from _run_each(needs, failed)
        yield from compare_recipe(name)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(needs)} stages failed: {', '.join(failed)}; see above, mend it, run again"
        )


def _run_each(needs: dict[str, list[str]], failed: list[str]) -> Iterator[str]:
    """Bring each stage up to date, but those that need one that failed; `failed` then has their names."""
    for stage, upstream in needs.items():
        if lacking := [one for one in upstream if one in failed]:
            failed.append(stage)
            yield f"{stage}: not run, for it needs {', '.join(lacking)}"
            continue
        try:
            outcome = dvc_graph.reproduce_stage(stage, print)
        except dvc_graph.StageError as error:
            failed.append(stage)
            yield str(error)
            continue
        yield f"{stage}: {outcome}"


def take_recipe(name: str) -> Iterator[str]:
    """Take the recipe into params.yaml, after saying what it would take. Raises ValueError as `reproduce_recipe` beforehand."""
    _check_described(name)
    with recipes.merge_recipe(name) as (file, _):
        list_stages_with(file)
        estimate = _run_estimate(name, file)
        yield from [*estimate["lines"], ""]
        _check_feasible(estimate)
    yield from recipes.use_recipe(name)


def describe_dry_run(name: str) -> Iterator[str]:
    """What would run, and what it would take. Raises ValueError where the recipe is not valid."""
    _check_described(name)
    with recipes.merge_recipe(name) as (file, changes):
        needs = list_stages_with(file)
        estimate = _run_estimate(name, file)
    yield f"{len(needs)} stages:"
    for stage, parts in itertools.groupby(sorted(needs), lambda name: name.partition("@")[0]):
        names = [part for name in parts if (part := name.partition("@")[2])]
        yield f"  {stage}" + (f" ({len(names)}): {', '.join(names)}" if names else "")
    yield f"{len(changes)} keys of params.yaml would change"
    yield from estimate["lines"]


def compare_recipe(name: str) -> Iterator[str]:
    """The table, from what lies in results/."""
    _check_described(name)
    with recipes.merge_recipe(name) as (file, _):
        table = _run_reproduce_module("compare", str(recipes.locate_recipe(name)), str(file))
    yield table.rstrip("\n")


def list_stages_with(file: Path) -> dict[str, list[str]]:
    """Every stage of dvc.yaml, with `file` in the place of params.yaml, and what it needs; nothing here is touched."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        (root / ".dvc").mkdir()
        (root / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
        shutil.copy("dvc.yaml", root)
        shutil.copy(file, root / PARAMS_FILE)
        return dvc_graph.list_stages(root)


def _check_described(name: str) -> None:
    """Raises ValueError where the recipe doesn't say what it reproduces."""
    path = recipes.locate_recipe(name)
    if schema.read_recipe(path)[0] is None:
        raise ValueError(f"{path} has no block `recipe`, expected one that says what it reproduces; see recipes/")


def _run_estimate(name: str, file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_run_reproduce_module("estimate", str(recipes.locate_recipe(name)), str(file)))
    return found


def _check_feasible(estimate: dict[str, Any]) -> None:
    if missing := estimate["missing"]:
        raise ValueError(f"{', '.join(missing)} not found; the recipe says where they come from: get them first")
    free = shutil.disk_usage(".").free
    if estimate["disk_bytes"] > free:
        raise ValueError(
            f"about {estimate['disk_bytes'] / GIB:.1f} GiB will be written here, and {free / GIB:.1f} GiB are free; make room, "
            "or lower sample_target.train_rows, or set extract_hiddens.online"
        )


def _run_reproduce_module(what: str, *words: str) -> str:
    """What `stages.reproduce` prints. Raises ValueError with its message, where it refuses."""
    command = [sys.executable, "-m", f"stages.reproduce.{what}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("aerie: "))
    return done.stdout
