"""Predicted speedups of every replayed tree, compared with what cells measured, and what to launch.

A cost is the record of a timing grid (cells/timing_grid.py), of the torch engine or of a server's: docs/cost.md.
"""

import math
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.cells import prediction, prediction_check, table
from stages.cells.prediction import DescribeLaunch, LaunchAdvice, PredictedSpeedup, SpeedupConditions, can_tell
from stages.cells.prediction_check import ComparedPrediction
from stages.cells.record import DraftSampling, limit_draft_sampling
from stages.cells.replay_records import ReplayedTree, select_temperature
from stages.cells.table import ResultRow, TableLine
from stages.cells.timing_grid import TimingGrid
from stages.params.engines import is_in_process
from stages.reporting import plots
from stages.reporting.plots import PlotPoint
from stages.reporting.text import align_columns, format_interval, format_number, format_tree

MAX_TABLE_TREES = 8  # trees of a table on the page
NO_INTERVAL = "none"  # one conversation was replayed, or the plain step was timed in one repeat


@dataclass(frozen=True)
class CostPrediction:
    costs: list[TimingGrid]  # of all engines
    rows: list[PredictedSpeedup]
    known: list[PredictedSpeedup]  # the same, with measured speedups in the place of predicted ones
    launch: list[LaunchAdvice]
    compared: list[ComparedPrediction]
    remarks: list[str]  # what isn't predicted or compared, and why


def predict_and_compare(
    costs: list[TimingGrid],
    lines: list[TableLine],
    replays: Mapping[str, list[ReplayedTree]],
    replayable: Collection[str],
    find_shapes: Callable[[str], str],
    temperatures: Iterable[float],
    draft_sampling: DraftSampling,
    describe_launch: DescribeLaunch,
    doubted: Collection[str] = (),
) -> CostPrediction:
    """Return the predictions by every cost whose stage is not `doubted`, and how measured lines compare with them.

    `replayable` are the workloads whose prompts were replayed; `find_shapes` returns the same of drafts of the same shapes;
    `temperatures` and `draft_sampling` are those of the torch engine's workloads (a served cost has its own); `describe_launch`
    as in prediction.choose_launches.
    """
    by_load: dict[tuple[Any, ...], list[TimingGrid]] = {}
    for cost in (cost for cost in costs if cost.stage not in doubted):
        by_load.setdefault((cost.engine, cost.workload, cost.max_new_tokens), []).append(cost)
    rows: list[PredictedSpeedup] = []
    remarks: list[str] = []
    for timed in by_load.values():
        for checkpoint, trees in replays.items():
            if nearest := _find_cost(checkpoint, timed, find_shapes):
                is_torch = is_in_process(nearest.engine)
                drafts = draft_sampling if is_torch else nearest.draft_sampling
                for temperature in temperatures if is_torch else [nearest.settings["temperature"]]:
                    selection = nearest, checkpoint, temperature, trees, drafts
                    rows += prediction.predict_speedups(*selection)
                    remarks += _explain_left_out(*selection)
    torch_costs = [cost for cost in costs if is_in_process(cost.engine)]
    remarks += [
        f"{name}: the torch engine has timed no draft of its shapes, so there are no predictions by its costs and no flags; add "
        "it to time_cycles.checkpoints"
        for name in replays
        if not _find_cost(name, torch_costs, find_shapes)
    ]

    def find_cost(row: ResultRow) -> TimingGrid | None:
        load = (None, None) if row.in_turns else (row.workload, row.max_new_tokens)
        return _find_cost(str(row.checkpoint), by_load.get((row.engine, *load), []), find_shapes)

    compared, left_out = prediction_check.compare_lines(lines, replays, find_cost)
    for reason, members in left_out.items():
        if reason.startswith(prediction_check.OTHER_MACHINE):
            cells = dict.fromkeys(f"{line.row.workload}, {line.row.checkpoint}" for line in members)
            remarks += [f"{cell}: {reason}; run one of the two again" for cell in cells]
    known = table.overrule_predictions(rows, (line.row for line in lines), replayable)
    launch = prediction.choose_launches(known, describe_launch)
    return CostPrediction(costs, rows, known, launch, compared, remarks)


def _find_cost(checkpoint: str, costs: list[TimingGrid], find_shapes: Callable[[str], str]) -> TimingGrid | None:
    """Return the cost of a draft of the checkpoint's shapes; None without any."""
    return next((cost for cost in costs if find_shapes(cost.checkpoint) == find_shapes(checkpoint)), None)


def _explain_left_out(
    cost: TimingGrid, checkpoint: str, temperature: float, trees: list[ReplayedTree], draft_sampling: DraftSampling
) -> list[str]:
    name, replayed = describe_cost(cost), select_temperature(trees, temperature, draft_sampling)
    if not replayed:
        drafts = " with sampled drafts" if limit_draft_sampling(draft_sampling, temperature) == "sampled" else ""
        return [f"{name}: {checkpoint} was not replayed at temperature {temperature:g}{drafts}, so it has no tau there"]
    inside = [any(cost.covers(tree.shape, step.batch) for step in cost.plain) for tree in replayed]
    if outside := inside.count(False):
        axes = [f"{axis} {low}" + (f" to {high}" if high > low else "") for axis, (low, high) in cost.bounds.items()]
        return [
            f"{name}: {outside} of {len(replayed)} trees of {checkpoint} lie outside what was timed ({', '.join(axes)})"
        ]
    return []


def describe_cost(row: TimingGrid | PredictedSpeedup) -> str:
    """Return the name of a cost, or of the cost that a prediction was made by, in words."""
    load = f", {row.workload}, {row.max_new_tokens} tokens" if row.workload else ""
    drawn = isinstance(row, PredictedSpeedup) and row.temperature
    measured = ", measured" if isinstance(row, LaunchAdvice) and row.measured else ""
    return f"{row.engine} engine{load}{f', temperature {drawn:g}' if drawn else ''}{measured}"


def describe_needs(row: LaunchAdvice) -> str:
    """Return what the flags need: a version of the engine, or a file that cells made for themselves; empty where nothing."""
    files = [Path(word) for word in row.flags if word.endswith(".gguf")]
    made = [f"the file: aerie export {row.checkpoint} --type {file.stem.rpartition('-')[2]}" for file in files]
    return ", ".join([*([f"{row.engine} {row.min_version} or later"] if row.min_version else []), *made])


# The terminal


def format_launch_table(launch: list[LaunchAdvice]) -> list[str]:
    """Return what to launch as aligned lines, each followed by its flags and the version that they need."""
    if not launch:
        return []
    rows = [
        {
            "launch": row.engine, "concurrency": f"{row.concurrency:g}", "speculate": format_advice(row),
            "tree": format_tree(row.shape.name), "checkpoint": row.checkpoint, "tau": format_number(row.tau),
            "C": format_number(row.C), "speedup": f"{row.speedup:.2f}x",
            "95% interval": format_interval(row.low, row.high, NO_INTERVAL), "costs of": describe_cost(row),
        }
        for row in launch
    ]  # fmt: skip
    heading, *lines = align_columns([tuple(rows[0]), *(tuple(row.values()) for row in rows)])
    shown = ["When to speculate, and how: predicted, but where the last column says measured", heading]
    for line, row in zip(lines, launch, strict=True):
        needs = describe_needs(row)
        shown += [line, *([f"    {shlex.join(row.flags)}{f'    # {needs}' if needs else ''}"] if row.flags else [])]
    return shown


def format_advice(row: LaunchAdvice) -> str:
    """Return whether to speculate; an interval is needed to tell, and one that says something."""
    return "yes" if row.enable else "no" if can_tell(row.low, row.high) else "can't tell"


# The page


@dataclass(frozen=True)
class CostsPage:
    """The content of templates/costs.html.j2."""

    found: CostPrediction
    tops: list[tuple[int, list[PredictedSpeedup]]]  # at each load: how many trees were predicted, and the first of them
    disagreeing: list[ComparedPrediction]  # beyond both intervals
    undecided: int  # cells that can't be compared for want of an interval
    rms: float  # how far predicted speedups are from measured ones, as a share
    bias: float  # above 0: too high on the whole
    svg: Any


def build_costs_page(found: CostPrediction) -> CostsPage:
    compared = found.compared
    errors = [math.log(row.predicted.speedup / row.measured.speedup) for row in compared] or [0.0]
    draw = partial(draw_predictions, rows=compared)
    by_load: dict[SpeedupConditions, list[PredictedSpeedup]] = {}
    for row in found.known:
        by_load.setdefault(row.conditions, []).append(row)
    return CostsPage(
        found,
        tops=[(len(rows), _take_fastest(rows)) for rows in by_load.values()],
        disagreeing=[row for row in compared if row.agrees is False],
        undecided=sum(row.agrees is None for row in compared),
        rms=math.sqrt(fmean(error**2 for error in errors)),
        bias=math.exp(fmean(errors)) - 1,
        svg=plots.render_svg(draw, "Predicted against measured speedup") if compared else None,
    )


def _take_fastest(rows: list[PredictedSpeedup]) -> list[PredictedSpeedup]:
    """Return the fastest MAX_TABLE_TREES trees, and the fastest of each checkpoint that none of these is of."""
    ordered = sorted(rows, key=lambda row: -row.speedup)
    firsts = {row.checkpoint: row for row in reversed(ordered)}
    return [row for at, row in enumerate(ordered) if at < MAX_TABLE_TREES or row is firsts[row.checkpoint]]


def draw_predictions(axes: Any, rows: list[ComparedPrediction]) -> list[PlotPoint]:
    """Draw predicted against measured speedups with both intervals, a colour per engine."""
    ends = [side.speedup for row in rows for side in (row.predicted, row.measured)]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=plots.INK_COLOUR, linewidth=0.8)
    for engine, colour in zip(dict.fromkeys(each.row.engine for each in rows), plots.SERIES_COLOURS, strict=False):
        group = [(each.measured, each.predicted) for each in rows if each.row.engine == engine]
        xs, ys = [measured.speedup for measured, _ in group], [predicted.speedup for _, predicted in group]
        axes.plot(xs, ys, "o", color=colour, markersize=3, label=engine)
        for measured, predicted in group:
            if predicted.low is not None:
                axes.vlines(measured.speedup, predicted.low, predicted.high, color=colour, lw=0.7)
            if measured.low is not None:
                axes.hlines(predicted.speedup, measured.low, measured.high, color=colour, lw=0.7)
    axes.set(xlabel="measured speedup of decoding", ylabel="predicted")
    plot_points = []
    for each in rows:
        x, y = each.measured.speedup, each.predicted.speedup
        name = f"{format_tree(str(each.row.tree))}, {each.row.checkpoint}"
        plot_points.append(PlotPoint(x, y, f"{name}: measured {x:.2f}×, predicted {y:.2f}×"))
    return plot_points
