"""Comparison of a published number with a cell of ours: tolerance, verdict, and the reasons why the two can't be compared.

`MEASURES` has a measure for each definition of a metric.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from stages.cells import interval
from stages.cells.cell import Cell, LoadPoint, RequestRow
from stages.cells.request_record import LoadSummary
from stages.published.tables import UNKNOWN, PublishedRow

if TYPE_CHECKING:
    from stages.published.agreement import SeriesAgreement

ACCEPTANCE_METRICS = ("tau", "accept_rate", "node_accept_rate")  # depend on what is decoded alone, not on the machine
ONE_PROMPT = "one prompt"
ASSUME = "assume one in assumed of the recipe"


@dataclass(frozen=True)
class MeasuredNumber:
    """A number of ours."""

    value: float
    spread: float | None  # half of its 95% interval; 0 where it is read and not sampled, None without an interval
    no_interval: str = ""  # why it has none


@dataclass(frozen=True)
class PublishedComparison:
    """A published number and ours. Percentages are compared as shares."""

    published: PublishedRow
    own: MeasuredNumber | None
    cell: str
    cell_exists: bool
    relative_tolerance: float  # what the recipe declares for this metric
    assumptions: tuple[str, ...]  # settings that no source states, as the recipe assumes them
    obstacles: tuple[str, ...]  # why the two can't be compared
    agreement: "SeriesAgreement | None" = None  # of the table's order over trees with ours
    assumed_meaning: str = ""  # of the metric, where no source states its definition

    @property
    def published_value(self) -> float:
        return self.published.value / self._unit

    @property
    def _unit(self) -> float:
        return 100.0 if self.published.unit == "%" else 1.0

    @property
    def ratio(self) -> float | None:
        return self.own.value / self.published_value if self.own and self.published_value else None

    @property
    def tolerance(self) -> float:
        """Return the tolerance as a share of the published number.

        It is the recipe's share, half of the last decimal printed, and half of our 95% interval.
        """
        rounding = 0.5 * 10**-self.published.decimals / self._unit
        spread = (self.own.spread if self.own else None) or 0.0
        if not self.published_value:
            return float("inf")
        return self.relative_tolerance + (rounding + spread) / abs(self.published_value)

    @property
    def verdict(self) -> str:
        if not self.cell_exists:
            return "not run"
        if self.obstacles or self.own is None:
            return "consistent" if self.agreement and self.agreement.is_consistent else "not comparable"
        difference = abs(self.own.value - self.published_value)
        return "within" if difference <= self.tolerance * abs(self.published_value) else "outside"

    @property
    def conditional_verdict(self) -> str:
        """Return the verdict, and on which definition of the metric it rests where no source states one."""
        if not self.assumed_meaning or self.verdict not in ("within", "outside"):
            return self.verdict
        return f"{self.verdict}, if {self.published.metric} means {self.assumed_meaning}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the obstacles, the assumptions, why the tolerance has no interval, and how the order over trees agrees."""
        reason = self.own.no_interval if self.own else ""
        why = [f"ours has no interval: {reason}"] if reason else []
        return (*self.obstacles, *self.assumptions, *why, *([str(self.agreement)] if self.agreement else []))


# (cell, its baseline cell where it has one) -> the number
Measure = Callable[[Cell, Cell | None], MeasuredNumber | None]


def measure_cell(name: str, cell: Cell, baseline: Cell | None) -> MeasuredNumber | None:
    """Return a measure of `MEASURES`; None where the cell does not hold it."""
    return MEASURES[name](cell, baseline) if name in MEASURES else None


def list_obstacles(row: PublishedRow, cell: Cell, same_definition: bool) -> Iterator[str]:
    """Yield why a published number can't be compared with this cell's, and what would make it comparable.

    `same_definition`: the recipe names a measure that is defined as the published number is, or is assumed to be.
    """
    setting = row.setting
    if not same_definition and row.definition == UNKNOWN:
        yield "its definition isn't stated; assume one in assumed_definitions of the recipe"
    elif not same_definition and row.definition != row.metric:
        yield f"defined as {row.definition}; name the measure that is, in measures of the recipe"
    if setting.temperature == UNKNOWN:
        yield f"its temperature isn't stated; {ASSUME}"
    elif setting.temperature not in (None, cell.temperature):
        yield f"temperature {setting.temperature} against {cell.temperature}; add a workload of that temperature"
    if setting.drafting == "sampled" and cell.temperature and cell.in_turns:
        yield "drafts sampled there, the most probable ones here; serve the cell by SGLang's DSPARK, which samples them"
    if row.metric in ACCEPTANCE_METRICS:
        return
    if setting.engine and cell.engine not in setting.engine.lower():  # "torch" is in AngelSlim's PyTorch
        yield f"engine {setting.engine} against {cell.engine}; run the cell on that engine"
    version, wanted = cell.versions.get(cell.engine, "one that isn't known"), setting.engine_version
    if wanted not in (None, version):
        remedy = f"install {wanted} in serving-env and run the cell again (serving-env/README.md)"
        yield f"engine version {wanted} against {version}; {ASSUME if wanted == UNKNOWN else remedy}"
    machine, wanted = cell.hardware.get("gpu") or cell.hardware.get("cpu"), setting.hardware
    if wanted and not _find_gpu_names(wanted) <= _find_gpu_names(str(machine)):
        yield f"hardware {wanted} against {machine}; {ASSUME if wanted == UNKNOWN else f'run the cell on {wanted}'}"


def _find_gpu_names(hardware: str) -> set[str]:
    """Return H20 for "1 H20", H100 for "NVIDIA H100 80GB HBM3"; the whole text where it names no GPU."""
    return set(re.findall(r"\b[A-Z]+\d+\b", hardware)) - {"HBM3"} or {hardware}


# Measures


def _measure_acceptance(name: str) -> Measure:
    """Measure tau or a rate. A rate is (tau - 1) over a constant, by which its interval is narrower than tau's."""

    def measure(cell: Cell, _: Cell | None) -> MeasuredNumber | None:
        point = _get_first_point(cell)
        if not (point and (figures := point.acceptance)):
            return None
        shape = cell.shape
        divisor = {"tau": 1, "accept_rate": shape.num_steps, "node_accept_rate": shape.num_draft_tokens - 1}[name]
        return _build_number(figures[name], figures.tau_low, figures.tau_high, ONE_PROMPT, divisor)

    return measure


def _measure_speedup(cell: Cell, baseline: Cell | None) -> MeasuredNumber | None:
    """Return the speedup that was pooled over answers in turns, else that of throughput over the baseline's."""
    point = _get_first_point(cell)
    if point and (found := point.in_turns):
        return _build_number(found.speedup, found.speedup_low, found.speedup_high, ONE_PROMPT)
    return _measure_over_baseline("output_tok_s")(cell, baseline)


def _build_number(
    value: float, low: float | None, high: float | None, reason: str, divisor: float = 1.0
) -> MeasuredNumber:
    """Return a figure with the interval low to high over `divisor`; `reason` says why it has none."""
    if low is None or high is None:
        return MeasuredNumber(value, None, reason)
    return MeasuredNumber(value, interval.Interval(low, high).half / divisor)


def _measure_loads(get_figure: Callable[[LoadSummary], float | None], factor: float = 1.0) -> Measure:
    """Measure a figure of each load: the mean over repeats, with the 95% interval of their mean."""

    def measure(cell: Cell, _: Cell | None) -> MeasuredNumber | None:
        point = _get_first_point(cell)
        if point is None:
            return None
        figures = [get_figure(load) for load in point.loads]
        values = [factor * figure for figure in figures if figure is not None]
        if cell.in_turns and values:
            return MeasuredNumber(fmean(values), None, "a torch cell's latencies and tokens/s carry none")
        return _average_values(values) if len(values) == len(figures) else None

    return measure


def _get_first_point(cell: Cell) -> LoadPoint | None:
    """Return a cell's point, the first of a sweep."""
    return cell.points[0] if cell.points else None


def _average_values(values: list[float], unit: str = "repeat") -> MeasuredNumber:
    low, high = interval.compute_mean_interval(values) or (None, None)
    return _build_number(fmean(values), low, high, f"one {unit}")


def _measure_over_baseline(name: str, less: float = 0.0) -> Measure:
    """Measure a ratio to the baseline, less `less`: 1 for a change.

    Cell and baseline are measured independently, so the squares of their relative spreads add up.
    """

    def measure(cell: Cell, baseline: Cell | None) -> MeasuredNumber | None:
        own = measure_cell(name, cell, None)
        plain = measure_cell(name, baseline, None) if baseline else None
        if own is None or plain is None or not own.value or not plain.value:
            return None
        ratio = own.value / plain.value
        if own.spread is None or plain.spread is None:
            return MeasuredNumber(ratio - less, None, own.no_interval or f"{plain.no_interval} of the baseline")
        relative_spread = math.hypot(own.spread / own.value, plain.spread / plain.value)
        return MeasuredNumber(ratio - less, abs(ratio) * relative_spread)

    return measure


def _measure_memory(key: str) -> Measure:
    """Measure memory in GB; cells have GiB."""

    def measure(cell: Cell, _: Cell | None) -> MeasuredNumber | None:
        value = None if cell.in_turns else cell.memory[key]
        return None if value is None else MeasuredNumber(value * 2**30 / 1e9, 0.0)

    return measure


def _measure_question_tau(cell: Cell, _: Cell | None) -> MeasuredNumber | None:
    """Return the mean over questions of 1 + accepted / cycles, AngelSlim's definition."""
    taus = [
        1 + sum(row.accepted or 0 for row in rows) / cycles
        for rows in _group_by_question(cell, cell.points)
        if (cycles := sum(row.cycles or 0 for row in rows))
    ]
    return _average_values(taus, "question") if taus else None


def _measure_question_speedup(cell: Cell, _: Cell | None) -> MeasuredNumber | None:
    """Return the mean over questions of tokens/s, over that of plain decoding: AngelSlim's definition."""
    speeds, plain_speeds = (
        [sum(row.output_tokens or 0 for row in rows) / sum(row.e2e_s or 0.0 for row in rows) for rows in questions]
        for questions in (_group_by_question(cell, cell.points), _group_by_question(cell, cell.baseline_points))
    )
    if not speeds:
        return None
    low, high = interval.compute_ratio_interval(speeds, plain_speeds) or (None, None)
    return _build_number(fmean(speeds) / fmean(plain_speeds), low, high, "one question")


def _group_by_question(cell: Cell, points: list[LoadPoint]) -> list[list[RequestRow]]:
    """Return the rows of each question's turns and repeats, of a cell that was decoded prompt by prompt."""
    found: dict[str, list[RequestRow]] = {}
    for row in points[0].requests if cell.in_turns else ():
        found.setdefault(row.id, []).append(row)
    return list(found.values())


# What an assumed definition says in a verdict; docs/metrics.md has them in full.
MEANINGS = {
    "tau": "1 + accepted drafts / cycles",
    "accept_rate": "(tau - 1) / num_steps",
    "node_accept_rate": "(tau - 1) / (num_draft_tokens - 1)",
    "prefill_latency_s": "the mean time to the first token",
    "e2e_latency_s": "the mean time to the last token",
    "output_tok_s": "output tokens / s",
    "total_tok_s": "input and output tokens / s",
    "ttft_mean_ms": "the mean time to the first token",
    "tpot_mean_ms": "the mean of (e2e - TTFT) / (output tokens - 1)",
    "tpot_p99_ms": "the 99th percentile of (e2e - TTFT) / (output tokens - 1)",
    "memory_weights_gb": "the target's weights as the engine says them",
    "memory_draft_gb": "the draft's weights as the engine says them",
    "memory_kv_gb": "the KV cache as the engine says it",
}

MEASURES: dict[str, Measure] = {
    **{name: _measure_acceptance(name) for name in ACCEPTANCE_METRICS},
    "prefill_latency_s": _measure_loads(lambda load: load.ttft_s.mean if load.ttft_s else None),
    "e2e_latency_s": _measure_loads(lambda load: load.e2e_s.mean if load.e2e_s else None),
    "output_tok_s": _measure_loads(lambda load: load.output_throughput),
    "speedup": _measure_speedup,
    "tau_of_questions": _measure_question_tau,
    "speedup_of_questions": _measure_question_speedup,
    "total_tok_s": _measure_loads(lambda load: load.total_throughput),
    "ttft_mean_ms": _measure_loads(lambda load: load.ttft_s.mean if load.ttft_s else None, factor=1e3),
    "tpot_mean_ms": _measure_loads(lambda load: load.tpot_s.mean if load.tpot_s else None, factor=1e3),
    "tpot_p99_ms": _measure_loads(lambda load: load.tpot_s.p99 if load.tpot_s else None, factor=1e3),
    "total_speedup": _measure_over_baseline("total_tok_s"),
    **{
        f"{name}_change": _measure_over_baseline(name, 1)
        for name in ("total_tok_s", "ttft_mean_ms", "tpot_mean_ms", "tpot_p99_ms")
    },
    "memory_weights_gb": _measure_memory("weights"),
    "memory_draft_gb": _measure_memory("draft"),
    "memory_kv_gb": _measure_memory("kv_cache"),
}
