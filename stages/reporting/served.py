"""The report's part on served cells: tables by workload and checkpoint, memory, right answers, the engines' own figures.

The terminal's table needs the lines of results/served.csv only. What the page shows beyond it comes from the cells.
"""

import json
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Any

from stages.cells import served_records
from stages.cells.served_records import ServedCell
from stages.cells.served_table import PLAIN, SPECULATIVE, ServedRow, ServedTableLine
from stages.params.tree_shape import Load
from stages.reporting.provenance import MachineGroup, group_machines
from stages.reporting.served_sweeps import LoadSweep, build_sweeps
from stages.reporting.text import (
    ONE_PROMPT,
    ONE_REPEAT,
    UNCOUNTED,
    align_columns,
    format_column,
    format_tree,
)

MAX_TABLE_LINES = 40  # a longer table is folded on the page, and left to the CSV by the terminal


@dataclass(frozen=True)
class ServedPage:
    """The content of templates/served.html.j2."""

    groups: list["ServedGroup"]
    sweeps: list[tuple[LoadSweep, Any]]  # each with its plot as an SVG
    memory: dict[str, list[ServedCell]]
    graded: list[ServedTableLine]
    counted: list[ServedTableLine]
    warnings: list[tuple[ServedTableLine, str]]
    servers: list[tuple[str, str | None]]
    machines: list[MachineGroup]
    headings: list[tuple[str, str]]
    many: int = MAX_TABLE_LINES


def build_served_page(cells: list[ServedCell], lines: list[ServedTableLine]) -> ServedPage:
    rows = [line.row for line in lines]
    return ServedPage(
        groups=group_tables(rows),
        sweeps=[(sweep, sweep.draw()) for sweep in build_sweeps(rows)],
        memory=tabulate_memory(cells),
        graded=[line for line in lines if line.point and line.point.quality],
        counted=list_counted_lines(lines),
        warnings=list_warnings(lines),
        servers=list_server_commands(cells),
        machines=group_machines(cells),
        headings=ServedRow.list_headings(on_page=True),
    )


# Words


def describe_decoding(row: ServedRow) -> str:
    """Return the tree a server ran, or "plain decoding"."""
    return "plain decoding" if row.tree is None or row.decoding == PLAIN else format_tree(row.tree)


def format_group_title(workload: str, checkpoint: str | None) -> str:
    return f"{workload}, checkpoint {checkpoint}" if checkpoint else workload


# Tables


@dataclass(frozen=True)
class ServedGroup:
    """One table: a workload on an engine with a checkpoint."""

    checkpoint: str | None  # None where only plain decoding was served
    rows: list[ServedRow]
    loads: list[Load]
    top_tau: float | None

    @property
    def first(self) -> ServedRow:
        return self.rows[0]

    @property
    def title(self) -> str:
        return format_group_title(self.first.workload, self.checkpoint)


def group_tables(rows: list[ServedRow]) -> list[ServedGroup]:
    """Return a table for each workload, engine and checkpoint.

    A table has, load by load, its trees and the fastest plain decoding; at its end what the engine can't run.
    """
    found = []
    for names in dict.fromkeys((row.workload, row.engine) for row in rows):
        members = [row for row in rows if (row.workload, row.engine) == names]
        checkpoints = dict.fromkeys(row.checkpoint for row in members if row.decoding == SPECULATIVE)
        found += [_build_group(members, checkpoint) for checkpoint in checkpoints or [None]]
    return found


def _build_group(rows: list[ServedRow], checkpoint: str | None) -> ServedGroup:
    plain = select_best_plain(rows)
    trees = [row for row in rows if row.decoding == SPECULATIVE and row.checkpoint == checkpoint]
    measured_rows = [row for row in trees if row.is_measured]
    loads = sorted({row.load for row in measured_rows} | set(plain), key=lambda load: load.sort_key)
    lines: list[ServedRow] = []
    for load in loads:
        lines += [*(row for row in measured_rows if row.load == load), *([plain[load]] if load in plain else [])]
    lines += [row for row in trees if not row.is_measured]
    lines += [row for row in rows if row.decoding == PLAIN and not row.is_measured]
    top_tau = max((row.tau for row in measured_rows if row.tau is not None), default=None)
    return ServedGroup(checkpoint, lines, loads, top_tau)


def select_best_plain(rows: list[ServedRow]) -> dict[Load, ServedRow]:
    """Return the fastest plain decoding of each load, measured by the baseline or in turns with a cell."""
    best: dict[Load, ServedRow] = {}
    for row in rows:
        if row.decoding == PLAIN and row.is_measured:
            best[row.load] = max(best.get(row.load, row), row, key=lambda r: r.output_throughput or 0.0)
    return best


def format_served_table(rows: list[ServedRow]) -> list[str]:
    """Return the terminal's lines."""
    lines: list[str] = []
    for group in group_tables(rows):
        engine = group.first.engine
        by = "by the torch engine" if engine == served_records.TORCH_ENGINE else f"served by {engine}"
        lines.append(f"{group.title}, {by}")
        measured_rows = [row for row in group.rows if row.is_measured]
        if 0 < len(measured_rows) <= MAX_TABLE_LINES:
            headings = [("tree", ""), ("tokens", "x concurrency"), *ServedRow.list_headings()]
            lines += align_columns([*zip(*headings, strict=True), *map(_format_served_row, measured_rows)])
        elif measured_rows:
            lines.append(f"{len(measured_rows)} lines: results/served.csv")
        members = [row for row in rows if (row.workload, row.engine) == (group.first.workload, engine)]
        for sweep in build_sweeps(members):
            if sweep.checkpoint == group.checkpoint:
                lines += [f"{sweep.name}: {sentence}" for sentence in sweep.by_length or sweep.by_cap]
        for row in measured_rows:
            lines += [f"! {describe_decoding(row)}, {row.load.shorten()}: {text}" for text in _list_remarks(row)]
        lines += [
            f"! {describe_decoding(row)}: {describe_unsupported(row)}" for row in group.rows if not row.is_measured
        ]
        lines.append("")
    return lines


def _format_served_row(row: ServedRow) -> tuple[str, ...]:
    return describe_decoding(row), row.load.shorten(), *format_columns(row, on_page=False).values()


def format_columns(row: ServedRow, on_page: bool = True) -> dict[str, str]:
    """Return the texts of the columns that are shown, by field."""
    if row.decoding == PLAIN:
        row = row.model_copy(update={"speedup": 1.0})
    shown, reasons = ServedRow.list_shown(on_page).items(), {"tau_low": _explain_no_tau_interval(row)}
    texts = {name: format_column(row, name, column, reasons.get(name, ONE_REPEAT)) for name, column in shown}
    return texts | ({"speedup_low": ""} if row.decoding == PLAIN else {})


def _explain_no_tau_interval(row: ServedRow) -> str:
    """Return why tau would have no interval: vLLM counts over all requests, which has one where each is counted."""
    is_pooled = row.engine == "vllm" and (row.requests or 0) > (row.repeats or 1)
    return UNCOUNTED if is_pooled else ONE_PROMPT


def _list_remarks(row: ServedRow) -> list[str]:
    requests = row.requests or 0
    failed = requests - (row.completed or 0)
    lost = f"{failed} of {requests} requests failed" if failed else ""
    return list(filter(None, [row.remark, explain_tau_gap(row), lost]))


def describe_unsupported(row: ServedRow) -> str:
    replayed = "" if row.replay_tau is None else f"; replayed, its tau is {row.replay_tau:.2f}"
    return f"{row.remark}{replayed}"


def explain_tau_gap(row: ServedRow) -> str:
    """Return why a served tau away from the replayed one matters; nothing where they agree or needn't."""
    if row.replay_agrees != "no" or row.replay_tau is None:
        return ""
    few_prompts = " But its interval holds the replayed tau: so few prompts may explain it; ask more."
    low, high = row.tau_low, row.tau_high
    within_interval = low is not None and high is not None and low <= row.replay_tau <= high
    return (
        f"tau {row.tau:.2f} is {row.replay_ratio:.2f} of the replayed {row.replay_tau:.2f}. A replay accepts exactly "
        "what this draft and tree accept on these prompts, so the engine drafts from something else than was trained: other "
        "weights or some it skipped, other feature layers, positions, a chat template or a map of the vocabulary. Until that "
        f"is found, this line says nothing of the draft.{few_prompts if within_interval else ''}"
    )


def summarise_served(rows: list[ServedRow]) -> dict[str, Any]:
    """Return what results/metrics.json has of served cells; the best is one whose interval lies above 1, or null."""
    measured_rows = [row for row in rows if row.decoding == SPECULATIVE and row.is_measured]
    joined = [row for row in measured_rows if row.speedup is not None]
    faster = [row for row in joined if row.is_faster]
    best = max(faster, key=lambda row: row.speedup or 0.0, default=None)
    load = ("workload", "checkpoint", "tree", "max_new_tokens", "concurrency")
    names = (*load, "tau", "speedup", "speedup_low", "speedup_high")
    return {
        "points": len(measured_rows),
        "plain_points": sum(row.decoding == PLAIN and row.is_measured for row in rows),
        "unsupported": sum(not row.is_measured for row in rows),
        "not_compared": len(measured_rows) - len(joined),
        "off_replay": sum(row.replay_agrees == "no" for row in measured_rows),
        "best_by_speedup": best and {k: best[k] for k in names},
    }


# What only the cells hold


def tabulate_memory(cells: list[ServedCell]) -> dict[str, list[ServedCell]]:
    """Return each workload's servers of which any memory is known."""
    found: dict[str, list[ServedCell]] = {}
    for cell in cells:
        if any(cell.memory[k] is not None for k in ("weights", "draft", "kv_cache", "gpu_serving")):
            found.setdefault(cell.workload, []).append(cell)
    return found


def list_counted_lines(lines: list[ServedTableLine]) -> list[ServedTableLine]:
    """Return the lines of servers that counted accepted drafts."""
    served = [line for line in lines if line.cell.engine != served_records.TORCH_ENGINE]
    return [line for line in served if line.point and line.point.acceptance]


def list_warnings(lines: list[ServedTableLine]) -> list[tuple[ServedTableLine, str]]:
    """Return the cells' warnings, and how many requests have no answer, by reason."""
    found = []
    for line in lines:
        if not line.point:
            continue
        failed = sum((Counter(load.failed) for load in line.point.loads), Counter())
        lost = [f"{line.row.requests} requests, of them failed: {', '.join(f'{k} {n}' for k, n in failed.items())}"]
        found += [(line, text) for text in [*line.point.warnings, *(lost if failed else [])]]
    return found


def list_server_commands(cells: list[ServedCell]) -> list[tuple[str, str | None]]:
    """Return each server's cell and command line, None for one that was already running."""
    found = []
    for cell in cells:
        if cell.status == served_records.RAN and cell.engine != served_records.TORCH_ENGINE:
            name = served_records.name_served_cell(cell.workload, cell.checkpoint, cell.tree)
            found.append((name, shlex.join(cell.server.command) or None))
    return found


def format_figures(figures: dict[str, Any]) -> str:
    """Return an engine's figures in one line, by its names."""
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v if isinstance(v, str) else json.dumps(v)}"
        for k, v in figures.items()
    )
