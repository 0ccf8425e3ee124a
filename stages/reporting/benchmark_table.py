"""The table of the torch engine's cells: lines of results/benchmark.csv, and the terminal's text made of them.

docs/metrics.md defines the columns. The first six of the terminal's table are those of the EAGLE-3 table for Qwen3-VL
(published/qwen3-vl-weather.yaml).
"""

import csv
from pathlib import Path
from typing import Any

from stages.reporting.text import ONE_PROMPT, align_columns, format_interval, format_number, format_tree
from stages.results import replay_records

Row = dict[str, Any]

BENCHMARK_TABLE = Path("results/benchmark.csv")
NAME_COLUMNS = ("workload", "checkpoint", "tree", "num_steps", "topk", "num_draft_tokens")
METRIC_COLUMNS = (
    "tau", "tau_low", "tau_high", "accept_rate", "prefill_latency_s", "e2e_latency_s", "output_tok_s", "speedup",
    "speedup_low", "speedup_high", "identical_share",
)  # fmt: skip
BENCHMARK_COLUMNS = (*NAME_COLUMNS, *METRIC_COLUMNS, "replay_tau", "engine")
BENCHMARK_HEADINGS = (
    ("Tree_structure", ""), ("prefill_latency", "(s)"), ("spec_accept_rate", "(%)"), ("e2e_latency", "(s)"),
    ("compress ratio", "(tau)"), ("95%", "interval"), ("speedup", ""), ("95%", "interval"), ("identical", "(%)"),
)  # fmt: skip


def build_benchmark_row(cell: Row, replayed_trees: list[Row]) -> Row:
    """Return one line of benchmark.csv. Floats keep every bit, so that tau can be compared between machines."""
    replay_tau = replay_records.find_replayed_tau(replayed_trees, cell)
    metrics = {k: "" if (value := cell["metrics"][k]) is None else float(value) for k in METRIC_COLUMNS}
    rest = {"replay_tau": "" if replay_tau is None else replay_tau, "engine": cell["engine"]}
    return {k: cell[k] for k in NAME_COLUMNS} | metrics | rest


def read_benchmark_table() -> list[Row]:
    """Return the lines of benchmark.csv, every value as text.

    Raises:
        ValueError: where the file does not exist, with the command that writes it.
    """
    if not BENCHMARK_TABLE.exists():
        raise ValueError(f"{BENCHMARK_TABLE} not found; run: dvc repro report")
    with BENCHMARK_TABLE.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def format_benchmark_table(rows: list[Row], best_checkpoint: str) -> list[str]:
    """Return the terminal's lines, a table per workload and checkpoint; numbers of `rows` may be text."""
    lines = []
    for workload, checkpoint in dict.fromkeys((row["workload"], row["checkpoint"]) for row in rows):
        group = [row for row in rows if (row["workload"], row["checkpoint"]) == (workload, checkpoint)]
        mark = ", the best checkpoint by tau" if checkpoint == best_checkpoint else ""
        lines += [
            f"{workload}, checkpoint {checkpoint}{mark}",
            *align_columns([*zip(*BENCHMARK_HEADINGS, strict=True), *map(_format_benchmark_row, group)]),
        ]
        plain_tok_s = max(float(row["output_tok_s"]) / float(row["speedup"]) for row in group)
        lines += [f"plain decoding, at its best: {plain_tok_s:.1f} tokens/s", ""]
    return lines


def _format_benchmark_row(row: Row) -> tuple[str, ...]:
    n = {k: float(row[k]) for k in METRIC_COLUMNS if row[k] != ""}
    interval, speedups = (
        format_interval(n.get(f"{k}_low"), n.get(f"{k}_high"), ONE_PROMPT) for k in ("tau", "speedup")
    )
    return (
        format_tree(row["tree"]), f"{n['prefill_latency_s']:.3f}", f"{100 * n['accept_rate']:.1f}",
        f"{n['e2e_latency_s']:.3f}", f"{n['tau']:.2f}", interval, f"{n['speedup']:.2f}x", speedups,
        format_number(n.get("identical_share"), 0, 100),
    )  # fmt: skip
