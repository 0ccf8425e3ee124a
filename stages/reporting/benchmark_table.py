"""The table of the torch engine's cells: lines of results/benchmark.csv, and the terminal's text made of them.

docs/metrics.md defines the columns. The first six of the terminal's table are those of the EAGLE-3 table for Qwen3-VL
(published/qwen3-vl-weather.yaml).
"""

from pathlib import Path

from stages.reporting.text import ONE_PROMPT, align_columns, format_interval, format_number, format_tree
from stages.results import replay_records
from stages.results.record import TableRow
from stages.results.replay_records import ReplayedTree
from stages.results.torch_records import TorchCell


class BenchmarkRow(TableRow):
    """A line of benchmark.csv."""

    TABLE = Path("results/benchmark.csv")

    workload: str
    checkpoint: str
    tree: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    tau: float
    tau_low: float | None
    tau_high: float | None
    accept_rate: float
    prefill_latency_s: float
    e2e_latency_s: float
    output_tok_s: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    identical_share: float | None
    replay_tau: float | None
    engine: str


BENCHMARK_HEADINGS = (
    ("Tree_structure", ""), ("prefill_latency", "(s)"), ("spec_accept_rate", "(%)"), ("e2e_latency", "(s)"),
    ("compress ratio", "(tau)"), ("95%", "interval"), ("speedup", ""), ("95%", "interval"), ("identical", "(%)"),
)  # fmt: skip


def build_benchmark_row(cell: TorchCell, trees: list[ReplayedTree]) -> BenchmarkRow:
    """Return a cell's line; `trees` are its checkpoint's replayed ones."""
    columns = set(BenchmarkRow.list_keys())
    return BenchmarkRow(
        **cell.model_dump(include=columns),
        **cell.metrics.model_dump(include=columns),
        replay_tau=replay_records.find_replayed_tau(trees, cell),
    )


def format_benchmark_table(rows: list[BenchmarkRow], best_checkpoint: str) -> list[str]:
    """Return the terminal's lines, a table per workload and checkpoint."""
    lines = []
    for workload, checkpoint in dict.fromkeys((row.workload, row.checkpoint) for row in rows):
        group = [row for row in rows if (row.workload, row.checkpoint) == (workload, checkpoint)]
        mark = ", the best checkpoint by tau" if checkpoint == best_checkpoint else ""
        plain_tok_s = max(row.output_tok_s / row.speedup for row in group)
        lines += [
            f"{workload}, checkpoint {checkpoint}{mark}",
            *align_columns([*zip(*BENCHMARK_HEADINGS, strict=True), *map(_format_benchmark_row, group)]),
            f"plain decoding, at its best: {plain_tok_s:.1f} tokens/s",
            "",
        ]
    return lines


def _format_benchmark_row(row: BenchmarkRow) -> tuple[str, ...]:
    return (
        format_tree(row.tree), f"{row.prefill_latency_s:.3f}", f"{100 * row.accept_rate:.1f}", f"{row.e2e_latency_s:.3f}",
        f"{row.tau:.2f}", format_interval(row.tau_low, row.tau_high, ONE_PROMPT), f"{row.speedup:.2f}x",
        format_interval(row.speedup_low, row.speedup_high, ONE_PROMPT), format_number(row.identical_share, 0, 100),
    )  # fmt: skip
