"""A published number and a cell of ours, side by side: how far the two may differ, whether they do, or why it can't be told.

A number is compared with a measure that is made as it is defined: `MEASURES`, each of a torch cell (results/torch_records.py), of a
served one (results/served_records.py) or of either. Apart from literature/own_beside_published.py, which the report is made of: it judges nothing.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from stages.literature.published import UNKNOWN, PublishedRow
from stages.results import interval

ACCEPTANCE_METRICS = ("tau", "accept_rate", "node_accept_rate")  # what hangs on what is decoded alone
ONE_PROMPT = "one prompt"


@dataclass(frozen=True)
class MeasuredNumber:
    """A number of ours."""

    value: float
    spread: float | None  # half of its 95% interval; 0 of what is read and not sampled, None where there is no interval
    why: str = ""  # there is none


@dataclass(frozen=True)
class PublishedComparison:
    """A published number and ours; theirs as a share where it is printed in percent."""

    published: PublishedRow
    ours: MeasuredNumber | None
    cell: str
    ran: bool  # whether the cell is there
    relative: float  # the tolerance that the recipe declares for this metric
    taken: tuple[str, ...]  # settings that nobody stated, as the recipe takes them
    bars: tuple[str, ...]  # why the two can't be compared

    @property
    def theirs(self) -> float:
        return self.published.value / self._unit

    @property
    def _unit(self) -> float:
        return 100.0 if self.published.unit == "%" else 1.0

    @property
    def ratio(self) -> float | None:
        return self.ours.value / self.theirs if self.ours and self.theirs else None

    @property
    def tolerance(self) -> float:
        """Half of the last decimal printed, the recipe's share of their number, and half of our 95% interval, as a share."""
        rounding = 0.5 * 10**-self.published.decimals / self._unit
        spread = (self.ours.spread if self.ours else None) or 0.0
        return self.relative + (rounding + spread) / abs(self.theirs) if self.theirs else float("inf")

    @property
    def verdict(self) -> str:
        if not self.ran:
            return "not run"
        if self.bars or self.ours is None:
            return "not comparable"
        return "within" if abs(self.ours.value - self.theirs) <= self.tolerance * abs(self.theirs) else "outside"

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the verdict: why the two can't be compared, what was taken, why the tolerance has no interval."""
        alone = (f"ours has no interval: {self.ours.why}",) if self.ours and self.ours.why else ()
        return (*self.bars, *self.taken, *alone)


CellRecord = dict[str, Any]
Measure = Callable[
    [CellRecord, CellRecord | None], MeasuredNumber | None
]  # of a cell, and of its baseline where it has one of its own


def measure_cell(name: str, found: CellRecord, baseline: CellRecord | None) -> MeasuredNumber | None:
    """A measure of `MEASURES`, of a cell as in results/torch_records.py or served.py; None where it doesn't hold it."""
    return MEASURES[name](found, baseline) if name in MEASURES else None


def list_obstacles(row: PublishedRow, found: CellRecord, alike: bool) -> Iterator[str]:
    """Why a published number can't be compared with this cell's; `alike`: the measure taken is defined as theirs."""
    setting = row.setting
    if not alike and row.definition == UNKNOWN:
        yield "its definition isn't stated"
    elif not alike and row.definition != row.metric:
        yield f"defined as {row.definition}"
    if setting.temperature == UNKNOWN:
        yield "its temperature isn't stated"
    elif setting.temperature not in (None, found["temperature"]):
        yield f"temperature {setting.temperature} against {found['temperature']}"
    if row.metric in ACCEPTANCE_METRICS:
        return
    if setting.engine and found["engine"] not in setting.engine.lower():  # our torch engine is PyTorch, as AngelSlim's
        yield f"engine {setting.engine} against {found['engine']}"
    version = found["versions"].get(found["engine"], "one that isn't known")
    if setting.engine_version not in (None, version):
        yield f"engine version {setting.engine_version} against {version}"
    machine = found["hardware"].get("gpu") or found["hardware"].get("cpu")
    if setting.hardware and not _find_gpu_names(setting.hardware) <= _find_gpu_names(str(machine)):
        yield f"hardware {setting.hardware} against {machine}"


def _find_gpu_names(hardware: str) -> set[str]:
    """H20 in "1 H20", H100 in "NVIDIA H100 80GB HBM3"; where no card is named, the words, which agree with no other's."""
    return set(re.findall(r"\b[A-Z]+\d+\b", hardware)) - {"HBM3"} or {hardware}


def _measure_torch_metric(name: str) -> Measure:
    def measure(found: CellRecord, _: CellRecord | None) -> MeasuredNumber | None:
        if "metrics" not in found or name not in found["metrics"]:
            return None
        if name in ACCEPTANCE_METRICS:
            return _accepted(name, found, found["metrics"])
        if f"{name}_low" in found["metrics"]:
            return _within(found["metrics"], name, 1.0, ONE_PROMPT)
        return MeasuredNumber(found["metrics"][name], None, "a torch cell's latencies and tokens/s carry none")

    return measure


def _measure_served_acceptance(name: str) -> Measure:
    def measure(found: CellRecord, _: CellRecord | None) -> MeasuredNumber | None:
        point = _get_first_point(found)
        return None if point is None or point["acceptance"] is None else _accepted(name, found, point["acceptance"])

    return measure


def _accepted(name: str, found: CellRecord, said: CellRecord) -> MeasuredNumber:
    """Return tau or a rate, which is (tau - 1) over what it is a rate of: its interval is as much narrower than tau's."""
    of = 1 if name == "tau" else found["num_steps"] if name == "accept_rate" else found["num_draft_tokens"] - 1
    whole = found["engine"] == "vllm"
    why = "vLLM counts accepted drafts over all requests, not of each" if whole else ONE_PROMPT
    return replace(_within(said, "tau", of, why), value=said[name])


def _within(said: CellRecord, name: str, of: float, why: str) -> MeasuredNumber:
    """Return a figure with its interval, `name`_low to `name`_high, divided by `of`; `why` there is none, where there is none."""
    low, high = said[f"{name}_low"], said[f"{name}_high"]
    if low is None or high is None:
        return MeasuredNumber(said[name], None, why)
    return MeasuredNumber(said[name], interval.Interval(low, high).half / of)


def _measure_loads(*place: str, scale: float = 1.0) -> Measure:
    """A figure of each load's summary: the mean over repeats, and its 95% interval by their spread."""

    def measure(found: CellRecord, _: CellRecord | None) -> MeasuredNumber | None:
        point = _get_first_point(found)
        if point is None:
            return None
        values = []
        for value in point["loads"]:
            for key in place:
                value = None if value is None else value[key]
            if value is None:
                return None
            values.append(scale * value)
        return _average_values(values)

    return measure


def _get_first_point(found: CellRecord) -> dict[str, Any] | None:
    """Of a sweep, the first."""
    return found["points"][0] if found.get("points") else None


def _average_values(values: list[float], of: str = "repeat") -> MeasuredNumber:
    found = interval.compute_mean_interval(values)
    return MeasuredNumber(fmean(values), found.half) if found else MeasuredNumber(fmean(values), None, f"one {of}")


def _measure_over_baseline(name: str, less: float = 0.0) -> Measure:
    """A measure over the baseline's own, `less` 1 for a change; the two are measured apart, so their shares add as squares."""

    def measure(found: CellRecord, baseline: CellRecord | None) -> MeasuredNumber | None:
        ours = measure_cell(name, found, None)
        plain = measure_cell(name, baseline, None) if baseline else None
        if ours is None or plain is None or not ours.value or not plain.value:
            return None
        ratio = ours.value / plain.value
        if ours.spread is None or plain.spread is None:
            return MeasuredNumber(ratio - less, None, ours.why or f"{plain.why} of the baseline")
        return MeasuredNumber(
            ratio - less, abs(ratio) * math.hypot(ours.spread / ours.value, plain.spread / plain.value)
        )

    return measure


def _measure_memory(key: str) -> Measure:
    def measure(found: CellRecord, _: CellRecord | None) -> MeasuredNumber | None:
        value = found.get("memory", {}).get(key)
        return None if value is None else MeasuredNumber(value * 2**30 / 1e9, 0.0)

    return measure


def _measure_question_tau(found: CellRecord, _: CellRecord | None) -> MeasuredNumber | None:
    """AngelSlim's: the mean over questions of (accepted / cycles, and 1)."""
    questions = [q for q in _sum_by_question(found, "accepted", "cycles") if q[1]]
    return _average_values([1 + accepted / cycles for accepted, cycles in questions], "question") if questions else None


def _measure_question_speedup(found: CellRecord, _: CellRecord | None) -> MeasuredNumber | None:
    """AngelSlim's: the mean over questions of tokens/s, over that of plain decoding."""
    ours = _sum_by_question(found, "output_tokens", "e2e_latency_s")
    plain = _sum_by_question(found, "baseline_output_tokens", "baseline_e2e_latency_s")
    if not ours:
        return None
    speeds, plain_speeds = ([n / s for n, s in rows] for rows in (ours, plain))
    ends, value = interval.compute_ratio_interval(speeds, plain_speeds), fmean(speeds) / fmean(plain_speeds)
    return MeasuredNumber(value, ends.half) if ends else MeasuredNumber(value, None, "one question")


def _sum_by_question(found: CellRecord, *columns: str) -> list[list[float]]:
    """The columns' sums over each question's turns and repeats, of a torch cell."""
    sums: dict[str, list[float]] = {}
    for row in found.get("prompts", []):
        so_far = sums.get(row["id"], [0.0] * len(columns))
        sums[row["id"]] = [total + row[column] for total, column in zip(so_far, columns, strict=True)]
    return list(sums.values())


def _try_torch_then_served(torch: Measure, served: Measure) -> Measure:
    return lambda found, baseline: torch(found, baseline) or served(found, baseline)


MEASURES: dict[str, Measure] = {
    "tau": _try_torch_then_served(_measure_torch_metric("tau"), _measure_served_acceptance("tau")),
    "accept_rate": _try_torch_then_served(
        _measure_torch_metric("accept_rate"), _measure_served_acceptance("accept_rate")
    ),
    "node_accept_rate": _try_torch_then_served(
        _measure_torch_metric("node_accept_rate"), _measure_served_acceptance("node_accept_rate")
    ),
    "prefill_latency_s": _try_torch_then_served(
        _measure_torch_metric("prefill_latency_s"), _measure_loads("ttft_s", "mean")
    ),
    "e2e_latency_s": _try_torch_then_served(_measure_torch_metric("e2e_latency_s"), _measure_loads("e2e_s", "mean")),
    "output_tok_s": _try_torch_then_served(_measure_torch_metric("output_tok_s"), _measure_loads("output_throughput")),
    "speedup": _try_torch_then_served(_measure_torch_metric("speedup"), _measure_over_baseline("output_tok_s")),
    "tau_of_questions": _measure_question_tau,
    "speedup_of_questions": _measure_question_speedup,
    "total_tok_s": _measure_loads("total_throughput"),
    "ttft_mean_ms": _measure_loads("ttft_s", "mean", scale=1e3),
    "tpot_mean_ms": _measure_loads("tpot_s", "mean", scale=1e3),
    "tpot_p99_ms": _measure_loads("tpot_s", "p99", scale=1e3),
    "total_speedup": _measure_over_baseline("total_tok_s"),
    "total_tok_s_change": _measure_over_baseline("total_tok_s", 1),
    "ttft_mean_ms_change": _measure_over_baseline("ttft_mean_ms", 1),
    "tpot_mean_ms_change": _measure_over_baseline("tpot_mean_ms", 1),
    "tpot_p99_ms_change": _measure_over_baseline("tpot_p99_ms", 1),
    "memory_weights_gb": _measure_memory("weights"),
    "memory_draft_gb": _measure_memory("draft"),
    "memory_kv_gb": _measure_memory("kv_cache"),
}
