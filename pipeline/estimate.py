"""Print the time, disk and GPU-hours of a run by stage, as `stages.reproduce.estimate` computes them: `aerie estimate`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from pipeline import preflight, reproduce
from stages.params import schema
from stages.params.section import PARAMS_FILE
from stages.params.units import format_bytes

GPUS = ("h200", "h100")
HEAD = ("stage", "runs", "time", "disk", "GPU-hours")
UNKNOWN = "-"


def describe_estimate(recipe: str | None, params_file: Path | None, gpu: str) -> Iterator[str]:
    """Yield the table of stages, the totals, and how each figure was computed.

    Raises:
        ValueError: the recipe, the parameters or the GPU's name are not valid, or nothing is recorded of the target's shape.
    """
    if gpu not in GPUS:
        raise ValueError(f"--gpu is {gpu}, expected one of {', '.join(GPUS)}: rates of others were not measured")
    if recipe and params_file:
        raise ValueError("expected a recipe or --params FILE, found both")
    with ExitStack() as stack:
        path, file = None, params_file or PARAMS_FILE
        if recipe:
            path, file, _ = stack.enter_context(reproduce.open_recipe(recipe))
        params = schema.load_params(file)
        estimate = reproduce.estimate_params(path, file, gpu)
        runs = Counter(name.partition("@")[0] for name in reproduce.list_stages_with(file))
    yield f"target {params.target.model}, {runs.total()} stages"
    yield ""
    yield from _format_table([HEAD, *_build_rows(runs, estimate)])
    yield ""
    yield from estimate.lines
    if missing := [path for path in preflight.list_files(params).values() if not Path(path).exists()]:
        yield f"to get before the run: {', '.join(missing)}"


def _build_rows(runs: Counter[str], estimate: reproduce.RunEstimate) -> Iterator[tuple[str, ...]]:
    """Yield a row of text for each kind of stage, in the order in which they run, and the totals."""
    for stage, count in runs.items():
        found = estimate.stages.get(stage) or reproduce.StageEstimate(seconds=None, gpu_hours=None, disk_bytes=0)
        yield stage, str(count), *_format_figures(found)
    times = [found.seconds for found in estimate.stages.values() if found.seconds is not None]
    together = reproduce.StageEstimate(
        seconds=sum(times) if times else None, gpu_hours=estimate.gpu_hours or None, disk_bytes=estimate.disk_bytes
    )
    yield "together", str(runs.total()), *_format_figures(together)


def _format_figures(found: reproduce.StageEstimate) -> tuple[str, str, str]:
    hours = UNKNOWN if found.gpu_hours is None else f"{found.gpu_hours:.2g}"
    return _format_seconds(found.seconds), format_bytes(found.disk_bytes) if found.disk_bytes else UNKNOWN, hours


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def _format_table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; all but the first column are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])])
