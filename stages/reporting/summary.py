"""results/metrics.json, and the terminal's table."""

from pathlib import Path
from statistics import fmean
from typing import Any

from stages.reporting import costs, methods, served
from stages.reporting.benchmark_table import format_benchmark_table
from stages.reporting.inputs import ReportInputs
from stages.results import torch_records

Row = dict[str, Any]

METRICS_FILE = Path("results/metrics.json")
PAGE_FILE = Path("results/report/index.html")


def summarise_results(found: ReportInputs) -> Row:
    """Return the content of results/metrics.json.

    The best checkpoint has the highest replayed tau, averaged over all trees of the grid.
    """
    means = {name: fmean(tree["tau"] for tree in trees) for name, trees in found.replays.items()}
    summary = {
        "best_checkpoint": max(means, key=lambda name: means[name]),
        "checkpoints": {
            name: {"mean_replay_tau": means[name]} | _summarise_checkpoint(name, found) for name in found.replays
        },
        "identical_share_min": min((s for row in found.rows if (s := row["identical_share"]) != ""), default=None),
        "definitions": torch_records.DEFINITIONS,
        "cells": len(found.rows),
        "replayed_trees": sum(map(len, found.replays.values())),
        "rows_unaccounted": sum(abs(counts.unaccounted) for counts in found.count_rows()),
    }
    return summary | ({"served": served.summarise_served([line.row for line in found.lines])} if found.lines else {})


def _summarise_checkpoint(checkpoint: str, found: ReportInputs) -> Row:
    """Return the checkpoint's best replayed tree, and its best measured ones where it has cells."""
    top = max(found.replays[checkpoint], key=lambda tree: tree["tau"])
    summary: Row = {
        "best_replayed": {"tree": f"t{top['steps']}_{top['topk']}_{top['tokens']}", "tau": top["tau"]},
    }
    if cells := [row for row in found.rows if row["checkpoint"] == checkpoint]:
        for metric in ("tau", "speedup"):
            first = max(cells, key=lambda row: row[metric])
            summary[f"best_by_{metric}"] = {k: first[k] for k in ("workload", "tree", "tau", "speedup")}
    return summary


def format_terminal_table(
    rows: list[Row], served_rows: list[Row], metrics: Row, launch: list[Row], method_rows: list[Row]
) -> str:
    """Return aligned text: the torch engine's cells, served cells, methods, and what to launch.

    `rows`, `served_rows` and `method_rows` are lines of benchmark.csv, served.csv and methods.csv; numbers of `rows`
    may be text.
    """
    lines = [
        *format_benchmark_table(rows, metrics["best_checkpoint"]),
        *served.format_served_table(served_rows),
        *methods.format_method_table(method_rows),
        *([*costs.format_launch_table(launch), ""] if launch else []),
    ]
    if lost := metrics["rows_unaccounted"]:
        lines += [
            f"warning: {lost} rows are neither out nor dropped; see 'What happened to the rows' in {PAGE_FILE}",
            "",
        ]
    return "\n".join([*lines, f"tau by {metrics['definitions']}; plots and provenance: {PAGE_FILE}"])
