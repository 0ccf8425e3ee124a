"""Comparison of published numbers with cells of ours: tolerance, verdict, and the reasons why two can't be compared.

`MEASURES` has our measure of each metric; most are columns of the report's table (ResultRow). Another target, draft or machine
moves all numbers of a table. What a reader takes from it, which tree is better than which, may still hold: the rank correlation
over trees, and the sign of each difference that lies outside our intervals (`SeriesAgreement`).
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from stages.cells import interval
from stages.cells.cell import Cell, RequestRow
from stages.cells.table import ResultRow
from stages.published.tables import UNKNOWN, PublishedRow

ACCEPTANCE_METRICS = ("tau", "accept_rate", "node_accept_rate")  # depend on what is decoded alone, not on the machine
MIN_TREES = 5  # of fewer the correlation says nothing
MIN_CORRELATION = 0.8
ASSUME = "assume one in assumed of the recipe"


@dataclass(frozen=True)
class MeasuredNumber:
    """A number of ours."""

    value: float
    spread: float | None  # half of its 95% interval; 0 where it is read and not sampled, None without an interval
    no_interval: str = ""  # why it has none


@dataclass(frozen=True)
class SeriesAgreement:
    """How one metric of one draft runs over trees, in a publication and here."""

    trees: int
    correlation: float  # Spearman's, of the published numbers and ours
    differences: int  # pairs of trees that differ by more than both our intervals, and in print
    agreeing: int  # of them those with the same sign

    @property
    def is_consistent(self) -> bool:
        return self.correlation >= MIN_CORRELATION and self.agreeing == self.differences > 0

    def __str__(self) -> str:
        return (
            f"order over {self.trees} trees: rank correlation {self.correlation:.2f}, {self.agreeing} of {self.differences} "
            "differences outside our intervals have the published sign"
        )


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
    agreement: SeriesAgreement | None = None  # of the table's order over trees with ours
    assumed_meaning: str = ""  # of the metric, where no source states its definition

    @property
    def published_value(self) -> float:
        return self.published.value / self.unit

    @property
    def unit(self) -> float:
        """Return what the printed number of a share of 1 is."""
        return 100.0 if self.published.unit == "%" else 1.0

    @property
    def ratio(self) -> float | None:
        return self.own.value / self.published_value if self.own and self.published_value else None

    @property
    def tolerance(self) -> float:
        """Return the tolerance as a share of the published number.

        It is the recipe's share, half of the last decimal printed, and half of our 95% interval.
        """
        rounding = 0.5 * 10**-self.published.decimals / self.unit
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


def add_agreement(comparisons: Iterable[PublishedComparison]) -> list[PublishedComparison]:
    """Return the comparisons in their order; those of a series of at least MIN_TREES trees with its agreement."""
    ordered = list(comparisons)
    series: dict[tuple[object, ...], list[PublishedComparison]] = {}
    for comparison in ordered:
        if comparison.own and comparison.published.setting.tree is not None:
            series.setdefault(_get_series(comparison), []).append(comparison)
    judged = {key: _judge_series(members) for key, members in series.items()}
    return [replace(one, agreement=judged.get(_get_series(one)) if one.own else None) for one in ordered]


def _get_series(comparison: PublishedComparison) -> tuple[object, ...]:
    """Return what the numbers of a series share: all but tree, and the label, which names trees."""
    row = comparison.published
    setting = row.setting.model_dump(exclude={"tree", "label"})
    return row.publication, row.metric, row.unit, *(str(value) for value in setting.values())


def _judge_series(members: list[PublishedComparison]) -> SeriesAgreement | None:
    """Return how a series agrees; None if it has too few trees, or one side does not vary."""
    from scipy.stats import spearmanr  # half a second to import

    trees = {member.published.setting.tree for member in members}
    values = [(member.published_value, member.own) for member in members if member.own]
    printed, own = [value for value, _ in values], [number.value for _, number in values]
    if len(trees) < MIN_TREES or len(set(printed)) < 2 or len(set(own)) < 2:
        return None
    differences = agreeing = 0
    for (first, ours), (second, theirs) in itertools.combinations(values, 2):
        apart = abs(ours.value - theirs.value) > (ours.spread or 0.0) + (theirs.spread or 0.0)
        if first != second and apart:
            differences += 1
            agreeing += (first > second) == (ours.value > theirs.value)
    return SeriesAgreement(len(trees), float(spearmanr(printed, own).statistic), differences, agreeing)


# Measures


# (cell, its baseline cell where it has one) -> the number, None where the cell does not hold it
FindNumber = Callable[[Cell, Cell | None], MeasuredNumber | None]


@dataclass(frozen=True)
class Measure:
    """Our measure of a metric."""

    find: FindNumber
    meaning: str = ""  # what an assumed definition says in a verdict; docs/metrics.md has it in full


def _build_number(
    value: float, low: float | None, high: float | None, reason: str, divisor: float = 1.0
) -> MeasuredNumber:
    """Return a figure with the interval low to high over `divisor`; `reason` says why it has none."""
    if low is None or high is None:
        return MeasuredNumber(value, None, reason)
    return MeasuredNumber(value, interval.Interval(low, high).half / divisor)


def _average(values: list[float], unit: str) -> MeasuredNumber:
    low, high = interval.compute_mean_interval(values) or (None, None)
    return _build_number(fmean(values), low, high, f"one {unit}")


def _read_acceptance(column: str, cell: Cell, _: Cell | None) -> MeasuredNumber | None:
    """Read tau or a rate. A rate is (tau - 1) over a constant, by which its interval is narrower than tau's."""
    if not cell.points or not (found := cell.points[0].acceptance):
        return None
    divisor = {"tau": 1, "accept_rate": cell.shape.num_steps, "node_accept_rate": cell.shape.num_draft_tokens - 1}
    return _build_number(found[column], found.tau_low, found.tau_high, "one prompt", divisor[column])


def _read_column(column: str, factor: float, cell: Cell, _: Cell | None) -> MeasuredNumber | None:
    """Read a column of ResultRow: the mean over repeats, with the 95% interval of their mean."""
    repeats = cell.points[0].loads if cell.points else []  # of a sweep its first load
    one_by_one = [cell.points[0].model_copy(update={"loads": [load]}) for load in repeats]
    figures = [ResultRow.read_sources(point)[column] for point in one_by_one]
    values = [factor * figure for figure in figures if figure is not None]
    if cell.in_turns and values:
        return MeasuredNumber(fmean(values), None, "a torch cell's latencies and tokens/s carry none")
    return _average(values, "repeat") if values and len(values) == len(figures) else None


def _compare_with_baseline(name: str, less: float, cell: Cell, baseline: Cell | None) -> MeasuredNumber | None:
    """Return the ratio of a measure to the baseline's, less `less`: 1 for a change.

    Cell and baseline are measured independently, so the squares of their relative spreads add up.
    """
    own, plain = (MEASURES[name].find(each, None) if each else None for each in (cell, baseline))
    if own is None or plain is None or not own.value or not plain.value:
        return None
    ratio = own.value / plain.value
    if own.spread is None or plain.spread is None:
        return MeasuredNumber(ratio - less, None, own.no_interval or f"{plain.no_interval} of the baseline")
    relative_spread = math.hypot(own.spread / own.value, plain.spread / plain.value)
    return MeasuredNumber(ratio - less, abs(ratio) * relative_spread)


def _find_speedup(cell: Cell, baseline: Cell | None) -> MeasuredNumber | None:
    """Return the speedup that was pooled over answers in turns, else that of throughput over the baseline's."""
    found = cell.points[0].in_turns if cell.points else None
    if found is None:
        return _compare_with_baseline("output_tok_s", 0, cell, baseline)
    return _build_number(found.speedup, found.speedup_low, found.speedup_high, "one prompt")


def _read_memory(key: str, cell: Cell, _: Cell | None) -> MeasuredNumber | None:
    """Read memory in GB; cells have GiB."""
    value = None if cell.in_turns else cell.memory[key]
    return None if value is None else MeasuredNumber(value * 2**30 / 1e9, 0.0)


def _find_question_tau(cell: Cell, _: Cell | None) -> MeasuredNumber | None:
    taus = list_question_taus(cell.points[0].requests) if cell.in_turns else []
    return _average(taus, "question") if taus else None


def _find_question_speedup(cell: Cell, _: Cell | None) -> MeasuredNumber | None:
    if not cell.in_turns:
        return None
    speeds, plain = (list_question_speeds(points[0].requests) for points in (cell.points, cell.baseline_points))
    low, high = interval.compute_ratio_interval(speeds, plain) or (None, None)
    return _build_number(fmean(speeds) / fmean(plain), low, high, "one question")


MEASURES = {
    "tau": Measure(partial(_read_acceptance, "tau"), "1 + accepted drafts / cycles"),
    "accept_rate": Measure(partial(_read_acceptance, "accept_rate"), "(tau - 1) / num_steps"),
    "node_accept_rate": Measure(partial(_read_acceptance, "node_accept_rate"), "(tau - 1) / (num_draft_tokens - 1)"),
    "prefill_latency_s": Measure(partial(_read_column, "ttft_mean_s", 1), "the mean time to the first token"),
    "e2e_latency_s": Measure(partial(_read_column, "e2e_mean_s", 1), "the mean time to the last token"),
    "output_tok_s": Measure(partial(_read_column, "output_throughput", 1), "output tokens / s"),
    "total_tok_s": Measure(partial(_read_column, "total_throughput", 1), "input and output tokens / s"),
    "ttft_mean_ms": Measure(partial(_read_column, "ttft_mean_s", 1e3), "the mean time to the first token"),
    "tpot_mean_ms": Measure(
        partial(_read_column, "tpot_mean_s", 1e3), "the mean of (e2e - TTFT) / (output tokens - 1)"
    ),
    "tpot_p99_ms": Measure(
        partial(_read_column, "tpot_p99_s", 1e3), "the 99th percentile of (e2e - TTFT) / (output tokens - 1)"
    ),
    "memory_weights_gb": Measure(partial(_read_memory, "weights"), "the target's weights as the engine says them"),
    "memory_draft_gb": Measure(partial(_read_memory, "draft"), "the draft's weights as the engine says them"),
    "memory_kv_gb": Measure(partial(_read_memory, "kv_cache"), "the KV cache as the engine says it"),
    "speedup": Measure(_find_speedup),
    "total_speedup": Measure(partial(_compare_with_baseline, "total_tok_s", 0)),
    "total_tok_s_change": Measure(partial(_compare_with_baseline, "total_tok_s", 1)),
    "ttft_mean_ms_change": Measure(partial(_compare_with_baseline, "ttft_mean_ms", 1)),
    "tpot_mean_ms_change": Measure(partial(_compare_with_baseline, "tpot_mean_ms", 1)),
    "tpot_p99_ms_change": Measure(partial(_compare_with_baseline, "tpot_p99_ms", 1)),
    "tau_of_questions": Measure(_find_question_tau),  # AngelSlim's definitions: means over questions
    "speedup_of_questions": Measure(_find_question_speedup),
}


# Means over questions, AngelSlim's definitions


def group_by_question(rows: Iterable[RequestRow]) -> dict[str, list[RequestRow]]:
    """Return the rows of each question's turns and repeats."""
    found: dict[str, list[RequestRow]] = {}
    for row in rows:
        found.setdefault(row.id, []).append(row)
    return found


def list_question_taus(rows: Iterable[RequestRow]) -> list[float]:
    """Return 1 + accepted / cycles of each question with a cycle."""
    questions = group_by_question(rows).values()
    counts = [(sum(row.accepted or 0 for row in q), sum(row.cycles or 0 for row in q)) for q in questions]
    return [1 + accepted / cycles for accepted, cycles in counts if cycles]


def list_question_speeds(rows: Iterable[RequestRow]) -> list[float]:
    """Return the tokens/s of each question."""
    questions = group_by_question(rows).values()
    return [sum(row.output_tokens or 0 for row in q) / sum(row.e2e_s or 0.0 for row in q) for q in questions]
