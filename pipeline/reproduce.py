"""Run a recipe and print its results beside the published ones; print what a run takes.

`stages.reproduce` knows models and results; it is run as a command, like every stage. Each function yields lines to print.
"""

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel, ConfigDict

from pipeline import dvc_graph, preflight, processes, recipes, workspaces
from stages.params import schema
from stages.params.recipe import Recipe
from stages.params.section import PARAMS_FILE
from stages.params.units import format_bytes, format_duration

HEAD = ("stage", "runs", "time", "disk", "GPU-hours")


class StageEstimate(BaseModel):
    """Time and disk of all stages with one name before the @; None where nothing is known."""

    model_config = ConfigDict(frozen=True)
    seconds: float | None = None
    gpu_hours: float | None = None
    disk_bytes: float = 0

    def format_figures(self) -> tuple[str, str, str]:
        time = "-" if self.seconds is None else format_duration(self.seconds)
        hours = "-" if self.gpu_hours is None else f"{self.gpu_hours:.2g}"
        return time, format_bytes(self.disk_bytes) if self.disk_bytes else "-", hours


class RunEstimate(BaseModel):
    """The size of a run, as `stages.reproduce.estimate` prints it."""

    model_config = ConfigDict(frozen=True)
    lines: list[str]
    disk_bytes: float
    gpu_hours: float
    weight_bytes: float  # of the target
    stages: dict[str, StageEstimate] = {}  # by the name in dvc.yaml before the @


def reproduce_recipe(name: str, keep: bool = False) -> Iterator[str]:
    """Write the recipe into params.yaml, bring every stage up to date and compare, as the only run in this workspace.

    Raises:
        ValueError: before anything is changed, if the recipe is not valid, or needs what is not here;
            at the end, if stages failed.
    """
    stale: list[str] | None = None
    with workspaces.hold_workspace(print) as held_files:
        yield from take_recipe(name, keep)
        stages = dvc_graph.list_stages()
        with processes.guard_run(held_files), processes.preload_stages():
            try:
                dvc_graph.run_all_stages(stages, groups=schema.load_params().group_served_cells(stages))
            except processes.StageError:  # which stage failed and which were skipped is printed
                stale = list(dvc_graph.explain_stale())
        yield from compare_recipe(name, keep)
    if stale is not None:
        raise ValueError(f"{len(stale)} of {len(stages) - 1} stages failed: {', '.join(stale)}; see above, run again")


def take_recipe(name: str, keep: bool = False) -> Iterator[str]:
    """Write the recipe into params.yaml after printing what it takes. Raises ValueError as `reproduce_recipe` beforehand."""
    with open_recipe(name, keep) as (recipe, path, file, _):
        list_stages_with(file)
        estimate = estimate_params(path, file)
        yield from [*estimate.lines, ""]
        needs = preflight.check_recipe(
            name, recipe, schema.load_params(file), estimate.disk_bytes, estimate.weight_bytes
        )
        preflight.refuse_unmet(name, needs)
    yield from recipes.use_recipe(name, keep, keep_own=False)


def describe_dry_run(name: str, keep: bool = False) -> Iterator[str]:
    """Yield what would run and what it takes. Raises ValueError if the recipe is not valid."""
    with open_recipe(name, keep) as (recipe, path, file, changes):
        upstream = list_stages_with(file)
        estimate = estimate_params(path, file)
        needs = preflight.check_recipe(
            name, recipe, schema.load_params(file), estimate.disk_bytes, estimate.weight_bytes
        )
    yield f"{len(upstream)} stages:"
    for stage, parts in itertools.groupby(sorted(upstream), lambda name: name.partition("@")[0]):
        names = [part for name in parts if (part := name.partition("@")[2])]
        yield f"  {stage}" + (f" ({len(names)}): {', '.join(names)}" if names else "")
    yield f"{len(changes)} keys of params.yaml would change"
    yield from estimate.lines
    yield "what it needs of this machine:"
    yield from map(str, needs)


def compare_recipe(name: str, keep: bool = False) -> Iterator[str]:
    """Yield the table of the results in results/ beside the published ones."""
    with open_recipe(name, keep) as (_, path, file, _):
        table = processes.run_silent("stages.reproduce.compare", path, file)
    yield from table.rstrip("\n").split("\n")


def list_stages_with(file: Path) -> dict[str, list[str]]:
    """Return every stage of dvc.yaml but `inputs`, with its upstream stages, with `file` as params.yaml; changes nothing here."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        (root / ".dvc").mkdir()
        (root / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
        shutil.copy("dvc.yaml", root)
        shutil.copy(file, root / PARAMS_FILE)
        found = dvc_graph.list_stages(root)
    return {name: needed for name, needed in found.items() if name != dvc_graph.INPUTS_STAGE}


def estimate_params(recipe: Path | None, file: Path, gpu: str = "h200") -> RunEstimate:
    """Return the size of a run with the parameters in `file`, whose rows are as long as the recipe's or may be.

    `gpu` is a key of GPUS in stages/reproduce/estimate.py.

    Raises:
        ValueError: nothing is recorded of the target's shape, or the parameters are not valid.
    """
    printed = processes.run_silent("stages.reproduce.estimate", recipe or "-", file, gpu)
    return RunEstimate.model_validate_json(printed)


@contextmanager
def open_recipe(name: str, keep: bool = False) -> Iterator[tuple[Recipe, Path, Path, list[str]]]:
    """Yield the recipe, its path, a file of params.yaml with its keys, and a line for each key that changed.

    Raises ValueError as `recipes.merge_recipe`, and where the recipe has no block that describes it.
    """
    path = recipes.locate_recipe(name)
    recipe, _ = schema.read_recipe(path)
    if recipe is None:
        raise ValueError(f"{path} has no block `recipe`, expected one that says what it reproduces; see recipes/")
    with recipes.merge_recipe(name, keep) as (file, changes):
        yield recipe, path, file, changes


# What a run takes


def describe_estimate(recipe: str | None, params_file: Path | None, gpu: str) -> Iterator[str]:
    """Yield the table of stages, the totals, and how each figure was computed.

    Raises:
        ValueError: the recipe or the parameters are not valid, or nothing is recorded of the target's shape.
    """
    if recipe and params_file:
        raise ValueError("expected a recipe or --params FILE, found both")
    with ExitStack() as stack:
        path, file = None, params_file or PARAMS_FILE
        if recipe:
            _, path, file, _ = stack.enter_context(open_recipe(recipe))
        params = schema.load_params(file)
        estimate = estimate_params(path, file, gpu)
        runs = Counter(name.partition("@")[0] for name in list_stages_with(file))
    rows = [(name, str(n), *estimate.stages.get(name, StageEstimate()).format_figures()) for name, n in runs.items()]
    times = [found.seconds for found in estimate.stages.values() if found.seconds is not None]
    total = StageEstimate(
        seconds=sum(times) if times else None, gpu_hours=estimate.gpu_hours or None, disk_bytes=estimate.disk_bytes
    )
    table = [HEAD, *rows, ("together", str(runs.total()), *total.format_figures())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    yield from (f"target {params.target.model}, {runs.total()} stages", "")
    for name, *figures in table:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])])
    yield from ("", *estimate.lines)
    if missing := [path for path in preflight.list_files(params).values() if not Path(path).exists()]:
        yield f"to get before the run: {', '.join(missing)}"
