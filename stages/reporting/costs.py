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
from stages.cells.prediction import DescribeLaunch, LaunchAdvice, PredictedSpeedup, SpeculationLimit, SpeedupConditions
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
LAUNCH_HEADINGS = (
    "launch", "concurrency", "speculate", "tree", "checkpoint", "tau", "C", "speedup", "95% interval", "costs of",
)  # fmt: skip


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
    bounds = prediction.get_grid_bounds(cost)
    inside = [
        any(prediction.is_inside_grid(bounds, tree.shape, step.batch) for step in cost.plain) for tree in replayed
    ]
    if outside := inside.count(False):
        axes = ", ".join(
            f"{axis} {low}" + (f" to {high}" if high > low else "") for axis, (low, high) in bounds.items()
        )
        return [f"{name}: {outside} of {len(replayed)} trees of {checkpoint} lie outside what was timed ({axes})"]
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
        (
            row.engine, f"{row.concurrency:g}", format_advice(row), format_tree(row.shape.name), row.checkpoint,
            format_number(row.tau), format_number(row.C), f"{row.speedup:.2f}x",
            format_interval(row.low, row.high, NO_INTERVAL), describe_cost(row),
        )
        for row in launch
    ]  # fmt: skip
    heading, *lines = align_columns([LAUNCH_HEADINGS, *rows])
    shown = ["When to speculate, and how: predicted, but where the last column says measured", heading]
    for line, row in zip(lines, launch, strict=True):
        needs = describe_needs(row)
        shown += [line, *([f"    {shlex.join(row.flags)}{f'    # {needs}' if needs else ''}"] if row.flags else [])]
    shown += [describe_limit(limit) for limit in prediction.find_limits(launch)]
    return shown


def describe_limit(limit: SpeculationLimit) -> str:
    """Return up to which concurrency speculation is worth enabling, in words."""
    load = f", {limit.workload}, {limit.max_new_tokens} tokens" if limit.workload else ""
    first, last = limit.concurrencies[0], limit.concurrencies[-1]
    enabled, undecided = (", ".join(map(str, caps)) for caps in (limit.enabled, limit.undecided))
    if limit.undecided:
        which = "every concurrency" if limit.undecided == limit.concurrencies else f"{undecided} at once"
        advice = f"can't tell at {which}: no interval, or too wide a one (repeats: 3, more trees)"
        advice += f"; speculate at {enabled}" if enabled else ""
    elif limit.off_above == 0:
        advice = f"leave speculation off: from {first} to {last} at once no tree's interval lies above 1"
    elif limit.off_above is not None:
        beyond = next(cap for cap in limit.concurrencies if cap > limit.off_above)
        advice = f"turn speculation off above {limit.off_above} at once: at {beyond} no tree's interval lies above 1"
    elif limit.enabled == limit.concurrencies:
        advice = f"speculate at every concurrency that was timed, {first} to {last}"
    else:
        advice = f"speculate at {enabled} at once, not at the others that were timed"
    return f"{limit.engine}{load}: {advice}"


def format_advice(row: LaunchAdvice) -> str:
    """Return whether to speculate; an interval is needed to tell, and one that says something."""
    return "yes" if row.enable else "can't tell" if row.is_undecided else "no"


# The page


@dataclass(frozen=True)
class CostsPage:
    """The content of templates/costs.html.j2."""

    found: CostPrediction
    limits: list[str]  # up to which concurrency to speculate, a sentence for each load
    by_concurrency: list["ConcurrencyTable"]
    tops: list[tuple[int, list[PredictedSpeedup]]]  # at each load: how many trees were predicted, and the first of them
    disagreeing: list[ComparedPrediction]  # beyond both intervals
    undecided: int  # cells that can't be compared for want of an interval
    rms: float  # how far predicted speedups are from measured ones, as a share
    bias: float  # above 0: too high on the whole
    svg: Any


@dataclass(frozen=True)
class ConcurrencyTable:
    """Predicted speedups of the best trees of a load at every concurrency."""

    first: PredictedSpeedup
    concurrencies: list[int]
    lines: list[tuple[PredictedSpeedup, list[PredictedSpeedup | None]]]  # (one of the tree's, that of each concurrency)
    best: set[int]  # ids of the tree to choose at each concurrency

    @property
    def headings(self) -> list[tuple[str, str]]:
        """Return the two lines above each concurrency's column."""
        return [(str(cap), "at once") for cap in self.concurrencies]

    def is_best(self, row: PredictedSpeedup) -> bool:
        return id(row) in self.best


def build_costs_page(found: CostPrediction) -> CostsPage:
    compared = found.compared
    errors = [math.log(row.predicted.speedup / row.measured.speedup) for row in compared] or [0.0]
    draw = partial(draw_predictions, rows=compared)
    groups = _group_predictions(found.known, lambda row: row.conditions)
    return CostsPage(
        found,
        limits=[describe_limit(limit) for limit in prediction.find_limits(found.launch)],
        by_concurrency=_build_concurrency_tables(found.known),
        tops=[(len(rows), _take_first(sorted(rows, key=lambda row: -row.speedup), MAX_TABLE_TREES)) for rows in groups],
        disagreeing=[row for row in compared if row.agrees is False],
        undecided=sum(row.agrees is None for row in compared),
        rms=math.sqrt(fmean(error**2 for error in errors)),
        bias=math.exp(fmean(errors)) - 1,
        svg=plots.render_svg(draw, "Predicted against measured speedup") if compared else None,
    )


def _take_first(ordered: list[PredictedSpeedup], count: int) -> list[PredictedSpeedup]:
    """Return the first `count` rows, and the first of each checkpoint that none of these is of."""
    firsts = {row.checkpoint: row for row in reversed(ordered)}
    return [row for at, row in enumerate(ordered) if at < count or row is firsts[row.checkpoint]]


def _group_predictions(
    rows: list[PredictedSpeedup], get_conditions: Callable[[PredictedSpeedup], SpeedupConditions]
) -> list[list[PredictedSpeedup]]:
    """Return the predictions that share these conditions."""
    groups: dict[SpeedupConditions, list[PredictedSpeedup]] = {}
    for row in rows:
        groups.setdefault(get_conditions(row), []).append(row)
    return list(groups.values())


def _build_concurrency_tables(rows: list[PredictedSpeedup]) -> list[ConcurrencyTable]:
    """Return a table of each load with several concurrencies: trees that _take_first takes at one of them."""
    tables = []
    for group in _group_predictions(rows, lambda row: row.conditions._replace(concurrency=None)):
        caps = sorted({row.concurrency for row in group})
        of_tree: dict[tuple[str, Any], dict[int, PredictedSpeedup]] = {}
        for row in group:
            of_tree.setdefault((row.checkpoint, row.shape), {})[row.concurrency] = row
        fastest = {
            cap: sorted((row for row in group if row.concurrency == cap), key=lambda row: row.preference, reverse=True)
            for cap in caps
        }
        few = max(2, MAX_TABLE_TREES // len(caps))
        shown = dict.fromkeys((row.checkpoint, row.shape) for cap in caps for row in _take_first(fastest[cap], few))
        if len(caps) > 1:
            lines = [(next(iter(of_tree[tree].values())), [of_tree[tree].get(cap) for cap in caps]) for tree in shown]
            tables.append(ConcurrencyTable(group[0], caps, lines, {id(fastest[cap][0]) for cap in caps}))
    return tables


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
