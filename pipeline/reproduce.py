"""Run a recipe and print its results beside the published ones.

`stages.reproduce` knows models and results; it is run as a command, like every stage. Each function yields lines to print.
"""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel, ConfigDict

from pipeline import dvc_graph, processes, recipes, workspaces
from stages.params import schema
from stages.params.section import PARAMS_FILE

GIB = 2**30


class RunEstimate(BaseModel):
    """What `stages.reproduce.estimate` prints: the size of a run."""

    model_config = ConfigDict(frozen=True)
    lines: list[str]
    disk_bytes: float
    download_bytes: float
    gpu_hours: float
    missing: list[str]  # files that the user brings


def reproduce_recipe(name: str) -> Iterator[str]:
    """Write the recipe into params.yaml, bring every stage up to date and compare, as the only run in this workspace.

    Raises:
        ValueError: before anything is changed, if the recipe is not valid, files are missing or the disk is too small;
            at the end, if stages failed.
    """
    with workspaces.exclusive_run(print) as held_files:
        yield from take_recipe(name)
        upstream, failed = dvc_graph.list_stages(), list[str]()
        with processes.guard_run(held_files):
            yield from _run_each(upstream, failed)
        yield from compare_recipe(name)
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(upstream)} stages failed: {', '.join(failed)}; see above, mend it, run again"
        )


def _run_each(upstream: dict[str, list[str]], failed: list[str]) -> Iterator[str]:
    """Bring each stage up to date that does not depend on a failed one; append those that fail or cannot run to `failed`."""
    for stage, needs in upstream.items():
        if lacking := [need for need in needs if need in failed]:
            failed.append(stage)
            yield f"{stage}: not run, for it needs {', '.join(lacking)}"
            continue
        try:
            outcome = dvc_graph.reproduce_stage(stage, print)
        except processes.StageError as error:
            failed.append(stage)
            yield str(error)
            continue
        yield f"{stage}: {outcome}"


def take_recipe(name: str) -> Iterator[str]:
    """Write the recipe into params.yaml after printing what it takes. Raises ValueError as `reproduce_recipe` beforehand."""
    path = _check_described(name)
    with recipes.merge_recipe(name) as (file, _):
        list_stages_with(file)
        estimate = estimate_params(path, file)
        yield from [*estimate.lines, ""]
        _check_feasible(estimate)
    yield from recipes.use_recipe(name)


def describe_dry_run(name: str) -> Iterator[str]:
    """Yield what would run and what it takes. Raises ValueError if the recipe is not valid."""
    path = _check_described(name)
    with recipes.merge_recipe(name) as (file, changes):
        upstream = list_stages_with(file)
        estimate = estimate_params(path, file)
    yield f"{len(upstream)} stages:"
    for stage, parts in itertools.groupby(sorted(upstream), lambda name: name.partition("@")[0]):
        names = [part for name in parts if (part := name.partition("@")[2])]
        yield f"  {stage}" + (f" ({len(names)}): {', '.join(names)}" if names else "")
    yield f"{len(changes)} keys of params.yaml would change"
    yield from estimate.lines


def compare_recipe(name: str) -> Iterator[str]:
    """Yield the table of the results in results/ beside the published ones."""
    path = _check_described(name)
    with recipes.merge_recipe(name) as (file, _):
        table = _run_reproduce_module("compare", str(path), str(file))
    yield table.rstrip("\n")


def list_stages_with(file: Path) -> dict[str, list[str]]:
    """Return every stage of dvc.yaml with its upstream stages, with `file` as params.yaml; changes nothing here."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        (root / ".dvc").mkdir()
        (root / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
        shutil.copy("dvc.yaml", root)
        shutil.copy(file, root / PARAMS_FILE)
        return dvc_graph.list_stages(root)


def estimate_params(recipe: Path | None, file: Path) -> RunEstimate:
    """Return the size of a run with the parameters in `file`, whose rows are as long as the recipe's or may be.

    Raises:
        ValueError: nothing is recorded of the target's shape, or the parameters are not valid.
    """
    return RunEstimate.model_validate_json(_run_reproduce_module("estimate", str(recipe or "-"), str(file)))


def _check_described(name: str) -> Path:
    """Return the recipe's path. Raises ValueError if it has no block that describes it."""
    path = recipes.locate_recipe(name)
    if schema.read_recipe(path)[0] is None:
        raise ValueError(f"{path} has no block `recipe`, expected one that says what it reproduces; see recipes/")
    return path


def _check_feasible(estimate: RunEstimate) -> None:
    if estimate.missing:
        raise ValueError(
            f"{', '.join(estimate.missing)} not found; the recipe says where they come from: get them first"
        )
    free = shutil.disk_usage(".").free
    if estimate.disk_bytes > free:
        raise ValueError(
            f"about {estimate.disk_bytes / GIB:.1f} GiB will be written here, and {free / GIB:.1f} GiB are free; make room, "
            "or lower sample_target.train_rows, or set extract_hiddens.online"
        )


def _run_reproduce_module(module: str, *words: str) -> str:
    """Return what a module of `stages.reproduce` prints. Raises ValueError with its message if it fails."""
    command = [sys.executable, "-m", f"stages.reproduce.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("aerie: "))
    return done.stdout
