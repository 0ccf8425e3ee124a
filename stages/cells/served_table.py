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
from typing import Annotated, Any

from stages.cells import interval, replay_records, served_records
from stages.cells.record import Column, DraftSampling, TableRow
from stages.cells.replay_records import ReplayedTree
from stages.cells.served_records import LoadPoint, ServedCell
from stages.params.tree_shape import Load

SPECULATIVE, PLAIN = "speculative", "plain"
REPLAY_TOLERANCE = 0.1  # of tau, served against replayed
Number = float | None


def _latency(kind: str, figure: str, heading: tuple[str, str] | None = None) -> Column:
    """Return the column of a distribution of LoadSummary in ms; None in the table where it has no heading."""
    return Column(heading, f"loads.{kind}.{figure}", decimals=1, factor=1000)


class ServedRow(TableRow):
    """A line of the table, of a LoadPoint; None for unknown values. Its columns are of the terminal and of the page too."""

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
    tau: Annotated[Number, Column(("tau", ""), "acceptance.tau")] = None
    tau_low: Annotated[Number, Column(("95%", "interval"), "acceptance.tau_low", high="tau_high")] = None
    tau_high: Annotated[Number, Column(source="acceptance.tau_high")] = None
    accept_rate: Annotated[Number, Column(("accept", "rate (%)"), "acceptance.accept_rate", 1, 100)] = None
    node_accept_rate: Annotated[Number, Column(source="acceptance.node_accept_rate")] = None
    replay_tau: Annotated[Number, Column(("tau,", "replayed"))] = None
    replay_ratio: Number = None
    replay_agrees: str | None = None  # yes, no, or None if the two need not agree
    ttft_mean_s: Annotated[Number, _latency("ttft_s", "mean", ("TTFT", "(ms)"))] = None
    ttft_p99_s: Annotated[Number, _latency("ttft_s", "p99", ("p99", ""))] = None
    tpot_mean_s: Annotated[Number, _latency("tpot_s", "mean", ("TPOT", "(ms)"))] = None
    tpot_p50_s: Annotated[Number, _latency("tpot_s", "p50", ("p50", ""))] = None
    tpot_p90_s: Annotated[Number, _latency("tpot_s", "p90", ("p90", ""))] = None
    tpot_p99_s: Annotated[Number, _latency("tpot_s", "p99", ("p99", ""))] = None
    itl_mean_s: Annotated[Number, _latency("itl_s", "mean", ("ITL", "(ms)"))] = None
    itl_p99_s: Annotated[Number, _latency("itl_s", "p99")] = None
    e2e_mean_s: Annotated[Number, _latency("e2e_s", "mean", ("e2e", "(ms)"))] = None
    e2e_p99_s: Annotated[Number, _latency("e2e_s", "p99")] = None
    wait_mean_s: Annotated[Number, _latency("wait_s", "mean")] = None
    output_throughput: Annotated[Number, Column(("output", "tokens/s"), "loads.output_throughput", 0)] = None
    total_throughput: Annotated[Number, Column(("total", "tokens/s"), "loads.total_throughput", 0)] = None
    request_throughput: Annotated[Number, Column(source="loads.request_throughput")] = None
    mean_at_once: Annotated[Number, Column(source="loads.mean_at_once")] = None
    baseline_output_throughput: Number = None
    speedup: Annotated[Number, Column(("speedup", ""), suffix="x")] = None
    speedup_low: Annotated[Number, Column(("95%", "interval"), high="speedup_high")] = None
    speedup_high: Number = None
    identical_share: Annotated[Number, Column(("identical", "(%)"), "", 0, 100, on_page_only=True)] = None
    accuracy: Annotated[Number, Column(source="quality.accuracy")] = None
    baseline_accuracy: Number = None
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
        row = ServedRow(**_get_names(cell, PLAIN), **_summarise_loads(point))
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
    """Return the columns of a point: its load, sums of requests, and every figure that it holds, the mean over repeats."""
    loads = point.loads
    return {
        **{name: point[name] for name in ("max_new_tokens", "concurrency", "request_rate")},
        "repeats": len(loads),
        **{name: sum(getattr(load, name) for load in loads) for name in ("requests", "completed")},
        **ServedRow.read_sources(point),
    }


def _compare_with_replay(point: LoadPoint, replay: float | None, is_comparable: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"replay_tau": replay}
    if point.acceptance is None or replay is None:
        return found
    ratio = point.acceptance.tau / replay
    agrees = ("yes" if abs(ratio - 1) <= REPLAY_TOLERANCE else "no") if is_comparable else None
    return found | {"replay_ratio": ratio, "replay_agrees": agrees}


def _compare_with_baseline(
    cell: ServedCell, point: LoadPoint, baseline: ServedCell, baseline_point: LoadPoint | None
) -> dict[str, Any]:
    """Return speedup, identical share and the baseline's accuracy, or why there are none."""
    if reason := _explain_no_speedup(cell, point, baseline, baseline_point):
        return {"remark": f"not compared: {reason}"}
    assert baseline_point is not None, "_explain_no_speedup returns a reason"
    throughputs, baseline_throughputs = ([load.output_throughput for load in p.loads] for p in (point, baseline_point))
    speedups = [a / b for a, b in zip(throughputs, baseline_throughputs, strict=True)]
    low, high = interval.compute_mean_interval(speedups) or (None, None)
    return {
        "baseline_output_throughput": fmean(baseline_throughputs),
        "speedup": fmean(speedups),
        "speedup_low": low,
        "speedup_high": high,
        "baseline_accuracy": baseline_point.quality.accuracy if baseline_point.quality else None,
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
