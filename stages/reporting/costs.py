"""What the report makes of costs: predicted speedups of every replayed tree, beside what cells measured, and what to launch."""

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


@dataclass(frozen=True)
class CostPrediction:
    costs: Costs  # all, as results/timing_grid.KEYS: the torch engine's, then those of served cells
    rows: list[Row]  # as predicted.COLUMNS
    launch: list[Row]  # as predicted.launches
    beside: list[Row]  # as cost_measured.beside
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
    """`timed` are the torch engine's costs; `alike` says whether two checkpoints' drafts have the same shapes.

    `temperatures` are those the torch engine is asked at; a served cost has its own. `flags` as in predicted.launches.
    """
    served, remarks = cost_served.derive_costs(lines)
    every = [*timed, *served]
    rows: list[Row] = []
    for some in _group_by_load(every).values():
        for checkpoint, trees in replays.items():
            if one := _find_cost(checkpoint, some, alike):
                mine = temperatures if one["engine"] == "torch" else [one["settings"]["temperature"]]
                for temperature in mine:
                    rows += prediction.predict_speedups(one, checkpoint, temperature, trees)
                    remarks += _explain_left_out(one, checkpoint, temperature, trees)
    of_torch = {name: one for name in replays if (one := _find_cost(name, timed, alike))}
    remarks += [_explain_untimed(name) for name in replays if name not in of_torch]
    compared, why = cost_measured.compare_torch_cells(of_torch, cells, rows)
    compared += cost_measured.compare_served_lines(served, lines, replays)
    return CostPrediction(every, rows, prediction.choose_launches(rows, flags), compared, [*remarks, *why])


def _group_by_load(costs: Costs) -> dict[tuple[Any, ...], Costs]:
    found: dict[tuple[Any, ...], Costs] = {}
    for one in costs:
        found.setdefault(tuple(one[name] for name in prediction.COST_NAME_COLUMNS), []).append(one)
    return found


def _find_cost(checkpoint: str, costs: Costs, alike: Callable[[str, str], bool]) -> Row | None:
    """Its own, or that of a draft of the same shapes."""
    own = [one for one in costs if one["checkpoint"] == checkpoint]
    return next(iter([*own, *(one for one in costs if alike(one["checkpoint"], checkpoint))]), None)


def _explain_untimed(checkpoint: str) -> str:
    return (
        f"{checkpoint}: the torch engine has timed no draft of its shapes, so there are no predictions by its costs and no "
        "flags; add it to time_trees.checkpoints"
    )


def _explain_left_out(one: Row, checkpoint: str, temperature: float, trees: list[Row]) -> list[str]:
    name, mine = describe_cost(one), prediction.select_temperature(trees, temperature)
    if not mine:
        return [f"{name}: {checkpoint} was not replayed at temperature {temperature:g}, so it has no tau there"]
    if far := prediction.count_outside_grid(one, mine):
        ends = prediction.get_grid_bounds(one["grid"])
        axes = ", ".join(f"{axis} {low}" + (f" to {high}" if high > low else "") for axis, (low, high) in ends.items())
        return [f"{name}: {far} of {len(mine)} trees of {checkpoint} lie outside what was timed ({axes})"]
    return []


def describe_cost(one: Row) -> str:
    """A cost, or whatever names one, in words."""
    load = f", {one['workload']}, {one['max_new_tokens']} tokens" if one["workload"] else ""
    warm = f", temperature {one['temperature']:g}" if one.get("temperature") else ""
    return f"{one.get('timed_on', one['engine'])} engine{load}{warm}"


# The terminal


LAUNCH_HEADINGS = (
    "launch",
    "at once",
    "speculate",
    "tree",
    "checkpoint",
    "tau",
    "C",
    "speedup",
    "95% interval",
    "costs of",
)


def format_launch_table(launch: list[Row]) -> list[str]:
    """What to launch, as aligned lines, each with its flags below."""
    if not launch:
        return []
    lines = align_columns([LAUNCH_HEADINGS, *map(_format_launch_row, launch)])
    told = [lines[0]]
    for line, row in zip(lines[1:], launch, strict=True):
        told += [line, *([f"    {shlex.join(row['flags'])}"] if row["flags"] else [])]
    others = sorted({row["engine"] for row in launch if row["timed_on"] != row["engine"]})
    note = f"{' and '.join(others)}: not by costs of their own; serve a few cells (benchmark_served), or measure before use"
    return ["Predicted: when to speculate, and how", *told, *([note] if others else [])]


def _format_launch_row(row: Row) -> tuple[str, ...]:
    return (
        row["engine"], f"{row['concurrency']:g}", advice(row), format_tree(name_tree(row)),
        row["checkpoint"], format_number(row["tau"]), format_number(row["C"]), f"{row['speedup']:.2f}x",
        format_interval(row["low"], row["high"], NO_INTERVAL), describe_cost(row),
    )  # fmt: skip


def advice(row: Row) -> str:
    """Return whether to speculate; without an interval that can't be said."""
    return "yes" if row["enable"] else "can't tell" if row["low"] is None else "no"


def name_tree(row: Row) -> str:
    return f"t{row['steps']}_{row['topk']}_{row['tokens']}"


# The page


def build_costs_page(found: CostPrediction, best: str) -> Row:
    """What report.costs.html.j2 shows."""
    return {
        "launch": [row | {"tree": name_tree(row), "command": shlex.join(row["flags"])} for row in found.launch],
        "fits": [_describe_fit(one) for one in found.costs],
        "tops": _select_top_trees(found.rows, best),
        "beside": found.beside,
        "apart": [row for row in found.beside if row["agrees"] is False],
        "untold": sum(row["agrees"] is None for row in found.beside),
        "advice": advice,
        "none": NO_INTERVAL,
        "off": _summarise_prediction_error(found.beside),
        "svg": plots.render_svg(partial(draw_predictions, rows=found.beside)) if found.beside else None,
        "remarks": found.remarks,
        "about": describe_cost,
        "name": name_tree,
    }


def _describe_fit(one: Row) -> Row:
    """A cost's terms in ms, and how well it predicts."""
    fit = one["fit"]
    return {
        "about": describe_cost(one),
        "points": len(one["grid"]),
        "terms": {term: 1000 * seconds for term, seconds in fit["seconds"].items()},
        "knee": fit["knee"],
        "plain": [(row["batch"], 1000 * row["step_s"]) for row in one["plain"]],
        "error": fit["error"],
        "error_max": fit["error_max"],
        "residual": fit["residual"],
        "hardware": one["hardware"],
        "versions": one["versions"],
        "settings": one["settings"],
    }


def _select_top_trees(rows: list[Row], best: str) -> list[Row]:
    """Of each load the trees with the highest predicted speedups, of the best checkpoint where it has some."""
    found = []
    for load in dict.fromkeys(tuple(row[k] for k in ("engine", *prediction.LOAD_COLUMNS)) for row in rows):
        mine = [row for row in rows if tuple(row[k] for k in ("engine", *prediction.LOAD_COLUMNS)) == load]
        mine = [row for row in mine if row["checkpoint"] == best] or mine
        top = sorted(mine, key=lambda row: -row["speedup"])[:MAX_TABLE_TREES]
        found.append({"about": describe_cost(top[0]), "load": top[0], "of": len(mine), "rows": top})
    return found


def _summarise_prediction_error(beside: list[Row]) -> Row | None:
    """How far predictions are from measurements, as shares: root mean square, and on the whole too high or too low."""
    if not beside:
        return None
    logs = [math.log(row["predicted"]["speedup"] / row["measured"]["speedup"]) for row in beside]
    mean, square = sum(logs) / len(logs), sum(x * x for x in logs) / len(logs)
    return {"rms": math.sqrt(square), "bias": math.exp(mean) - 1, "of": len(logs)}


def draw_predictions(axes: Any, rows: list[Row]) -> None:
    """Predicted against measured speedups, with both intervals, a colour for each engine."""
    ends = [row[who]["speedup"] for row in rows for who in ("predicted", "measured")]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=plots.INK_COLOUR, linewidth=0.8)
    for engine, colour in zip(dict.fromkeys(row["engine"] for row in rows), plots.SERIES_COLOURS, strict=False):
        mine = [row for row in rows if row["engine"] == engine]
        xs, ys = ([row[who]["speedup"] for row in mine] for who in ("measured", "predicted"))
        axes.plot(xs, ys, "o", color=colour, markersize=3, label=engine)
        for row in mine:
            guess, found = row["predicted"], row["measured"]
            if guess["low"] is not None:
                axes.vlines(found["speedup"], guess["low"], guess["high"], color=colour, lw=0.7)
            if found["low"] is not None:
                axes.hlines(guess["speedup"], found["low"], found["high"], color=colour, lw=0.7)
    axes.set(xlabel="measured speedup of decoding", ylabel="predicted")
