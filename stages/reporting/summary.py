"""results/metrics.json, and the terminal's table."""

from pathlib import Path
from statistics import fmean
from typing import Any

from stages.cells.cell import DEFINITIONS
from stages.reporting import costs, tables
from stages.reporting.families import select_shared_trees
from stages.reporting.inputs import ReportInputs

ResultSummary = dict[str, Any]  # the content of results/metrics.json
METRICS_FILE = Path("results/metrics.json")
PAGE_FILE = Path("results/report/index.html")
TABLE_FILE = Path("results/report/table.txt")  # what `aerie run` and `aerie table` print


def summarise_results(found: ReportInputs) -> ResultSummary:
    """Return the content of results/metrics.json.

    The best checkpoint has the highest replayed tau, averaged over the trees of the grid that all checkpoints have.
    """
    shared = select_shared_trees(found.replays)
    means = {name: fmean(tree.tau for tree in trees) for name, trees in shared.items()}
    measured = [row for row in found.rows if row.in_turns]
    shares = [row.identical_share for row in measured if row.identical_share is not None]
    names = dict.fromkeys([*found.replays, *(str(row.checkpoint) for row in measured)])
    summary = {
        "verdict": {"kind": found.verdict.kind, "text": found.verdict.headline},
        "best_checkpoint": max(means, key=lambda name: means[name], default=None),
        "checkpoints": {name: _summarise_checkpoint(name, found, means.get(name)) for name in names},
        "identical_share_min": min(shares, default=None),
        "definitions": DEFINITIONS,
        "cells": len(measured),
        "replayed_trees": sum(map(len, found.replays.values())),
        "rows_unaccounted": sum(abs(counts.unaccounted) for counts in found.count_rows()),
    }
    has_loads = len(measured) < len(found.rows)
    return summary | ({"served": tables.summarise_loads(found.rows)} if has_loads else {})


def _summarise_checkpoint(checkpoint: str, found: ReportInputs, mean_tau: float | None) -> ResultSummary:
    """Return the checkpoint's best replayed tree where it was replayed, and its best measured ones where it has cells.

    Best by speedup is a tree whose interval lies above 1; null where no tree has such a one.
    """
    summary: ResultSummary = {}
    if mean_tau is not None:
        top = max(found.replays[checkpoint], key=lambda tree: tree.tau)
        summary = {"mean_replay_tau": mean_tau, "best_replayed": {"tree": top.shape.name, "tau": top.tau}}
    cells = [row for row in found.rows if row.in_turns and row.checkpoint == checkpoint]
    if cells:
        faster = [row for row in cells if row.is_faster]
        names = ("workload", "tree", "tau", "speedup", "speedup_low", "speedup_high")
        for metric, rows in (("tau", cells), ("speedup", faster)):
            first = max(rows, key=lambda row: row[metric], default=None)
            summary[f"best_by_{metric}"] = first and {name: first[name] for name in names}
    return summary


def get_badge(metrics: ResultSummary) -> str | None:
    """Return the best checkpoint; None where the best of them accepts nothing, which is a warning and no badge."""
    best: str | None = metrics["best_checkpoint"]
    return best if best and metrics["checkpoints"][best]["mean_replay_tau"] > 1 else None


def choose_shown_checkpoint(found: ReportInputs, metrics: ResultSummary) -> str | None:
    """Return the checkpoint of the page's pictures: the one that the verdict is about, if it was replayed, else the best.

    Where none was replayed, the verdict's, else the first measured one; None where only servers' plain decoding was measured.
    """
    about, best = found.verdict.checkpoint, metrics["best_checkpoint"]
    if found.replays:
        return about if about in found.replays else best
    return about or next((row.checkpoint for row in found.rows if row.checkpoint), None)


def format_terminal_table(found: ReportInputs, metrics: ResultSummary) -> str:
    """Return aligned text: the verdict, tables of cells and loads, and what to launch."""
    launch, doubted = found.predicted.launch, found.verdict.doubted
    lines = [
        *found.verdict.list_lines(),
        "",
        *tables.format_tables(found.lines, found.replayed_rows, get_badge(metrics), found.families, doubted),
        *([*costs.format_launch_table(launch), ""] if launch else []),
    ]
    if lost := metrics["rows_unaccounted"]:
        lines += [
            f"warning: {lost} rows are neither out nor dropped; see 'What happened to the rows' in {PAGE_FILE}",
            "",
        ]
    if target := found.reports["sample_target"].get("target"):
        lines.append(f"target {target}")
    return "\n".join([*lines, f"tau by {metrics['definitions']}; plots and provenance: {PAGE_FILE}"])
