"""Predictions compared with cells: predicted and measured tau, C and speedup. docs/cost.md, version 1.

tau / C is of decoding alone, so the measured speedup here is too: prefill, which both sides pay, is left out of the times. A
cell's interval, which is of whole answers, is applied as a share; without one (one prompt, one repeat) agreement is unknown.
"""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from stages.results import cost_model, cost_served, prediction, timing_grid
from stages.results.served_table import ServedTableLine

Row = dict[str, Any]


def measure_torch_cell(cell: Row) -> Row | None:
    """Return tau, C and the speedup of decoding, with its interval; None if no answer has more than one token."""
    rows, metrics = cell["prompts"], cell["metrics"]
    seconds, plain = (
        sum(r[f"{who}e2e_latency_s"] - r[f"{who}prefill_latency_s"] for r in rows) for who in ("", "baseline_")
    )
    tokens, plain_tokens = (sum(r[f"{who}output_tokens"] - 1 for r in rows) for who in ("", "baseline_"))
    cycles = sum(r["cycles"] for r in rows)
    if min(cycles, tokens, plain_tokens) < 1:
        return None
    step = plain / plain_tokens
    ends = metrics["speedup_low"], metrics["speedup_high"]
    return _build_measurement(
        metrics["tau"], seconds / cycles / step, step * tokens / seconds, metrics["speedup"], ends
    )


def measure_served_line(line: ServedTableLine) -> Row | None:
    """Return the same for a served line; None if it was not compared with a baseline."""
    row, point, plain = line.row, line.point, line.baseline_point
    if not point or not plain or row["speedup"] is None or row["tau"] is None:
        return None
    cycles, steps, own = (
        cost_served.compute_cycle_seconds(point),
        cost_served.compute_step_seconds(plain),
        cost_served.compute_step_seconds(point),
    )
    if not (cycles and steps and own):
        return None
    ends = row["speedup_low"], row["speedup_high"]
    return _build_measurement(row["tau"], fmean(cycles) / fmean(steps), fmean(steps) / fmean(own), row["speedup"], ends)


def _build_measurement(
    tau: float, c: float, decoding: float, whole: float, ends: tuple[float | None, float | None]
) -> Row:
    """Return a measurement; `ends` are those of the interval of `whole`, the speedup of whole answers."""
    low, high = (None if end is None else decoding * end / whole for end in ends)
    return {"tau": tau, "C": c, "speedup": decoding, "low": low, "high": high, "whole": whole}


def compare_prediction(names: Row, guess: Row, found: Row) -> Row:
    """Return the names of a cell with its prediction and measurement, and whether their intervals overlap.

    If they don't, `apart` names which of tau and C is further from its prediction. `agrees` is None without both intervals.
    """
    known = None not in (guess["low"], guess["high"], found["low"], found["high"])
    agrees = (guess["low"] <= found["high"] and found["low"] <= guess["high"]) if known else None
    of_tau, of_c = (abs(math.log(found[k] / guess[k])) for k in ("tau", "C"))
    apart = None if agrees is not False else "tau" if of_tau > of_c else "C"
    return names | {"predicted": guess, "measured": found, "agrees": agrees, "apart": apart}


def compare_torch_cells(
    costs: dict[str, Row], cells: Iterable[Row], guesses: Iterable[Row]
) -> tuple[list[Row], list[str]]:
    """Return torch cells compared with predictions, and why others can't be; `costs` are timing grids by checkpoint."""
    by_tree = {_make_prediction_key(guess): guess for guess in guesses if guess["engine"] == "torch"}
    made, why = [], []
    for cell in cells:
        names = {k: cell[k] for k in ("workload", "checkpoint", "tree", "engine")}
        names |= {"concurrency": 1, "max_new_tokens": None}
        timed = costs.get(cell["checkpoint"])
        if timed is None:
            continue
        if differs := timing_grid.list_hardware_differences(timed["hardware"], cell["hardware"]):
            why.append(
                f"{cell['workload']}, {cell['checkpoint']}: its cells ran on another machine than the timing grid, "
                f"{', '.join(differs)}; run one of the two anew: dvc repro -f -s time_trees@{timed['checkpoint']}"
            )
            continue
        shape = cell["num_steps"], cell["topk"], cell["num_draft_tokens"]
        guess = by_tree.get((cell["temperature"], cell["checkpoint"], *shape, 1))
        if guess and (found := measure_torch_cell(cell)):
            made.append(compare_prediction(names, guess, found))
    return made, list(dict.fromkeys(why))


def _make_prediction_key(guess: Row) -> tuple[Any, ...]:
    return (
        guess["temperature"],
        guess["checkpoint"],
        *(guess[axis] for axis in prediction.TREE_COLUMNS),
        guess["concurrency"],
    )


def compare_served_lines(
    costs: Iterable[Row], lines: Iterable[ServedTableLine], replays: Mapping[str, list[Row]]
) -> list[Row]:
    """Return served points compared with what the other points of their timing grid predict for them."""
    every, made = list(lines), []
    for timed in costs:
        trees = prediction.select_temperature(replays.get(timed["checkpoint"], []), timed["settings"]["temperature"])
        for number, point in enumerate(timed["grid"]):
            tree = next((t for t in trees if all(t[axis] == point[axis] for axis in prediction.TREE_COLUMNS)), None)
            line = next((one for one in every if _is_grid_point(one, timed, point)), None)
            if tree and line and (found := measure_served_line(line)):
                names = ("workload", "checkpoint", "tree", "engine", "concurrency", "max_new_tokens")
                made.append(
                    compare_prediction({k: line.row[k] for k in names}, _predict_left_out(timed, number, tree), found)
                )
    return made


def _predict_left_out(timed: Row, number: int, tree: Row) -> Row:
    """Return the prediction of a grid's point by the others."""
    fit, batch = cost_model.CostModel.from_json(timed["fit"]), timed["grid"][number]["batch"]
    step = next(row for row in timed["plain"] if row["batch"] == batch)
    c, (tau, ends) = fit.left_out_s[number] / step["step_s"], prediction.get_tau_interval(tree)
    return {"tau": tau, "C": c} | prediction.compute_speedup_interval(
        tau, ends, c, prediction.compute_prediction_error(fit, step)
    )


def _is_grid_point(line: ServedTableLine, timed: Row, point: Row) -> bool:
    """Return whether a grid's point was taken from this line."""
    row = line.row
    same = all(row[name] == timed[name] for name in (*prediction.COST_NAME_COLUMNS, "checkpoint"))
    shape = row["num_steps"], row["topk"], row["num_draft_tokens"], row["concurrency"]
    return (
        same
        and line.baseline_point is not None
        and shape == (*(point[axis] for axis in prediction.TREE_COLUMNS), point["batch"])
    )
