"""The table of results, results/benchmark.csv: each point of a cell beside plain decoding, and beside the replay of its tree.

A line is a point of a cell, or a replayed tree without one. A baseline's point is joined only if both have the same requests,
engine and machine (`fingerprint`); otherwise the line names the differences and has no speedup. Columns: docs/metrics.md.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from stages.cells import points
from stages.cells.cell import PLAIN, RAN, SPECULATIVE, UNSUPPORTED, Cell, LoadPoint, name_stage
from stages.cells.prediction import OverruledPrediction, PredictedSpeedup, SpeedupConditions
from stages.cells.record import Column, DraftSampling, TableRow
from stages.cells.replay_records import ReplayedTree, select_sampled_alike
from stages.params.engines import TORCH
from stages.params.tree_shape import Load, TreeShape, parse_shape

MEASURED, REPLAYED = "measured", "replayed"
REPLAY_TOLERANCE = 0.1  # of tau, served against replayed
Number = float | None


def _latency(kind: str, figure: str, heading: tuple[str, str] | None = None) -> Column:
    """Return the column of a distribution of LoadSummary in ms."""
    return Column(heading, f"loads.{kind}.{figure}", decimals=1, factor=1000)


class ResultRow(TableRow):
    """A line of the table; None for unknown values. Its columns are of the terminal and of the page too.

    Where prompts are decoded one by one, in turns, the tables show other columns: IN_TURNS, of which the first four are those of
    the EAGLE-3 table for Qwen3-VL (published/qwen3-vl-weather.yaml).
    """

    TABLE = Path("results/benchmark.csv")
    IN_TURNS: ClassVar[dict[str, Column]] = {
        "ttft_mean_s": Column(("prefill", "(s)"), decimals=3),
        "accept_rate": Column(("accept rate", "(%)"), decimals=1, factor=100),
        "e2e_mean_s": Column(("e2e", "(s)"), decimals=3),
        "tau": Column(("tau", "(± 95%)"), ends=("tau_low", "tau_high"), is_spread=True),
        "speedup": Column(("speedup", "(95% interval)"), suffix="x", ends=("speedup_low", "speedup_high")),
        "identical_share": Column(("identical", "(%)"), decimals=0, factor=100),
        "output_throughput": Column(("output", "tokens/s"), decimals=0, on_page_only=True),
        "replay_tau": Column(("tau,", "replayed"), on_page_only=True),
    }

    workload: str
    checkpoint: str | None = None
    tree: str | None = None
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    engine: str
    temperature: float
    source: str = MEASURED  # or replayed, whose speedup is predicted
    decoding: str = SPECULATIVE  # or plain: with a checkpoint too where it was measured in turns with that cell
    status: str = RAN
    in_turns: bool = False  # prompt by prompt, both ways of decoding in turns
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
    weights_bytes: int | None = None  # of the draft, in the torch engine
    state_bytes: int | None = None  # that it keeps between cycles
    draft_parameters: int | None = None

    @classmethod
    def list_view(cls, in_turns: bool, on_page: bool = False) -> dict[str, Column]:
        """Return the columns that a table shows, by field."""
        columns = cls.IN_TURNS if in_turns else cls.list_columns()
        return {
            name: column for name, column in columns.items() if column.heading and (on_page or not column.on_page_only)
        }

    @property
    def load(self) -> Load:
        assert self.max_new_tokens is not None, "the line of a point has a load"
        return Load(self.max_new_tokens, self.concurrency)

    @property
    def shape(self) -> TreeShape:
        assert self.tree, "plain decoding has no tree"
        return parse_shape(self.tree)

    @property
    def conditions(self) -> SpeedupConditions:
        length = None if self.in_turns else self.max_new_tokens
        return SpeedupConditions(self.engine, self.workload, length, self.temperature, self.concurrency)

    @property
    def stage(self) -> str:
        """Return the stage of dvc.yaml that a measured line is of."""
        return name_stage(self.engine, self.workload, self.checkpoint, self.tree)

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
    def is_replayed(self) -> bool:
        return self.source == REPLAYED

    @property
    def is_plain(self) -> bool:
        return self.decoding == PLAIN

    @property
    def is_measured(self) -> bool:
        return self.status == RAN and not self.is_replayed


@dataclass(frozen=True)
class TableLine:
    """A line of the table, with what it was made of."""

    row: ResultRow
    cell: Cell
    point: LoadPoint | None  # None if the engine can't run the cell
    baseline_point: LoadPoint | None = None  # of the same load; None for plain lines


def join_lines(
    cells: Iterable[Cell], replayed: Mapping[str, list[ReplayedTree]], replayed_workloads: Collection[str]
) -> list[TableLine]:
    """Return the lines of all points of `cells`, of a served workload the baseline first.

    `replayed` are trees by checkpoint, `replayed_workloads` the workloads whose prompts were replayed.
    """
    found: list[TableLine] = []
    baselines: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        if cell.checkpoint is None:
            baselines[cell.engine, cell.workload] = cell
            found += _build_plain_lines(cell, cell.points)
        else:
            # A cell measured in alternation with its own baseline does not need the workload's.
            # The torch engine's never has another: with benchmark.mode eagle there is no baseline at all.
            has_own_baseline = cell.baseline_points or not cell.is_served
            baseline = cell if has_own_baseline else baselines[cell.engine, cell.workload]
            trees = replayed.get(cell.checkpoint, []) if cell.workload in replayed_workloads else []
            found += _build_speculative_lines(cell, baseline, trees)
            found += _build_plain_lines(cell, [] if cell.in_turns else cell.baseline_points)
    return found


def _build_plain_lines(cell: Cell, baseline_points: list[LoadPoint]) -> Iterator[TableLine]:
    if cell.checkpoint is None and cell.status == UNSUPPORTED:
        yield TableLine(_build_unsupported_row(cell, PLAIN), cell, None)
    for point in baseline_points:
        yield TableLine(ResultRow(**_get_names(cell, PLAIN), **_summarise_loads(point)), cell, point)


def _build_speculative_lines(cell: Cell, baseline: Cell, trees: list[ReplayedTree]) -> Iterator[TableLine]:
    replay = find_replayed_tau(trees, cell)
    if cell.status != RAN:
        yield TableLine(_build_unsupported_row(cell, SPECULATIVE, replay), cell, None)
        return
    # Only the longest answers of a sweep contain all that was replayed; shorter ones are cut. With benchmark.mode baseline
    # there are no points.
    longest = max((point.max_new_tokens for point in cell.points), default=0)
    is_greedy_replay = cell.temperature == 0 and not cell.in_turns
    for point in cell.points:
        baseline_points = cell.baseline_points if baseline is cell else baseline.points
        baseline_point = next((candidate for candidate in baseline_points if candidate.load == point.load), None)
        row = ResultRow(
            **_get_names(cell, SPECULATIVE),
            **_summarise_loads(point),
            **_compare_with_replay(point, replay, is_greedy_replay and point.max_new_tokens == longest),
            **_compare_with_baseline(cell, point, baseline, baseline_point),
            **(cell.draft.model_dump() if cell.draft else {}),
        )
        yield TableLine(row, cell, point, baseline_point)


def find_replayed_tau(trees: Iterable[ReplayedTree], cell: Cell) -> float | None:
    """Return the replayed tau of a cell's tree on answers and drafts sampled as the cell's; None if there is none."""
    alike = select_sampled_alike(trees, cell.temperature, cell.top_p, cell.top_k, cell.draft_sampling)
    return next((tree.tau for tree in alike if tree.shape == cell.shape), None)


def build_replayed_row(workload: str, tree: ReplayedTree, predicted: PredictedSpeedup | None) -> ResultRow:
    """Return the line of a tree without a cell; `predicted` is its speedup at the workload's temperature."""
    copied = ("checkpoint", "tree", "num_steps", "topk", "num_draft_tokens", "temperature", "tau", "tau_low", "tau_high",
              "accept_rate", "draft_sampling")  # fmt: skip
    return ResultRow(
        **tree.model_dump(include=set(copied)),
        speedup=predicted.speedup if predicted else None,
        speedup_low=predicted.low if predicted else None,
        speedup_high=predicted.high if predicted else None,
        workload=workload,
        engine=TORCH.name,
        source=REPLAYED,
        in_turns=True,
        replay_tau=tree.tau,
    )


def overrule_predictions(
    predicted: Iterable[PredictedSpeedup], rows: Iterable[ResultRow], replayable: Collection[str]
) -> list[PredictedSpeedup]:
    """Return the predictions with the measured speedup in place of the predicted one where a row has the same tree and load.

    `replayable` are the workloads that the torch engine's predictions hold for.
    """
    measured = {
        (row.conditions.find_predicted(replayable), str(row.checkpoint), row.shape): row
        for row in rows
        if row.is_measured and not row.is_plain and row.speedup is not None and row.rate is None
    }
    found: list[PredictedSpeedup] = []
    for guess in predicted:
        row = measured.get((guess.conditions, guess.checkpoint, guess.shape))
        ends = row and {"speedup": row.speedup, "low": row.speedup_low, "high": row.speedup_high}
        found.append(OverruledPrediction.model_validate(guess.model_dump() | ends) if ends else guess)
    return found


# A line


def _get_names(cell: Cell, decoding: str) -> dict[str, Any]:
    names = ("workload", "checkpoint", "tree", "engine", "temperature", "status", "in_turns")
    drafts = cell.draft_sampling if decoding == SPECULATIVE else None
    sizes = ("num_steps", "topk", "num_draft_tokens") if cell.tree else ()
    return {
        **{name: cell[name] for name in names},
        **{name: getattr(cell.shape, name) for name in sizes},
        "decoding": decoding,
        "draft_sampling": drafts,
    }


def _build_unsupported_row(cell: Cell, decoding: str, replay: float | None = None) -> ResultRow:
    return ResultRow(**_get_names(cell, decoding), replay_tau=replay, remark=f"{cell.status}: {cell.reason}")


def _summarise_loads(point: LoadPoint) -> dict[str, Any]:
    """Return the columns of a point: its load, sums of requests, and every figure that it holds, the mean over repeats."""
    loads = point.loads
    return {
        **{name: point[name] for name in ("max_new_tokens", "concurrency", "request_rate")},
        "repeats": len(loads),
        **{name: sum(getattr(load, name) for load in loads) for name in ("requests", "completed")},
        **ResultRow.read_sources(point),
    }


def _compare_with_replay(point: LoadPoint, replay: float | None, is_comparable: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"replay_tau": replay}
    if point.acceptance is None or replay is None:
        return found
    ratio = point.acceptance.tau / replay
    agrees = ("yes" if abs(ratio - 1) <= REPLAY_TOLERANCE else "no") if is_comparable else None
    return found | {"replay_ratio": ratio, "replay_agrees": agrees}


def _compare_with_baseline(
    cell: Cell, point: LoadPoint, baseline: Cell, baseline_point: LoadPoint | None
) -> dict[str, Any]:
    """Return speedup, identical share and the baseline's accuracy, or why there are none."""
    if reason := _explain_no_speedup(cell, point, baseline, baseline_point):
        return {"remark": f"not compared: {reason}"}
    assert baseline_point is not None, "_explain_no_speedup returns a reason"
    found = point.in_turns or points.average_speedup(point.loads, baseline_point.loads)
    assert found is not None, "_explain_no_speedup returns a reason"
    return found.model_dump() | {
        "baseline_output_throughput": baseline_point.mean_throughput,
        "baseline_accuracy": baseline_point.quality.accuracy if baseline_point.quality else None,
        "identical_share": point.share_identical(baseline_point) if cell.temperature == 0 else None,
    }


def _explain_no_speedup(cell: Cell, point: LoadPoint, baseline: Cell, baseline_point: LoadPoint | None) -> str:
    """Return why cell and baseline can't be compared, empty if they can. A cell's own baseline ran on the same server."""
    if baseline is cell and not cell.baseline_points:
        return "plain decoding was not measured (benchmark.mode: eagle)"
    if not cell.baseline_points:
        if baseline.status == UNSUPPORTED:
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
