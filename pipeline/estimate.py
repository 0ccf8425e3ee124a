"""Print the time, disk and GPU-hours of a run by stage: `aerie estimate`.

A time is, in this order: measured here with the same parameters; arithmetic of `stages.reproduce.estimate`; measured here with
other parameters of the same target; recorded in recipes/measured/, with date and machine. Every row says which.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipeline import dvc_graph, preflight, reproduce
from stages.params import schema, stage_inputs
from stages.params.recipe import RECIPES_FOLDER
from stages.params.section import PARAMS_FILE
from stages.params.units import format_bytes
from stages.telemetry import stage_log

MEASURED_FOLDER = RECIPES_FOLDER / "measured"
GPUS = ("h200", "h100")
HEAD = ("stage", "runs", "time", "disk", "GPU-hours", "where the time comes from")
UNKNOWN = "-"


class MeasuredStages(BaseModel):
    """Seconds of stages on another machine: a file of recipes/measured/."""

    model_config = ConfigDict(frozen=True)
    target: str
    date: str
    machine: str
    seconds: dict[str, float]  # by the whole name in dvc.yaml


@dataclass(frozen=True)
class StageTime:
    seconds: float
    gpu_hours: float | None
    origin: str


@dataclass(frozen=True)
class MeasuredRun:
    """The last run of a stage here, and whether its parameters were the ones asked about."""

    run: stage_log.StageRun
    is_same: bool

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.run.ended_ns / 1e9, UTC).date().isoformat()


def describe_estimate(recipe: str | None, params_file: Path | None, gpu: str) -> Iterator[str]:
    """Yield the table of stages, the totals, and how the arithmetic was done.

    Raises:
        ValueError: the recipe, the parameters or the GPU's name are not valid.
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
        upstream = reproduce.list_stages_with(file)
        size, problem = _try_estimate(path, file, gpu)
        measured = find_measured_runs(upstream, params)
    yield f"target {params.target.model}, {len(upstream)} stages"
    yield ""
    yield from _format_table(list(_build_rows(upstream, size, measured, params.target.model)))
    yield ""
    yield from size.lines or [f"no arithmetic: {problem}"]
    if missing := [path for path in preflight.list_files(params).values() if not Path(path).exists()]:
        yield f"to get before the run: {', '.join(missing)}"


def _try_estimate(recipe: Path | None, file: Path, gpu: str) -> tuple[reproduce.RunEstimate, str]:
    """Return the estimate and ""; if it cannot be made, an empty one and the reason."""
    try:
        return reproduce.estimate_params(recipe, file, gpu), ""
    except ValueError as error:
        empty = reproduce.RunEstimate(lines=[], disk_bytes=0, download_bytes=0, gpu_hours=0, weight_bytes=0)
        return empty, str(error).splitlines()[-1]


def find_measured_runs(upstream: dict[str, list[str]], params: schema.Params) -> dict[str, MeasuredRun]:
    """Return the last logged run of each stage, if the stages that last ran here are those of the same target.

    A run has the same parameters if it was made with them, as was all it depends on.
    """
    try:
        recorded = dvc_graph.read_recorded_inputs()
    except ValueError:  # a dvc.lock that `aerie run` will repair
        return {}
    wanted = {one.name: stage_inputs.list_values(params, one) for one in stage_inputs.list_instances(params)}
    same = dict[str, bool]()
    for stage, needed in upstream.items():  # in the order in which they run
        is_same = stage in recorded and recorded[stage]["params"] == wanted.get(stage)
        same[stage] = is_same and all(same.get(name, True) for name in needed)
    if not same.get("prepare_target"):
        return {}
    return {run.stage: MeasuredRun(run, same[run.stage]) for run in stage_log.read_log() if run.stage in same}


def _build_rows(
    upstream: dict[str, list[str]], size: reproduce.RunEstimate, measured: dict[str, MeasuredRun], target: str
) -> Iterator[tuple[str, ...]]:
    """Yield a row of text for each kind of stage, in the order in which they run, and the totals."""
    kinds = dict.fromkeys(name.partition("@")[0] for name in upstream)
    seconds = hours = 0.0
    unknown = False
    for kind in kinds:
        names = [name for name in upstream if name.partition("@")[0] == kind]
        found = size.stages.get(kind)
        time = _find_time(names, found, size.origin, measured, target)
        unknown |= time is None
        seconds += time.seconds if time else 0
        hours += (time.gpu_hours or 0) if time else 0
        yield (
            kind,
            str(len(names)),
            _format_seconds(time.seconds) if time else UNKNOWN,
            _format_size(found.disk_bytes if found else 0),
            f"{time.gpu_hours:.2g}" if time and time.gpu_hours is not None else UNKNOWN,
            time.origin if time else "not estimated",
        )
    known = "one stage after another" + (", those not estimated left out" if unknown else "")
    total_hours = f"{hours:.2g}" if hours else UNKNOWN
    yield "together", str(len(upstream)), _format_seconds(seconds), _format_size(size.disk_bytes), total_hours, known


def _find_time(
    names: list[str],
    found: reproduce.StageEstimate | None,
    origin: str,
    measured: dict[str, MeasuredRun],
    target: str,
) -> StageTime | None:
    """Return the time of these stages together and where it comes from; None if nothing is known."""
    measured_runs = [measured[name] for name in names if name in measured]
    same = [measured_run for measured_run in measured_runs if measured_run.is_same]
    if same:
        return _sum_runs(names, same, "measured here")
    if found and found.seconds is not None:
        return StageTime(found.seconds, found.gpu_hours, origin)
    if measured_runs:
        return _sum_runs(names, measured_runs, "measured here with other parameters")
    return _find_recorded(names, target)


def _sum_runs(names: list[str], runs: list[MeasuredRun], how: str) -> StageTime:
    """Return the sum over the stages; one without a run of its own counts as the mean of the others."""
    seconds = sum(measured.run.seconds for measured in runs) / len(runs) * len(names)
    gpu_seconds = sum(measured.run.seconds * len(measured.run.gpus) for measured in runs) / len(runs) * len(names)
    origin = f"{how} on {max(measured.date for measured in runs)}"
    if len(runs) < len(names):
        origin += f", {len(runs)} of {len(names)}; the others counted as their mean"
    return StageTime(seconds, gpu_seconds / 3600 if gpu_seconds else None, origin)


def _find_recorded(names: list[str], target: str) -> StageTime | None:
    """Return the seconds of recipes/measured/, if a file has the same target and one of these stages."""
    for file in sorted(MEASURED_FOLDER.glob("*.json")):
        recorded = MeasuredStages.model_validate(json.loads(file.read_text(encoding="utf-8")))
        known = [recorded.seconds[name] for name in names if name in recorded.seconds]
        if recorded.target == target and known:
            origin = f"measured on {recorded.date}, {recorded.machine}, with the defaults"
            return StageTime(sum(known) / len(known) * len(names), None, origin)
    return None


def _format_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def _format_size(size: float) -> str:
    return format_bytes(size) if size else UNKNOWN


def _format_table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; numbers are right-aligned."""
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    for row in (HEAD, *rows):
        padded = zip(row, widths, strict=True)
        cells = [
            cell.rjust(width) if 0 < n < len(HEAD) - 1 else cell.ljust(width) for n, (cell, width) in enumerate(padded)
        ]
        yield "  ".join(cells).rstrip()
