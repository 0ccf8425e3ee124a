"""Predicted speedups of every replayed tree, compared with what cells measured, and what to launch.

A cost is the record of a timing grid (results/timing_grid.py): of the torch engine, or derived from served cells
(results/cost_served.py). docs/cost.md explains the model.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from stages.reporting import plots
from stages.reporting.text import align_columns, format_interval, format_number, format_tree
from stages.results import cost_measured, cost_served, prediction
from stages.results.served_table import ServedTableLine

Row = dict[str, Any]
Costs = list[Row]
MAX_TABLE_TREES = 8  # trees of a table on the page
NO_INTERVAL = "none"  # one conversation was replayed, or the plain step was timed in one repeat
LAUNCH_HEADINGS = (
    "launch", "at once", "speculate", "tree", "checkpoint", "tau", "C", "speedup", "95% interval", "costs of",
)  # fmt: skip


@dataclass(frozen=True)
class CostPrediction:
    costs: Costs  # the torch engine's, then those derived from served cells
    rows: list[Row]  # as prediction.PREDICTION_COLUMNS
    launch: list[Row]  # as prediction.choose_launches
    compared: list[Row]  # predictions and measurements, as cost_measured.compare_torch_cells
    remarks: list[str]  # what isn't predicted or compared, and why


def predict_and_compare(
    timed: Costs,
    lines: list[ServedTableLine],
    cells: list[Row],
    replays: Mapping[str, list[Row]],
    alike: Callable[[str, str], bool],
    temperatures: Iterable[float],
    flags: Callable[[str, Row], list[str] | None],
) -> CostPrediction:
    """Return the predictions by every cost, and how cells compare with them.

    `timed` are the torch engine's costs; `alike` tells whether two checkpoints' drafts have the same shapes;
    `temperatures` are those of the torch engine's workloads (a served cost has its own); `flags` as in
    prediction.choose_launches.
    """
    served, remarks = cost_served.derive_costs(lines)
    every = [*timed, *served]
    rows: list[Row] = []
    for costs in _group_by_load(every).values():
        for checkpoint, trees in replays.items():
            if cost := _find_cost(checkpoint, costs, alike):
                for temperature in temperatures if cost["engine"] == "torch" else [cost["settings"]["temperature"]]:
                    rows += prediction.predict_speedups(cost, checkpoint, temperature, trees)
                    remarks += _explain_left_out(cost, checkpoint, temperature, trees)
    torch_costs = {name: cost for name in replays if (cost := _find_cost(name, timed, alike))}
    remarks += [_explain_untimed(name) for name in replays if name not in torch_costs]
    compared, reasons = cost_measured.compare_torch_cells(torch_costs, cells, rows)
    compared += cost_measured.compare_served_lines(served, lines, replays)
    return CostPrediction(every, rows, prediction.choose_launches(rows, flags), compared, [*remarks, *reasons])


def _group_by_load(costs: Costs) -> dict[tuple[Any, ...], Costs]:
    found: dict[tuple[Any, ...], Costs] = {}
    for cost in costs:
        found.setdefault(tuple(cost[name] for name in prediction.COST_NAME_COLUMNS), []).append(cost)
    return found


def _find_cost(checkpoint: str, costs: Costs, alike: Callable[[str, str], bool]) -> Row | None:
    """Return the checkpoint's own cost, or that of a draft of the same shapes; None without either."""
    own = [cost for cost in costs if cost["checkpoint"] == checkpoint]
    return next(iter([*own, *(cost for cost in costs if alike(cost["checkpoint"], checkpoint))]), None)


def _explain_untimed(checkpoint: str) -> str:
    return (
        f"{checkpoint}: the torch engine has timed no draft of its shapes, so there are no predictions by its costs and no "
        "flags; add it to time_trees.checkpoints"
    )


def _explain_left_out(cost: Row, checkpoint: str, temperature: float, trees: list[Row]) -> list[str]:
    name, replayed = describe_cost(cost), prediction.select_temperature(trees, temperature)
    if not replayed:
        return [f"{name}: {checkpoint} was not replayed at temperature {temperature:g}, so it has no tau there"]
    if outside := prediction.count_outside_grid(cost, replayed):
        bounds = prediction.get_grid_bounds(cost["grid"])
        axes = ", ".join(
            f"{axis} {low}" + (f" to {high}" if high > low else "") for axis, (low, high) in bounds.items()
        )
        return [f"{name}: {outside} of {len(replayed)} trees of {checkpoint} lie outside what was timed ({axes})"]
    return []


def describe_cost(row: Row) -> str:
    """Return the name of a cost, or of the cost that a prediction was made by, in words."""
    load = f", {row['workload']}, {row['max_new_tokens']} tokens" if row["workload"] else ""
    temperature = f", temperature {row['temperature']:g}" if row.get("temperature") else ""
    return f"{row.get('timed_on', row['engine'])} engine{load}{temperature}"


# The terminal


def format_launch_table(launch: list[Row]) -> list[str]:
    """Return what to launch as aligned lines, each followed by its flags."""
    if not launch:
        return []
    lines = align_columns([LAUNCH_HEADINGS, *map(_format_launch_row, launch)])
    shown = [lines[0]]
    for line, row in zip(lines[1:], launch, strict=True):
        shown += [line, *([f"    {shlex.join(row['flags'])}"] if row["flags"] else [])]
    others = sorted({row["engine"] for row in launch if row["timed_on"] != row["engine"]})
    note = f"{' and '.join(others)}: not by costs of their own; serve a few cells (benchmark_served), or measure before use"
    return ["Predicted: when to speculate, and how", *shown, *([note] if others else [])]


def _format_launch_row(row: Row) -> tuple[str, ...]:
    return (
        row["engine"], f"{row['concurrency']:g}", format_advice(row), format_tree(name_tree(row)),
        row["checkpoint"], format_number(row["tau"]), format_number(row["C"]), f"{row['speedup']:.2f}x",
        format_interval(row["low"], row["high"], NO_INTERVAL), describe_cost(row),
    )  # fmt: skip


def format_advice(row: Row) -> str:
    """Return whether to speculate; an interval is needed to tell."""
    return "yes" if row["enable"] else "can't tell" if row["low"] is None else "no"


def name_tree(row: Row) -> str:
    return f"t{row['steps']}_{row['topk']}_{row['tokens']}"


# The page


@dataclass(frozen=True)
class CostsPage:
    """The content of templates/costs.html.j2, with the functions called there."""

    launch: list[Row]  # with `tree`, and `command`, the flags as one line
    fits: list["CostFit"]
    tops: list["TopTrees"]
    compared: list[Row]
    disagreeing: list[Row]  # of them, beyond both intervals
    undecided: int  # of them, without an interval
    error: "PredictionError | None"
    svg: Any
    remarks: list[str]
    advice: Callable[[Row], str] = format_advice
    about: Callable[[Row], str] = describe_cost
    name: Callable[[Row], str] = name_tree
    none: str = NO_INTERVAL


@dataclass(frozen=True)
class CostFit:
    """The terms of a fitted cost, and how well it predicts; errors are shares."""

    about: str
    points: int
    terms: dict[str, float]  # ms
    knee: float | None  # rows
    plain: list[tuple[float, float]]  # (batch, ms of a plain step)
    error: float  # root mean square over points left out in turn
    error_max: float
    residual: float  # root mean square over the points fitted
    hardware: Row
    versions: Row
    settings: Row


@dataclass(frozen=True)
class TopTrees:
    """The trees with the highest predicted speedups at one load."""

    about: str
    concurrency: float
    of: int  # how many trees were predicted there
    rows: list[Row]


@dataclass(frozen=True)
class PredictionError:
    """How far predicted speedups are from measured ones, as shares."""

    rms: float
    bias: float  # above 0: too high on the whole
    of: int


def build_costs_page(found: CostPrediction, best: str) -> CostsPage:
    return CostsPage(
        launch=[row | {"tree": name_tree(row), "command": shlex.join(row["flags"])} for row in found.launch],
        fits=[_describe_fit(cost) for cost in found.costs],
        tops=_select_top_trees(found.rows, best),
        compared=found.compared,
        disagreeing=[row for row in found.compared if row["agrees"] is False],
        undecided=sum(row["agrees"] is None for row in found.compared),
        error=_summarise_prediction_error(found.compared),
        svg=plots.render_svg(partial(draw_predictions, rows=found.compared)) if found.compared else None,
        remarks=found.remarks,
    )


def _describe_fit(cost: Row) -> CostFit:
    fit = cost["fit"]
    return CostFit(
        about=describe_cost(cost),
        points=len(cost["grid"]),
        terms={term: 1000 * seconds for term, seconds in fit["seconds"].items()},
        knee=fit["knee"],
        plain=[(row["batch"], 1000 * row["step_s"]) for row in cost["plain"]],
        error=fit["error"],
        error_max=fit["error_max"],
        residual=fit["residual"],
        hardware=cost["hardware"],
        versions=cost["versions"],
        settings=cost["settings"],
    )


def _select_top_trees(rows: list[Row], best: str) -> list[TopTrees]:
    """Return the fastest trees of each load, of the best checkpoint where it has predictions there."""
    columns = ("engine", *prediction.LOAD_COLUMNS)
    found = []
    for load in dict.fromkeys(tuple(row[k] for k in columns) for row in rows):
        group = [row for row in rows if tuple(row[k] for k in columns) == load]
        group = [row for row in group if row["checkpoint"] == best] or group
        top = sorted(group, key=lambda row: -row["speedup"])[:MAX_TABLE_TREES]
        found.append(TopTrees(describe_cost(top[0]), top[0]["concurrency"], len(group), top))
    return found


def _summarise_prediction_error(compared: list[Row]) -> PredictionError | None:
    if not compared:
        return None
    logs = [math.log(row["predicted"]["speedup"] / row["measured"]["speedup"]) for row in compared]
    mean, square = sum(logs) / len(logs), sum(x * x for x in logs) / len(logs)
    return PredictionError(math.sqrt(square), math.exp(mean) - 1, len(logs))


def draw_predictions(axes: Any, rows: list[Row]) -> None:
    """Draw predicted against measured speedups with both intervals, a colour per engine."""
    ends = [row[which]["speedup"] for row in rows for which in ("predicted", "measured")]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=plots.INK_COLOUR, linewidth=0.8)
    for engine, colour in zip(dict.fromkeys(row["engine"] for row in rows), plots.SERIES_COLOURS, strict=False):
        group = [row for row in rows if row["engine"] == engine]
        xs, ys = ([row[which]["speedup"] for row in group] for which in ("measured", "predicted"))
        axes.plot(xs, ys, "o", color=colour, markersize=3, label=engine)
        for row in group:
            predicted, measured = row["predicted"], row["measured"]
            if predicted["low"] is not None:
                axes.vlines(measured["speedup"], predicted["low"], predicted["high"], color=colour, lw=0.7)
            if measured["low"] is not None:
                axes.hlines(predicted["speedup"], measured["low"], measured["high"], color=colour, lw=0.7)
    axes.set(xlabel="measured speedup of decoding", ylabel="predicted")
