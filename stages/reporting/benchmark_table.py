"""The table of the torch engine's cells: lines of results/benchmark.csv, and the terminal's text made of them.

Trees that were replayed and not measured have a line too, with the tau of replay and the predicted speedup.
docs/metrics.md defines the columns. The first six of the terminal's table are those of the EAGLE-3 table for Qwen3-VL
(published/qwen3-vl-weather.yaml).
"""

from collections.abc import Collection
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from stages.cells import replay_records
from stages.cells.prediction import PredictedSpeedup
from stages.cells.record import GREEDY, Column, DraftSampling, TableRow
from stages.cells.replay_records import ReplayedTree
from stages.cells.served_records import TORCH_ENGINE
from stages.cells.torch_records import TorchCell, name_torch_stage
from stages.params.families import EAGLE3, DraftKind
from stages.params.tree_shape import TreeShape, parse_shape
from stages.params.units import format_bytes
from stages.reporting.families import Families
from stages.reporting.text import (
    ONE_PROMPT,
    align_columns,
    format_column,
    format_tree,
)

NO_INTERVAL = "no interval"  # of a prediction: docs/cost.md says when
REPLAYED_MARK = " *"
TORCH_ONLY_MARK = " +"
DOUBTED_MARK, DOUBTED_NOTE = " !", "! doubtful timings, as the lines at the top say"
REPLAYED_NOTE = (
    "* not measured: tau replayed over the eval split (measured: over the workload's prompts), speedup predicted"
)
CHAIN_NOTE = "in brackets: a chain's older name, which leaves the root out of the number of draft tokens"


Number = float | None


class BenchmarkRow(TableRow):
    """A line of benchmark.csv: a cell, or a replayed tree without one. Its columns are of the terminal and of the page too."""

    TABLE = Path("results/benchmark.csv")

    workload: str
    checkpoint: str
    tree: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    source: Literal["measured", "replayed"]
    # None of a replayed tree: latencies, tokens/s, CPU time, memory
    prefill_latency_s: Annotated[Number, Column(("prefill", "(s)"), decimals=3)]
    accept_rate: Annotated[float, Column(("accept rate", "(%)"), decimals=1, factor=100)]
    e2e_latency_s: Annotated[Number, Column(("e2e", "(s)"), decimals=3)]
    tau: Annotated[float, Column(("tau", "(± 95%)"), ends=("tau_low", "tau_high"), is_spread=True)]
    tau_low: Number
    tau_high: Number
    # None of a replayed tree outside the timing grid
    speedup: Annotated[Number, Column(("speedup", "(95% interval)"), suffix="x", ends=("speedup_low", "speedup_high"))]
    speedup_low: Number
    speedup_high: Number
    identical_share: Annotated[Number, Column(("identical", "(%)"), decimals=0, factor=100)]
    output_tok_s: Annotated[Number, Column(("output", "tokens/s"), decimals=0, on_page_only=True)]
    replay_tau: Annotated[Number, Column(("tau,", "replayed"), on_page_only=True)]
    # by CPU time; None on a GPU too
    process_speedup: Annotated[Number, Column(("speedup,", "CPU time"), suffix="x", on_page_only=True)] = None
    engine: str
    draft_sampling: DraftSampling = GREEDY  # tables of before it was recorded have none
    weights_bytes: int | None = None  # of the draft
    state_bytes: int | None = None  # that it keeps between cycles
    draft_parameters: int | None = None

    @property
    def shape(self) -> TreeShape:
        return parse_shape(self.tree)

    @property
    def stage(self) -> str:
        """Return the stage of dvc.yaml that a measured line is of."""
        return name_torch_stage(self.workload, self.checkpoint, self.tree)

    @property
    def is_replayed(self) -> bool:
        return self.source == "replayed"

    @property
    def is_faster(self) -> bool:
        """Return whether the speedup's interval lies above 1; False without an interval."""
        return self.speedup_low is not None and self.speedup_low > 1

    @property
    def why_no_interval(self) -> str:
        return NO_INTERVAL if self.is_replayed else ONE_PROMPT


def build_benchmark_row(cell: TorchCell, trees: list[ReplayedTree]) -> BenchmarkRow:
    """Return a cell's line; `trees` are its checkpoint's replayed ones."""
    columns = set(BenchmarkRow.list_keys())
    return BenchmarkRow(
        **cell.model_dump(include=columns),
        **cell.metrics.model_dump(include=columns),
        source="measured",
        replay_tau=replay_records.find_replayed_tau(trees, cell),
        process_speedup=cell.process_speedup,
        **cell.draft.model_dump(),
    )


def build_replayed_row(workload: str, tree: ReplayedTree, predicted: PredictedSpeedup | None) -> BenchmarkRow:
    """Return the line of a tree without a cell; `predicted` is its speedup at the workload's temperature."""
    shape = tree.shape
    return BenchmarkRow(
        **tree.model_dump(
            include={"checkpoint", "topk", "tau", "tau_low", "tau_high", "accept_rate", "draft_sampling"}
        ),
        workload=workload,
        tree=shape.name,
        num_steps=shape.num_steps,
        num_draft_tokens=shape.num_draft_tokens,
        source="replayed",
        prefill_latency_s=None,
        e2e_latency_s=None,
        output_tok_s=None,
        speedup=predicted.speedup if predicted else None,
        speedup_low=predicted.low if predicted else None,
        speedup_high=predicted.high if predicted else None,
        identical_share=None,
        replay_tau=tree.tau,
        engine=TORCH_ENGINE,
    )


def format_benchmark_table(
    rows: list[BenchmarkRow], best_checkpoint: str | None, families: Families, doubted: Collection[str] = ()
) -> list[str]:
    """Return the terminal's lines, a table per workload and checkpoint. `doubted` are stages whose times are odd."""
    lines, compares_memory = [], any(not draft.family.is_replayed for draft in families.values())
    for workload, checkpoint in dict.fromkeys((row.workload, row.checkpoint) for row in rows):
        group = [row for row in rows if (row.workload, row.checkpoint) == (workload, checkpoint)]
        mark = ", the best checkpoint by replayed tau" if checkpoint == best_checkpoint else ""
        family = families[checkpoint]
        name = "" if family.family is EAGLE3 else f" ({family.title})"
        name = f" ({_describe_draft(family, group)})" if compares_memory else name
        lines += [f"{workload}, checkpoint {checkpoint}{name}{mark}", *_align_benchmark_rows(group, family, doubted)]
        if plain_tok_s := [row.output_tok_s / row.speedup for row in group if row.output_tok_s and row.speedup]:
            lines.append(f"plain decoding: {median(plain_tok_s):.1f} tokens/s, the median of the measured rows")
        if any(row.stage in doubted for row in group):
            lines.append(DOUBTED_NOTE)
        if reason := family.explain_torch_only(row.shape for row in group):
            lines.append(f"{TORCH_ONLY_MARK.strip()} {reason}")
        lines += [*([REPLAYED_NOTE] if any(row.is_replayed for row in group) else []), ""]
    if any(row.topk == 1 for row in rows):
        lines[-1:] = [CHAIN_NOTE, ""]
    return lines


def _describe_draft(draft: DraftKind, group: list[BenchmarkRow]) -> str:
    """Return a draft's family, and the memory that it takes beside the target's where that was measured."""
    sizes = [row for row in group if row.weights_bytes is not None and row.state_bytes is not None]
    if not sizes:
        return draft.title
    state = max(row.state_bytes or 0 for row in sizes)
    return f"{draft.title}: weights {format_bytes(sizes[0].weights_bytes or 0)}, state {format_bytes(state)}"


def _align_benchmark_rows(group: list[BenchmarkRow], family: DraftKind, doubted: Collection[str]) -> list[str]:
    heads = zip(("tree", ""), *BenchmarkRow.list_headings(), strict=True)
    marks = [
        REPLAYED_MARK * row.is_replayed
        + DOUBTED_MARK * (row.stage in doubted)
        + TORCH_ONLY_MARK * (not family.is_served(row.shape))
        for row in group
    ]
    texts = [
        (format_tree(row.tree) + mark, *format_columns(row).values()) for row, mark in zip(group, marks, strict=True)
    ]
    return align_columns([*heads, *texts])


def format_columns(row: BenchmarkRow, on_page: bool = False) -> dict[str, str]:
    """Return the texts of the columns that are shown, by field."""
    shown = BenchmarkRow.list_shown(on_page).items()
    return {name: format_column(row, name, column, row.why_no_interval) for name, column in shown}
