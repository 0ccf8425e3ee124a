"""The table of served cells: each point joined with its baseline, and compared with the replay of its tree.

A line is a point of a cell. A baseline's point is joined only if both have the same requests, engine and machine
(`fingerprint`); otherwise the line names the differences and has no speedup.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.params.tree_shape import Load
from stages.results import interval, replay_records, served_records
from stages.results.record import DraftSampling, TableRow
from stages.results.replay_records import ReplayedTree
from stages.results.served_records import LoadPoint, ServedCell

SPECULATIVE, PLAIN = "speculative", "plain"
REPLAY_TOLERANCE = 0.1  # of tau, served against replayed
LATENCY_COLUMNS = {  # column -> (distribution of serving/load_summary.py, figure of it)
    "ttft_mean_s": ("ttft_s", "mean"), "ttft_p99_s": ("ttft_s", "p99"),
    "tpot_mean_s": ("tpot_s", "mean"), "tpot_p50_s": ("tpot_s", "p50"), "tpot_p90_s": ("tpot_s", "p90"),
    "tpot_p99_s": ("tpot_s", "p99"), "itl_mean_s": ("itl_s", "mean"), "itl_p99_s": ("itl_s", "p99"),
    "e2e_mean_s": ("e2e_s", "mean"), "e2e_p99_s": ("e2e_s", "p99"), "wait_mean_s": ("wait_s", "mean"),
}  # fmt: skip
THROUGHPUT_COLUMNS = ("output_throughput", "total_throughput", "request_throughput", "mean_at_once")
ACCEPTANCE_COLUMNS = ("tau", "tau_low", "tau_high", "accept_rate", "node_accept_rate")


class ServedRow(TableRow):
    """A line of the table; None for unknown values."""

    TABLE = Path("results/served.csv")

    workload: str
    checkpoint: str | None = None
    tree: str | None = None
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    engine: str
    temperature: float
    decoding: str  # speculative, or plain: with a checkpoint too where it was measured in turns with that cell
    status: str
    max_new_tokens: int | None = None
    concurrency: int | None = None
    request_rate: float | str | None = None
    repeats: int | None = None
    requests: int | None = None
    completed: int | None = None
    tau: float | None = None
    tau_low: float | None = None
    tau_high: float | None = None
    accept_rate: float | None = None
    node_accept_rate: float | None = None
    replay_tau: float | None = None
    replay_ratio: float | None = None
    replay_agrees: str | None = None  # yes, no, or None if the two need not agree
    ttft_mean_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p99_s: float | None = None
    itl_mean_s: float | None = None
    itl_p99_s: float | None = None
    e2e_mean_s: float | None = None
    e2e_p99_s: float | None = None
    wait_mean_s: float | None = None
    output_throughput: float | None = None
    total_throughput: float | None = None
    request_throughput: float | None = None
    mean_at_once: float | None = None
    baseline_output_throughput: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    identical_share: float | None = None
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    remark: str | None = None  # why there is no speedup, or no point
    draft_sampling: DraftSampling | None = None  # None of plain decoding

    @property
    def load(self) -> Load:
        assert self.max_new_tokens is not None, "the line of a point has a load"
        return Load(self.max_new_tokens, self.concurrency)

    @property
    def rate(self) -> float | None:
        """Return requests per second; None where all are sent at once, which the CSV has as empty or inf."""
        rate = float(self.request_rate or "inf")
        return None if math.isinf(rate) else rate

    @property
    def is_faster(self) -> bool:
        """Return whether the speedup's interval lies above 1; False without an interval."""
        return self.speedup_low is not None and self.speedup_low > 1

    @property
    def is_measured(self) -> bool:
        return self.status == served_records.RAN


@dataclass(frozen=True)
class ServedTableLine:
    """A line of the table, with what it was made of."""

    row: ServedRow
    cell: ServedCell
    point: LoadPoint | None  # None if the engine can't run the cell
    baseline_point: LoadPoint | None = None  # of the same load; None for plain lines


def read_served_cells(workloads: Iterable[str], checkpoints: Iterable[str], trees: Iterable[str]) -> list[ServedCell]:
    """Return, for each workload, a baseline cell and a cell for each checkpoint and tree.

    Raises ValueError as `Cell.read_cell`.
    """
    configs = [(None, None), *itertools.product(checkpoints, trees)]
    return [served_records.read_served_cell(workload, *config) for workload in workloads for config in configs]


def read_torch_loads(workloads: Iterable[str], checkpoints: Iterable[str], trees: Iterable[str]) -> list[ServedCell]:
    """Return the torch engine's cells of loads, each with its own baseline. Raises ValueError as `Cell.read_cell`."""
    names = itertools.product(workloads, checkpoints, trees)
    return [served_records.read_served_cell(*cell, served_records.TORCH_ENGINE) for cell in names]


def join_lines(
    cells: Iterable[ServedCell], replayed: Mapping[str, list[ReplayedTree]], replayed_workloads: Collection[str]
) -> list[ServedTableLine]:
    """Return the lines of all points.

    Args:
        cells: as `read_served_cells` returns them.
        replayed: trees by checkpoint.
        replayed_workloads: workloads whose prompts were replayed.
    """
    found: list[ServedTableLine] = []
    baselines: dict[str, ServedCell] = {}
    for cell in cells:
        if cell.checkpoint is None:
            baselines[cell.workload] = cell
            found += _build_plain_lines(cell, cell.points)
        else:
            # A cell measured in alternation with its own baseline does not need the workload's.
            # The torch engine's never has another: with benchmark.mode eagle there is no baseline at all.
            has_own_baseline = cell.baseline_points or cell.engine == served_records.TORCH_ENGINE
            baseline = cell if has_own_baseline else baselines[cell.workload]
            trees = replayed.get(cell.checkpoint, [])
            found += _build_speculative_lines(cell, baseline, trees, cell.workload in replayed_workloads)
            found += _build_plain_lines(cell, cell.baseline_points)
    return found


def _build_plain_lines(cell: ServedCell, points: list[LoadPoint]) -> Iterator[ServedTableLine]:
    if cell.checkpoint is None and cell.status == served_records.UNSUPPORTED:
        yield ServedTableLine(_build_unsupported_row(cell, PLAIN), cell, None)
    for point in points:
        row = ServedRow(**_get_names(cell, PLAIN), **_summarise_loads(point), accuracy=_get_accuracy(point))
        yield ServedTableLine(row, cell, point)


def _build_speculative_lines(
    cell: ServedCell, baseline: ServedCell, trees: list[ReplayedTree], is_replayed: bool
) -> Iterator[ServedTableLine]:
    replay = replay_records.find_replayed_tau(trees, cell)
    if cell.status == served_records.UNSUPPORTED:
        yield ServedTableLine(_build_unsupported_row(cell, SPECULATIVE, replay), cell, None)
        return
    # Only the longest answers of a sweep contain all that was replayed; shorter ones are cut. With benchmark.mode baseline
    # there are no points.
    longest = max((point.max_new_tokens for point in cell.points), default=0)
    for point in cell.points:
        is_comparable = is_replayed and cell.temperature == 0 and point.max_new_tokens == longest
        baseline_points = cell.baseline_points if baseline is cell else baseline.points
        baseline_point = next((candidate for candidate in baseline_points if candidate.load == point.load), None)
        row = ServedRow(
            **_get_names(cell, SPECULATIVE),
            **_summarise_loads(point),
            **_compare_with_replay(point, replay, is_comparable),
            **_compare_with_baseline(cell, point, baseline, baseline_point),
        )
        yield ServedTableLine(row, cell, point, baseline_point)


# A line


def _get_names(cell: ServedCell, decoding: str) -> dict[str, Any]:
    names = (
        "workload",
        "checkpoint",
        "tree",
        "num_steps",
        "topk",
        "num_draft_tokens",
        "engine",
        "temperature",
        "status",
    )
    drafts = cell.draft_sampling if decoding == SPECULATIVE else None
    return {name: cell[name] for name in names} | {"decoding": decoding, "draft_sampling": drafts}


def _build_unsupported_row(cell: ServedCell, decoding: str, replay: float | None = None) -> ServedRow:
    return ServedRow(**_get_names(cell, decoding), replay_tau=replay, remark=f"unsupported: {cell.reason}")


def _summarise_loads(point: LoadPoint) -> dict[str, Any]:
    """Return the columns of a point's loads: sums of requests, and the mean over repeats of every other figure."""
    loads, load_names = point.loads, ("max_new_tokens", "concurrency", "request_rate")
    return (
        {name: point[name] for name in load_names}
        | {"repeats": len(loads)}
        | {name: sum(getattr(load, name) for load in loads) for name in ("requests", "completed")}
        | {
            name: _mean_of_known(getattr(getattr(load, kind), figure, None) for load in loads)
            for name, (kind, figure) in LATENCY_COLUMNS.items()
        }
        | {name: _mean_of_known(getattr(load, name) for load in loads) for name in THROUGHPUT_COLUMNS}
    )


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean over repeats that have a value; a repeat without answers has no latency."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _compare_with_replay(point: LoadPoint, replay: float | None, is_comparable: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"replay_tau": replay}
    if point.acceptance is None:
        return found
    found |= {name: point.acceptance[name] for name in ACCEPTANCE_COLUMNS}
    if replay is None:
        return found
    ratio = point.acceptance.tau / replay
    agrees = ("yes" if abs(ratio - 1) <= REPLAY_TOLERANCE else "no") if is_comparable else None
    return found | {"replay_ratio": ratio, "replay_agrees": agrees}


def _compare_with_baseline(
    cell: ServedCell, point: LoadPoint, baseline: ServedCell, baseline_point: LoadPoint | None
) -> dict[str, Any]:
    """Return speedup, identical share and accuracies, or why there are none; `baseline_point` is the baseline's point."""
    found: dict[str, Any] = {"accuracy": _get_accuracy(point)}
    if reason := _explain_no_speedup(cell, point, baseline, baseline_point):
        return found | {"remark": f"not compared: {reason}"}
    assert baseline_point is not None, "_explain_no_speedup returns a reason"
    throughputs, baseline_throughputs = ([load.output_throughput for load in p.loads] for p in (point, baseline_point))
    speedups = [a / b for a, b in zip(throughputs, baseline_throughputs, strict=True)]
    low, high = interval.compute_mean_interval(speedups) or (None, None)
    return found | {
        "baseline_output_throughput": fmean(baseline_throughputs),
        "speedup": fmean(speedups),
        "speedup_low": low,
        "speedup_high": high,
        "baseline_accuracy": _get_accuracy(baseline_point),
        "identical_share": _compute_identical_share(point, baseline_point) if cell.temperature == 0 else None,
    }


def _explain_no_speedup(
    cell: ServedCell, point: LoadPoint, baseline: ServedCell, baseline_point: LoadPoint | None
) -> str:
    """Return why cell and baseline can't be compared, empty if they can. A cell's own baseline ran on the same server."""
    if baseline is cell and not cell.baseline_points:
        return "plain decoding was not measured (benchmark.mode: eagle)"
    if not cell.baseline_points:
        if baseline.status == served_records.UNSUPPORTED:
            return f"the baseline is unsupported: {baseline.reason}"
        if differs := list(_list_differences(cell.fingerprint, baseline.fingerprint)):
            return f"the baseline differs in {'; '.join(differs)}"
    if baseline_point is None:
        return f"the baseline has no load of {point.max_new_tokens} tokens at concurrency {point.concurrency}"
    if (num_repeats := len(point.loads)) != (baseline_repeats := len(baseline_point.loads)):
        return f"the baseline has {baseline_repeats} repeats, this cell {num_repeats}"
    for name, loads in (("the baseline", baseline_point.loads), ("this cell", point.loads)):
        if not all(load.output_throughput for load in loads):
            return f"{name} answered nothing"
    return ""


def _list_differences(first: Any, second: Any, name: str = "") -> Iterator[str]:
    """Yield the keys of two fingerprints that differ, with both values, the first's first; nested keys are joined by dots."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys([*first, *second]):
            yield from _list_differences(first.get(key), second.get(key), f"{name}.{key}" if name else key)
    elif first != second:
        yield f"{name} ({first!s:.60} against {second!s:.60})"


def _compute_identical_share(point: LoadPoint, baseline_point: LoadPoint) -> float | None:
    """Return the share of identical answers among the requests answered by both."""
    answers, baseline_answers = (
        {(r.repeat, r.id, r.turn): r.answer for r in load_point.requests if not r.failed}
        for load_point in (point, baseline_point)
    )
    matches = [answers[key] == baseline_answers[key] for key in answers.keys() & baseline_answers.keys()]
    return fmean(matches) if matches else None


def _get_accuracy(point: LoadPoint) -> float | None:
    return point.quality.accuracy if point.quality else None
