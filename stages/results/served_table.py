"""The table of served cells: each point joined with its baseline, and compared with the replay of its tree.

A line is a point of a cell. A baseline's point is joined only if both have the same requests, engine and machine
(`fingerprint`); otherwise the line names the differences and has no speedup.
"""

import csv
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.results import interval, replay_records, served_records
from stages.runtime import atomic

Row = dict[str, Any]

SERVED_TABLE = Path("results/served.csv")
SPECULATIVE, PLAIN = "speculative", "plain"
REPLAY_TOLERANCE = 0.1  # of tau, served against replayed
LATENCY_COLUMNS = {  # column -> (distribution in serving.latency.summarise_load, figure of it)
    "ttft_mean_s": ("ttft_s", "mean"), "ttft_p99_s": ("ttft_s", "p99"),
    "tpot_mean_s": ("tpot_s", "mean"), "tpot_p50_s": ("tpot_s", "p50"), "tpot_p90_s": ("tpot_s", "p90"),
    "tpot_p99_s": ("tpot_s", "p99"), "itl_mean_s": ("itl_s", "mean"), "itl_p99_s": ("itl_s", "p99"),
    "e2e_mean_s": ("e2e_s", "mean"), "e2e_p99_s": ("e2e_s", "p99"), "wait_mean_s": ("wait_s", "mean"),
}  # fmt: skip
THROUGHPUT_COLUMNS = ("output_throughput", "total_throughput", "request_throughput", "mean_at_once")
ACCEPTANCE_COLUMNS = ("tau", "tau_low", "tau_high", "accept_rate", "node_accept_rate")
SERVED_TABLE_COLUMNS = (
    "workload",
    "checkpoint",
    "tree",
    "num_steps",
    "topk",
    "num_draft_tokens",
    "engine",
    "temperature",
    "decoding",  # speculative, or plain: with a checkpoint too where it was measured in turns with that cell
    "status",
    "max_new_tokens",
    "concurrency",
    "request_rate",
    "repeats",
    "requests",
    "completed",
    *ACCEPTANCE_COLUMNS,
    "replay_tau",
    "replay_ratio",
    "replay_agrees",  # yes, no, or empty if the two need not agree
    *LATENCY_COLUMNS,
    *THROUGHPUT_COLUMNS,
    "baseline_output_throughput",
    "speedup",
    "speedup_low",
    "speedup_high",
    "identical_share",
    "accuracy",
    "baseline_accuracy",
    "remark",  # why there is no speedup, or no point
)
TEXT_COLUMNS = {
    "workload",
    "checkpoint",
    "tree",
    "engine",
    "decoding",
    "status",
    "replay_agrees",
    "remark",
}  # no numbers


@dataclass(frozen=True)
class ServedTableLine:
    """A line of the table, with what it was made of."""

    row: Row  # a line of results/served.csv; None for unknown values
    cell: Row  # served_records.ServedCell
    point: Row | None  # served_records.LoadPoint; None if the engine can't run the cell
    baseline_point: Row | None = None  # of the same load; None for plain lines


def read_served_cells(workloads: Iterable[str], checkpoints: Iterable[str], trees: Iterable[str]) -> list[Row]:
    """Return, of each workload, a baseline cell and a cell for each checkpoint and tree.

    Raises:
        ValueError: naming the file and the command to run, if one is missing, incomplete, or not the cell of its name.
    """
    configs = [(None, None), *itertools.product(checkpoints, trees)]
    return [_read_named_cell(workload, *config) for workload in workloads for config in configs]


def read_torch_loads(workloads: Iterable[str], checkpoints: Iterable[str], trees: Iterable[str]) -> list[Row]:
    """Return the torch engine's cells of loads, each with its own baseline. Raises ValueError as `read_served_cells`."""
    return [
        _read_named_cell(*names, served_records.TORCH_ENGINE)
        for names in itertools.product(workloads, checkpoints, trees)
    ]


def _read_named_cell(workload: str, checkpoint: str | None, tree: str | None, engine: str | None = None) -> Row:
    config = workload, checkpoint, tree, engine
    found = served_records.read_served_cell(*config)
    names = [found[k] for k in ("workload", "checkpoint", "tree")]
    if names != [workload, checkpoint, tree]:
        again = f"run: dvc repro -f -s {served_records.name_served_stage(*config)}"
        raise ValueError(
            f"{served_records.locate_served_cell(*config)} holds the cell {served_records.name_served_cell(*names)}; {again}"
        )
    return found


def join_lines(
    cells: Iterable[Row], replayed: Mapping[str, list[Row]], of_eval: Collection[str]
) -> list[ServedTableLine]:
    """Return the lines of all points.

    Args:
        cells: as `read_served_cells` returns them.
        replayed: rows of replay_records by checkpoint.
        of_eval: workloads whose prompts were replayed.
    """
    found: list[ServedTableLine] = []
    baselines: dict[str, Row] = {}
    for cell in cells:
        if cell["checkpoint"] is None:
            baselines[cell["workload"]] = cell
            found += _build_plain_lines(cell, cell["points"])
        else:
            # A cell measured in alternation with its own baseline does not need the workload's.
            baseline = cell if cell["baseline_points"] else baselines[cell["workload"]]
            found += _build_speculative_lines(cell, baseline, replayed, cell["workload"] in of_eval)
            found += _build_plain_lines(cell, cell["baseline_points"])
    return found


def write_served_table(found: Iterable[ServedTableLine]) -> None:
    atomic.write_csv(SERVED_TABLE, SERVED_TABLE_COLUMNS, (line.row for line in found))


def _build_plain_lines(cell: Row, points: list[Row]) -> Iterator[ServedTableLine]:
    if cell["checkpoint"] is None and cell["status"] == served_records.UNSUPPORTED:
        yield ServedTableLine(_build_unmeasured_row(cell, PLAIN), cell, None)
    for point in points:
        row = _build_measured_row(cell, point, PLAIN)
        yield ServedTableLine(row | dict.fromkeys(ACCEPTANCE_COLUMNS) | {"accuracy": _get_accuracy(point)}, cell, point)


def _build_speculative_lines(
    cell: Row, baseline: Row, replayed: Mapping[str, list[Row]], of_eval: bool
) -> Iterator[ServedTableLine]:
    replay = replay_records.find_replayed_tau(replayed.get(cell["checkpoint"], []), cell)
    if cell["status"] == served_records.UNSUPPORTED:
        yield ServedTableLine(_build_unmeasured_row(cell, SPECULATIVE) | {"replay_tau": replay}, cell, None)
        return
    # Only the longest answers of a sweep contain all that was replayed; shorter ones are cut.
    longest = max(point["max_new_tokens"] for point in cell["points"])
    for point in cell["points"]:
        whole = of_eval and cell["temperature"] == 0 and point["max_new_tokens"] == longest
        row = _build_measured_row(cell, point, SPECULATIVE) | _compare_with_replay(point, replay, whole)
        plain = _find_point_of_load(point, cell["baseline_points"] or baseline["points"])
        yield ServedTableLine(row | _compare_with_baseline(cell, point, baseline, plain), cell, point, plain)


# A line


def _build_unmeasured_row(cell: Row, decoding: str) -> Row:
    known = {k: cell[k] for k in SERVED_TABLE_COLUMNS if k in cell} | {"decoding": decoding}
    return dict.fromkeys(SERVED_TABLE_COLUMNS) | known | {"remark": f"unsupported: {cell['reason']}"}


def _build_measured_row(cell: Row, point: Row, decoding: str) -> Row:
    """Return a line of a point's loads: sums of requests, and the mean over repeats of every other figure."""
    loads = point["loads"]
    row = _build_unmeasured_row(cell, decoding) | {
        k: point[k] for k in ("max_new_tokens", "concurrency", "request_rate")
    }
    row |= {"repeats": len(loads), "remark": None} | {
        k: sum(load[k] for load in loads) for k in ("requests", "completed")
    }
    row |= {
        name: _mean_of_known(load[kind] and load[kind][figure] for load in loads)
        for name, (kind, figure) in LATENCY_COLUMNS.items()
    }
    return row | {name: _mean_of_known(load[name] for load in loads) for name in THROUGHPUT_COLUMNS}


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean over repeats that have a value; a repeat without answers has no latency."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _compare_with_replay(point: Row, replay: float | None, whole: bool) -> Row:
    found: Row = {k: (point["acceptance"] or {}).get(k) for k in ACCEPTANCE_COLUMNS} | {"replay_tau": replay}
    if found["tau"] is None or replay is None:
        return found
    ratio = found["tau"] / replay
    agrees = ("yes" if abs(ratio - 1) <= REPLAY_TOLERANCE else "no") if whole else None
    return found | {"replay_ratio": ratio, "replay_agrees": agrees}


def _compare_with_baseline(cell: Row, point: Row, baseline: Row, other: Row | None) -> Row:
    """Return speedup, identical share and accuracies, or why there are none; `other` is the baseline's point."""
    found: Row = {"accuracy": _get_accuracy(point)}
    if why := _explain_no_speedup(cell, point, baseline, other):
        return found | {"remark": f"not compared: {why}"}
    assert other is not None, "_explain_no_speedup returns a reason"
    ours, theirs = ([load["output_throughput"] for load in p["loads"]] for p in (point, other))
    speedups = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = interval.compute_mean_interval(speedups) or (None, None)
    found |= {"baseline_output_throughput": fmean(theirs), "speedup": fmean(speedups)}
    found |= {"speedup_low": low, "speedup_high": high, "baseline_accuracy": _get_accuracy(other)}
    return found | {"identical_share": _compute_identical_share(point, other) if cell["temperature"] == 0 else None}


def _find_point_of_load(point: Row, others: list[Row]) -> Row | None:
    load = point["max_new_tokens"], point["concurrency"]
    return next((other for other in others if (other["max_new_tokens"], other["concurrency"]) == load), None)


def _explain_no_speedup(cell: Row, point: Row, baseline: Row, other: Row | None) -> str:
    """Return why cell and baseline can't be compared, empty if they can. A cell's own baseline ran on the same server."""
    if not cell["baseline_points"]:
        if baseline["status"] == served_records.UNSUPPORTED:
            return f"the baseline is unsupported: {baseline['reason']}"
        if differs := list(_list_fingerprint_differences(cell["fingerprint"], baseline["fingerprint"])):
            return f"the baseline differs in {'; '.join(differs)}"
    if other is None:
        return f"the baseline has no load of {point['max_new_tokens']} tokens at concurrency {point['concurrency']}"
    if (mine := len(point["loads"])) != (theirs := len(other["loads"])):
        return f"the baseline has {theirs} repeats, this cell {mine}"
    for name, loads in (("the baseline", other["loads"]), ("this cell", point["loads"])):
        if not all(load["output_throughput"] for load in loads):
            return f"{name} answered nothing"
    return ""


def _list_fingerprint_differences(mine: Any, theirs: Any, name: str = "fingerprint") -> Iterator[str]:
    """Yield the keys that differ, with both values, the cell's first; nested keys are joined by dots."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        above = "" if name == "fingerprint" else f"{name}."
        for key in dict.fromkeys([*mine, *theirs]):
            yield from _list_fingerprint_differences(mine.get(key), theirs.get(key), f"{above}{key}")
    elif mine != theirs:
        yield f"{name} ({mine!s:.60} against {theirs!s:.60})"


def _compute_identical_share(point: Row, other: Row) -> float | None:
    """Return the share of identical answers among the requests answered by both."""
    ours, theirs = (
        {(r["repeat"], r["id"], r["turn"]): r["answer"] for r in one["requests"] if not r["failed"]}
        for one in (point, other)
    )
    same = [ours[key] == theirs[key] for key in ours.keys() & theirs.keys()]
    return fmean(same) if same else None


def _get_accuracy(point: Row) -> float | None:
    return point["quality"] and point["quality"]["accuracy"]


# Reading the table


def read_served_table() -> list[Row]:
    """Return the lines of results/served.csv. Raises ValueError naming the command to run, if it is missing."""
    if not SERVED_TABLE.exists():
        raise ValueError(f"{SERVED_TABLE} not found; run: dvc repro report")
    with SERVED_TABLE.open(newline="", encoding="utf-8") as file:
        return [{k: _parse_value(k, v) for k, v in row.items()} for row in csv.DictReader(file)]


def _parse_value(column: str, text: str) -> str | float | None:
    if not text:
        return None
    return text if column in TEXT_COLUMNS else float(text)
