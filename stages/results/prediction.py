"""Predicted speedups, `results/predicted.csv`, and what to launch, `results/launch.json`: docs/cost.md, version 1.

    C = cycle / plain step at the same batch          speedup = tau / C

tau is replayed for every tree; C comes from the fit of a timing grid (cost_model). Nothing is extrapolated: a tree outside the
grid has no prediction. The interval combines tau's with the error of the fit on points left out and that of the plain step; if
one of them is unknown, there is no interval.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.results import cost_model, interval
from stages.runtime import atomic

Row = dict[str, Any]

PREDICTION_TABLE, LAUNCH_FILE = Path("results/predicted.csv"), Path("results/launch.json")
COST_NAME_COLUMNS = ("engine", "workload", "max_new_tokens")  # the latter two null for the torch engine
TREE_COLUMNS = ("steps", "topk", "tokens")
PREDICTION_COLUMNS = (
    *COST_NAME_COLUMNS,
    "temperature",
    "checkpoint",
    *TREE_COLUMNS,
    "concurrency",
    "tau",
    "tau_low",
    "tau_high",
    "C",
    "speedup",
    "low",
    "high",
)
LOAD_COLUMNS = (*COST_NAME_COLUMNS[1:], "temperature", "concurrency")
LAUNCHABLE_ENGINES = ("sglang", "vllm")  # whose flags are known


def predict_speedups(cost: Row, checkpoint: str, temperature: float, trees: Iterable[Row]) -> list[Row]:
    """Return a row for each tree within the timing grid and each batch with a plain step.

    Args:
        cost: a timing_grid.TimingGrid.
        trees: rows of replay_records.
    """
    fit, within = cost_model.CostModel.from_json(cost["fit"]), get_grid_bounds(cost["grid"])
    names = {name: cost[name] for name in COST_NAME_COLUMNS} | {"temperature": temperature, "checkpoint": checkpoint}
    found = []
    for tree in select_temperature(trees, temperature):
        tau, ends = get_tau_interval(tree)
        low, high = ends or (None, None)
        for plain in cost["plain"]:
            place = tree["steps"], tree["topk"], tree["tokens"], plain["batch"]
            if is_inside_grid(within, *place):
                c = fit.predict_cycle_s(*place) / plain["step_s"]
                shape = dict(zip((*TREE_COLUMNS, "concurrency"), place, strict=True))
                found.append(
                    names
                    | shape
                    | {"tau": tau, "tau_low": low, "tau_high": high, "C": c}
                    | compute_speedup_interval(tau, ends, c, compute_prediction_error(fit, plain))
                )
    return found


def select_temperature(trees: Iterable[Row], temperature: float) -> list[Row]:
    """Return the replayed trees of one temperature."""
    return [tree for tree in trees if tree["temperature"] == temperature]


def get_tau_interval(tree: Row) -> tuple[float, interval.Interval | None]:
    """Return a replayed tau and its interval; None if one conversation was replayed."""
    ends = [float(tree[end]) for end in ("tau_low", "tau_high") if tree[end] not in ("", None)]
    return float(tree["tau"]), interval.Interval(*ends) if ends else None


def compute_prediction_error(fit: cost_model.CostModel, plain: Row) -> float | None:
    """Return half of the 95% interval of C, as a share; None if the plain step was timed in one repeat."""
    of_step = interval.compute_margin(plain["error"], plain["samples"])
    return None if of_step is None else math.hypot(fit.margin, of_step)


def compute_speedup_interval(tau: float, ends: interval.Interval | None, c: float, error: float | None) -> Row:
    """Return tau / C and its 95% interval: independent errors, as shares (logarithms), add by their squares.

    The interval is None if tau's is, or if the error of C is unknown.
    """
    found = tau / c
    if ends is None or error is None:
        return {"speedup": found, "low": None, "high": None}
    down, up = (math.hypot(math.log(a / b), error) for a, b in ((tau, ends.low), (ends.high, tau)))
    return {"speedup": found, "low": found * math.exp(-down), "high": found * math.exp(up)}


def get_grid_bounds(grid: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest timed value of each axis."""
    rows = list(grid)
    return {axis: (min(r[axis] for r in rows), max(r[axis] for r in rows)) for axis in (*TREE_COLUMNS, "batch")}


def is_inside_grid(within: Mapping[str, tuple[int, int]], *place: int) -> bool:
    """Return whether a place (steps, topk, tokens, batch) lies within the bounds."""
    return all(low <= at <= high for at, (low, high) in zip(place, within.values(), strict=True))


def count_outside_grid(cost: Row, trees: Iterable[Row]) -> int:
    """Return how many trees lie outside the timing grid at every batch."""
    within = get_grid_bounds(cost["grid"])
    batches = [plain["batch"] for plain in cost["plain"]]
    shapes = [tuple(tree[axis] for axis in TREE_COLUMNS) for tree in trees]
    return sum(not any(is_inside_grid(within, *shape, batch) for batch in batches) for shape in shapes)


def choose_launches(predicted: Iterable[Row], flags: Callable[[str, Row], list[str] | None]) -> list[Row]:
    """Return, for each engine, load and concurrency, the runnable tree with the highest predicted speedup.

    An engine without a timing grid of its own uses the torch engine's. A tree is worth enabling if the interval's low end is
    above 1, never without an interval.

    Args:
        flags: returns the flags that turn a prediction's tree on, given (engine, row); None if the engine can't run it.
    """
    rows, found = list(predicted), []
    for engine in LAUNCHABLE_ENGINES:
        timed_on = engine if any(row["engine"] == engine for row in rows) else "torch"
        mine = [row for row in rows if row["engine"] == timed_on]
        for load in dict.fromkeys(tuple(row[k] for k in LOAD_COLUMNS) for row in mine):
            can = [
                (row, how)
                for row in mine
                if tuple(row[k] for k in LOAD_COLUMNS) == load and (how := flags(engine, row))
            ]
            if can:
                best, how = max(can, key=lambda pair: pair[0]["speedup"])
                shown = {k: v for k, v in best.items() if k != "engine"}
                enable = best["low"] is not None and best["low"] > 1
                found.append(
                    {"engine": engine, "timed_on": timed_on, "enable": enable, **shown, "flags": how if enable else []}
                )
    return found


def write_predictions(predicted: Iterable[Row], launch: list[Row], costs: list[Row]) -> None:
    """Write both files; the launch file also has the timing grids, each with its hardware."""
    atomic.write_csv(PREDICTION_TABLE, PREDICTION_COLUMNS, predicted)
    atomic.write_json(LAUNCH_FILE, {"launch": launch, "costs": costs})


def read_launch() -> list[Row]:
    """Return what to launch. Raises ValueError naming the command to run, if the file is missing."""
    found = atomic.read_json(LAUNCH_FILE, made_by="report")
    if not isinstance(found, dict) or "launch" not in found:
        raise ValueError(f"{LAUNCH_FILE} holds nothing to launch; run: dvc repro -f -s report")
    return found["launch"]
