"""The table of decoding methods on one verifier (results/methods.csv), and their tokens per second in each engine.

docs/methods.md defines the columns.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.params.units import format_bytes
from stages.reporting.benchmark_table import DOUBTED_MARK, DOUBTED_NOTE
from stages.reporting.text import ONE_PROMPT, align_columns, format_interval, format_number, format_tree
from stages.results.method_records import MethodCell, name_method_stage
from stages.results.record import TableRow
from stages.results.served_table import PLAIN, SPECULATIVE, ServedTableLine
from stages.results.torch_records import TorchCell
from stages.results.training_records import TrainingReport

BASELINE_ROW = "baseline"  # the row of plain decoding
NOT_RUN, NOT_MEASURED = "not run", "not measured"
COMPARED_WAYS = ("autoregressive", "medusa", "eagle3")
METHOD_HEADINGS = (
    ("method", ""), ("tree", ""), ("tau", ""), ("accept_rate", "(%)"), ("speedup", ""), ("95%", "interval"), ("tokens/s", ""),
    ("plain", "tokens/s"), ("identical", "(%)"), ("memory", "weights"), ("memory", "state"), ("needs", "training"),
    ("trained", "parameters"), ("training", "(s)"), ("MoE", ""),
)  # fmt: skip


class MethodRow(TableRow):
    """A line of the table."""

    TABLE = Path("results/methods.csv")

    row: str
    method: str
    checkpoint: str | None = None
    tree: str | None = None  # what the method proposes in a cycle, in a few words
    workload: str
    tau: float
    tau_low: float | None = None
    tau_high: float | None = None
    accept_rate: float | None = None
    output_tok_s: float
    baseline_output_tok_s: float
    speedup: float
    speedup_low: float | None = None
    speedup_high: float | None = None
    identical_share: float | None
    weights_bytes: int
    state_bytes: int
    needs_training: str
    parameters: int
    training_s: float | None = None  # None for a draft that was not trained here
    moe: str  # whether the method ran on a target with experts: this run's target has them, or it was not tried
    engine: str

    @property
    def stage(self) -> str | None:
        """Return the DVC stage that measured it; None for plain decoding, which every stage measures."""
        return None if self.row == BASELINE_ROW else name_method_stage(self.row, self.checkpoint)

    @property
    def is_faster(self) -> bool:
        """Return whether the speedup's interval lies above 1; False without an interval."""
        return self.speedup_low is not None and self.speedup_low > 1


@dataclass(frozen=True)
class EngineSpeeds:
    """Tokens/s of a single request, decoded one way; None where not measured."""

    way: str
    torch: float | None
    sglang: float | None


def build_method_rows(cells: list[MethodCell], trained: Mapping[str, TrainingReport]) -> list[MethodRow]:
    """Return the lines of methods.csv, plain decoding's first; `trained` by checkpoint."""
    return [_build_baseline_row(cells), *(_build_method_row(cell, trained) for cell in cells)] if cells else []


def _build_baseline_row(cells: list[MethodCell]) -> MethodRow:
    """Return the line of plain decoding, the fastest of all cells."""
    fastest = max(cells, key=lambda cell: cell.metrics.baseline_output_tok_s)
    tok_s = fastest.metrics.baseline_output_tok_s
    return MethodRow(
        row=BASELINE_ROW, method=BASELINE_ROW, workload=fastest.workload, engine=fastest.engine, tau=1.0, output_tok_s=tok_s,
        baseline_output_tok_s=tok_s, speedup=1.0, identical_share=1.0, weights_bytes=0, state_bytes=0, needs_training="no",
        parameters=0, moe="works" if fastest.mixture else NOT_RUN,
    )  # fmt: skip


def _build_method_row(cell: MethodCell, trained: Mapping[str, TrainingReport]) -> MethodRow:
    needs_training = cell.parameters > 0
    return MethodRow(
        **cell.model_dump(include={"row", "method", "checkpoint", "workload", "parameters", "engine"}),
        **cell.metrics.model_dump(exclude={"prefill_latency_s", "e2e_latency_s"}),
        tree=describe_guesses(cell),
        weights_bytes=cell.memory.weights,
        state_bytes=cell.memory.state,
        needs_training="yes" if needs_training else "no",
        training_s=sum_training_seconds(cell.checkpoint, trained) if needs_training else 0.0,
        moe="works" if cell.mixture else NOT_RUN,
    )


def sum_training_seconds(checkpoint: str | None, trained: Mapping[str, TrainingReport]) -> float | None:
    """Return the seconds of all segments that lead to the checkpoint; None for a draft that was not trained here."""
    seconds, name = None, checkpoint
    while name is not None and name in trained:
        seconds, name = (seconds or 0.0) + trained[name].seconds, trained[name].from_
    return seconds


def describe_guesses(cell: MethodCell) -> str:
    """Return what a method proposes in a cycle, in a few words."""
    settings = cell.settings
    if "tree" in settings:
        return settings["tree"]
    if cell.method == "ngram":
        return f"{settings['longest']}- to {settings['shortest']}-grams, {settings['length']} tokens"
    if cell.method == "lookahead":
        return f"W {settings['window']}, N {settings['level']}, G {settings['guesses']}"
    return f"static, {settings['nodes']} nodes, {cell.num_steps} deep"


# The terminal


def format_method_table(found: list[MethodRow], doubted: Collection[str] = ()) -> list[str]:
    """Return the terminal's lines. `doubted` are stages whose times are odd."""
    if not found:
        return []
    return [
        f"Methods on one verifier, {found[0].workload}",
        *align_columns(
            [*zip(*METHOD_HEADINGS, strict=True), *(format_method_row(row, row.stage in doubted) for row in found)]
        ),
        *([DOUBTED_NOTE] if any(row.stage in doubted for row in found) else []),
        "",
    ]


def format_method_row(row: MethodRow, is_doubted: bool = False) -> tuple[str, ...]:
    """Return a line of the table, as METHOD_HEADINGS."""
    name = row.row if row.row == row.method else f"{row.row} ({row.method})"
    shape = row.tree or "–"
    no_interval = "–" if row.row == BASELINE_ROW else ONE_PROMPT
    return (
        name + DOUBTED_MARK * is_doubted,
        format_tree(shape) if shape[0] == "t" else shape,
        format_number(row.tau),
        format_number(row.accept_rate, 1, 100),
        f"{row.speedup:.2f}x",
        format_interval(row.speedup_low, row.speedup_high, no_interval),
        f"{row.output_tok_s:.1f}",
        format_number(row.baseline_output_tok_s, 1),
        format_number(row.identical_share, 0, 100),
        format_bytes(row.weights_bytes),
        format_bytes(row.state_bytes),
        row.needs_training,
        f"{row.parameters:,.0f}",
        format_number(row.training_s, 0),
        row.moe,
    )


# Engines


def compare_engines(
    found: list[MethodRow], cells: Iterable[TorchCell], lines: Iterable[ServedTableLine]
) -> list[EngineSpeeds]:
    """Return a line for each way to decode.

    The torch engine's tokens/s are its fastest plain decoding, times the best speedup of the table and of benchmark's
    cells: a speedup is over plain decoding in turns, while the machine may be slower for one row than for another. A
    server's are the fastest tree of the served cells of that workload at concurrency 1. No engine here serves Medusa.
    """
    if not found:
        return []
    workload = found[0].workload
    measured = [cell.metrics for cell in cells if cell.workload == workload]
    speedups = {way: [row.speedup for row in found if row.method == way] for way in COMPARED_WAYS}
    speedups["eagle3"] += [metrics.speedup for metrics in measured]
    plain_tok_s = max([row.baseline_output_tok_s for row in found] + [row.baseline_output_tok_s for row in measured])
    torch = {"autoregressive": plain_tok_s} | {
        way: plain_tok_s * max(values) for way, values in speedups.items() if values
    }
    ways = {PLAIN: "autoregressive", SPECULATIVE: "eagle3"}
    served: dict[str, float] = {}
    for row in (line.row for line in lines if line.row.engine == "sglang"):
        if row.workload == workload and row.concurrency == 1 and row.output_throughput is not None:
            way = ways[row.decoding]
            served[way] = max(served.get(way, 0.0), row.output_throughput)
    return [EngineSpeeds(way, torch.get(way), served.get(way)) for way in COMPARED_WAYS]


def format_speed(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


@dataclass(frozen=True)
class MethodsPageLine:
    texts: tuple[str, ...]
    is_faster: bool  # than plain decoding
    is_doubted: bool  # its times are odd


@dataclass(frozen=True)
class MethodsPage:
    """The content of templates/methods.html.j2."""

    workload: str
    headings: list[str]
    lines: list[MethodsPageLine]
    engines: list[EngineSpeeds]


def build_methods_page(
    found: list[MethodRow], engines: list[EngineSpeeds], doubted: Collection[str]
) -> MethodsPage | None:
    """Return the page's part; None where no method was measured."""
    if not found:
        return None
    headings = [" ".join(filter(None, parts)) for parts in METHOD_HEADINGS]
    lines = [MethodsPageLine(format_method_row(row), row.is_faster, row.stage in doubted) for row in found]
    return MethodsPage(found[0].workload, headings, lines, engines)
