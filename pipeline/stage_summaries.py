"""Summarise what a stage made, in a few words for its line in the terminal, from the report that the stage has written.

One function for each stage that has a report, in SUMMARIES. A report that is missing or of another form gives no words: the
line then has the seconds alone, since a summary must not fail a run whose stages went well.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from stages.params.byte_size import format_bytes

ReportT = TypeVar("ReportT", bound=BaseModel)
RESULTS = Path("results")
TARGET_FILE = Path("artifacts/target/target.json")
MAX_SHOWN_REASONS = 4  # of dropped rows

# Reasons of fix_data (docs/data.md) whose names do not say enough; of others the name is shown.
REASON_NAMES = {
    "duplicate": "duplicates", "near_duplicate": "near duplicates", "wrong_turns": "with turns out of order",
    "empty_turn": "with an empty turn", "row_width": "tables with a row cut short",
    "row_count": "tables with too few or many rows",
    "no_table": "without a table", "not_toon": "tables unreadable", "broken_row": "tables with a broken row",
    "repeated_table": "tables written twice", "count_or_cut": "tables cut short or miscounted", "not_json": "JSON unreadable",
    "no_json": "without JSON", "prose_or_key": "with a line that is prose or a key",
    "wrong_value": "tables with an impossible value", "too_long": "too long",
    "too_short": "too short", "in_eval": "also in eval", "near_eval": "nearly as in eval",
}  # fmt: skip


class FixReport(BaseModel):
    """The part of results/fix_report.json that the line shows."""

    rows_out: int
    repaired: int
    dropped: int
    train: int
    eval: int
    dropped_reasons: dict[str, int]


class TargetFacts(BaseModel):
    model: str
    num_layers: int
    hidden_size: int
    vocab_size: int


class SampleReport(BaseModel):
    rows_out: int
    dropped: dict[str, int]
    truncated: dict[str, int]
    tokens: dict[str, int]
    missing: dict[str, int]


class HiddensReport(BaseModel):
    rows_out: int
    tokens: int
    bytes: int
    dropped: dict[str, int]


class VocabReport(BaseModel):
    draft_vocab_size: int
    target_vocab_size: int
    coverage_eval: float
    draft_parameters: int


class ImportReport(BaseModel):
    """The part of a published draft's results/train/NAME.json that the line shows."""

    method: str
    draft_parameters: int
    draft_vocab_size: int
    rope_theta: float
    notes: list[str]


class RowReport(BaseModel):
    """A draft that has learned one row."""

    tau: float
    min_tau: float
    perfect_tau: float
    required_tau: float
    steps: int


class OverfitReport(RowReport):
    block_drafts: dict[str, RowReport] = {}  # by segment


class EpochLine(BaseModel):
    epoch: int
    loss: float
    step_accuracy: list[float]


class TrainReport(BaseModel):
    epochs: list[EpochLine]


class CostFit(BaseModel):
    error: float


class CostReport(BaseModel):
    grid: list[object]
    fit: CostFit


class ServingCosts(BaseModel):
    grids: list[CostReport]


class TorchMetrics(BaseModel):
    tau: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None


class TorchCell(BaseModel):
    metrics: TorchMetrics


class ServedAcceptance(BaseModel):
    tau: float


class ServedPoint(BaseModel):
    acceptance: ServedAcceptance | None


class ServedCell(BaseModel):
    status: str
    reason: str | None = None
    points: list[ServedPoint]
    baseline_points: list[ServedPoint] = []


class RunMetrics(BaseModel):
    best_checkpoint: str | None
    cells: int
    replayed_trees: int


def summarise_stage(name: str) -> str:
    """Return what the stage of dvc.yaml made last, in a few words, a line for each of several drafts; "" for nothing to say."""
    stage, _, item = name.partition("@")
    try:
        return SUMMARIES[stage](item) if stage in SUMMARIES else ""
    except (OSError, ValueError, KeyError):  # pydantic's and json's errors are ValueErrors
        return ""


def _read(model: type[ReportT], path: Path) -> ReportT:
    return model.model_validate_json(path.read_bytes())


def _fix_data(_: str) -> str:
    report = _read(FixReport, RESULTS / "fix_report.json")
    kept = f"{report.rows_out:,} conversations kept ({report.repaired:,} repaired; {report.train:,} train, {report.eval:,} eval)"
    return kept + _list_drops(report.dropped_reasons, "results/fix_report.json")


def _list_drops(reasons: dict[str, int], file: str) -> str:
    """Return ", 18 dropped: 12 tables unreadable, 6 duplicates", "" if none is dropped."""
    counts = sorted(((n, reason) for reason, n in reasons.items() if n), reverse=True)
    if not counts:
        return ""
    shown = [f"{n:,} {REASON_NAMES.get(reason, reason.replace('_', ' '))}" for n, reason in counts[:MAX_SHOWN_REASONS]]
    if others := sum(n for n, _ in counts[MAX_SHOWN_REASONS:]):
        shown.append(f"{others:,} for other reasons ({file})")
    return f", {sum(n for n, _ in counts):,} dropped: {', '.join(shown)}"


def _prepare_target(_: str) -> str:
    target = _read(TargetFacts, TARGET_FILE)
    return f"{target.model}: {target.num_layers} layers, {target.hidden_size:,} wide, {target.vocab_size:,} tokens"


def _sample_target(_: str) -> str:
    report = _read(SampleReport, RESULTS / "sample_report.json")
    cut = sum(report.truncated.values())
    summary = f"{report.rows_out:,} answers, {sum(report.tokens.values()):,} tokens"
    summary += f", {cut:,} cut at max_new_tokens" if cut else ""
    for split in ("train", "eval"):  # eval_t has the questions of eval
        if missing := report.missing[split]:
            summary += f", {missing:,} fewer than sample_target.{split}_rows: the data has no more"
    return summary + _list_drops(report.dropped, "results/sample_report.json")


def _extract_hiddens(_: str) -> str:
    report = _read(HiddensReport, RESULTS / "hiddens_report.json")
    summary = f"hidden states of {report.tokens:,} tokens in {report.rows_out:,} rows, {format_bytes(report.bytes)}"
    return summary + _list_drops(report.dropped, "results/hiddens_report.json")


def _init_draft(item: str) -> str:
    report = _read(VocabReport, RESULTS / f"train/{item}.json")
    return (
        f"{report.draft_parameters:,} parameters, {report.draft_vocab_size:,} of {report.target_vocab_size:,} tokens, which are "
        f"{report.coverage_eval:.1%} of eval answers"
    )


def _check_overfit(item: str) -> str:
    """Return a line for each draft, with its name where there are several."""
    report = _read(OverfitReport, RESULTS / f"train/{item}.overfit.json")
    drafts = {item: report, **report.block_drafts}
    summaries = {name: _summarise_row(draft) for name, draft in drafts.items()}
    return "\n".join(f"{name}: {text}" for name, text in summaries.items()) if report.block_drafts else summaries[item]


def _summarise_row(report: RowReport) -> str:
    reached = f"tau {report.tau:.2f} of {report.perfect_tau:.2f} on one row after {report.steps} steps"
    if report.min_tau == 1:
        return f"{reached}; nothing required, so it may have learnt nothing (check_overfit.min_tau is 1.0)"
    return f"{reached}, at least {report.required_tau:.2f} required"


def _train_draft(item: str) -> str:
    last = _read(TrainReport, RESULTS / f"train/{item}.json").epochs[-1]
    return f"epoch {last.epoch}, loss {last.loss:.2f}, {last.step_accuracy[0]:.0%} of first drafts right"


def _import_draft(item: str) -> str:
    report = _read(ImportReport, RESULTS / f"train/{item}.json")
    notes = f"; note: {'; note: '.join(report.notes)}" if report.notes else ""
    return (
        f"{report.method}, {report.draft_parameters:,} parameters, draft vocabulary {report.draft_vocab_size:,}, rope_theta "
        f"{report.rope_theta:,.0f}{notes}"
    )


def _replay_trees(item: str) -> str:
    with (RESULTS / f"replay/{item}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if float(row["temperature"]) == 0]
    best = max(rows, key=lambda row: float(row["tau"]))
    tree = f"t{best['num_steps']}_{best['topk']}_{best['num_draft_tokens']}"
    return f"tau {float(best['tau']):.2f} on eval by {tree}, the highest of {len(rows)} trees"


def _time_trees(item: str) -> str:
    report = _read(CostReport, RESULTS / f"cost/torch-{item}.json")
    return f"{len(report.grid)} trees timed, each predicted from the others within {report.fit.error:.0%}"


def _benchmark(item: str) -> str:
    path = RESULTS / f"cells/{item}.json"
    if "points" in json.loads(path.read_bytes()):  # a workload of loads
        return _summarise_served(path)
    metrics = _read(TorchCell, path).metrics
    summary = f"tau {metrics.tau:.2f}, speedup {metrics.speedup:.2f}x"
    if metrics.speedup_low is None or metrics.speedup_high is None:
        return summary
    return f"{summary} ({metrics.speedup_low:.2f} to {metrics.speedup_high:.2f})"


def _summarise_served(path: Path) -> str:
    cell = _read(ServedCell, path)
    if not cell.points and not cell.baseline_points:
        return f"{cell.status}: {cell.reason}" if cell.reason else cell.status
    if not cell.points:
        return f"plain decoding only, {len(cell.baseline_points)} load{'s' if len(cell.baseline_points) != 1 else ''}"
    loads = f"{len(cell.points)} load{'s' if len(cell.points) != 1 else ''}"
    taus = sorted(f"{point.acceptance.tau:.2f}" for point in cell.points if point.acceptance)
    return f"{loads}, tau {' to '.join(dict.fromkeys([taus[0], taus[-1]]))}" if taus else loads


def _serving_costs(workload: str) -> str:
    grids = _read(ServingCosts, RESULTS / f"cost/served-{workload}.json").grids
    timed, error = sum(len(grid.grid) for grid in grids), max(grid.fit.error for grid in grids)
    return f"{timed} cycles timed, each predicted from the others within {error:.0%}"


def _report(_: str) -> str:
    metrics = _read(RunMetrics, RESULTS / "metrics.json")
    best = f"best checkpoint by replayed tau {metrics.best_checkpoint}, " if metrics.best_checkpoint else ""
    cells = f"{metrics.cells} cell{'s' if metrics.cells != 1 else ''}"
    return f"{best}{cells} and {metrics.replayed_trees} replayed trees in results/report/index.html"


SUMMARIES: dict[str, Callable[[str], str]] = {
    "fix_data": _fix_data,
    "prepare_target": _prepare_target,
    "sample_target": _sample_target,
    "extract_hiddens": _extract_hiddens,
    "init_draft": _init_draft,
    "check_overfit": _check_overfit,
    "train_draft": _train_draft,
    "import_draft": _import_draft,
    "replay_trees": _replay_trees,
    "time_trees": _time_trees,
    "benchmark": _benchmark,
    "benchmark_served": lambda item: _summarise_served(RESULTS / f"cells/served-{item}.json"),
    "benchmark_served_baseline": lambda item: _summarise_served(RESULTS / f"cells/served-{item}-baseline.json"),
    "serving_costs": _serving_costs,
    "benchmark_methods": lambda item: _benchmark(f"method-{item}"),
    "benchmark_methods_baseline": lambda item: _benchmark(f"method-{item}"),
    "report": _report,
}
