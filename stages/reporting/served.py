"""The report's part on served cells: tables by workload and checkpoint, memory, right answers, the engines' own figures.

`Row` is a line of results/served.csv (results/served_table.py), as joined or as read back: the terminal's table needs
nothing else. What the page shows beyond it comes from the cells (results/served_records.py).
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stages.reporting.provenance import MachineGroup, group_machines
from stages.reporting.served_sweeps import LoadKey, LoadSweep, build_sweeps, get_load, get_request_rate
from stages.reporting.text import (
    ONE_PROMPT,
    ONE_REPEAT,
    UNCOUNTED,
    align_columns,
    format_interval,
    format_number,
    format_tree,
)
from stages.results import served_records
from stages.results.served_table import PLAIN, SPECULATIVE, ServedTableLine

Row = dict[str, Any]

MAX_TABLE_LINES = 40  # a longer table is folded on the page, and left to the CSV by the terminal
SERVED_HEADINGS = (
    ("Tree_structure", ""), ("tokens", "x at once"), ("tau", ""), ("95%", "interval"), ("tau,", "replayed"),
    ("accept", "rate (%)"), ("TTFT mean", "(ms)"), ("p99", ""), ("TPOT mean", "(ms)"), ("p50", ""), ("p90", ""), ("p99", ""),
    ("ITL mean", "(ms)"), ("output", "tokens/s"), ("total", "tokens/s"), ("speedup", ""), ("95%", "interval"),
)  # fmt: skip


@dataclass(frozen=True)
class ServedPage:
    """The content of templates/served.html.j2, with the functions called there."""

    groups: list["ServedGroup"]
    sweeps: list[tuple[LoadSweep, Any]]  # each with its plot as an SVG
    memory: dict[str, list["ServerMemory"]]
    quality: list["GradedPoint"]
    engines: list["EngineFigures"]
    warnings: list["PointWarning"]
    servers: list["ServerCommand"]
    machines: list[MachineGroup]
    off: Callable[[Row], str]
    server: Callable[[Row], str]
    tau_span: Callable[[Row], str]
    speedup_span: Callable[[Row], str]
    title: Callable[[str, str | None], str]
    many: int = MAX_TABLE_LINES


def build_served_page(cells: list[Row], lines: list[ServedTableLine]) -> ServedPage:
    rows = [line.row for line in lines]
    return ServedPage(
        groups=group_tables(rows),
        sweeps=[(sweep, sweep.draw()) for sweep in build_sweeps(rows)],
        memory=tabulate_memory(cells),
        quality=list_graded_points(lines),
        engines=list_engine_figures(lines),
        warnings=list_warnings(lines),
        servers=list_server_commands(cells),
        machines=group_machines(cells),
        off=explain_tau_gap,
        server=describe_decoding,
        tau_span=tau_span,
        speedup_span=speedup_span,
        title=format_group_title,
    )


# Words


def format_load(row: Row) -> str:
    tokens, cap = get_load(row)
    return f"{tokens:g} x {'no limit' if math.isinf(cap) else f'{cap:g}'}"


def describe_load(row: Row) -> str:
    tokens, cap = get_load(row)
    return f"{tokens:g} tokens, {'no limit of concurrency' if math.isinf(cap) else f'{cap:g} at once'}"


def describe_decoding(row: Row) -> str:
    """Return the tree a server ran, or "plain decoding"."""
    plain = row["tree"] is None or row.get("decoding") == PLAIN
    return "plain decoding" if plain else format_tree(row["tree"])


def format_group_title(workload: str, checkpoint: str | None) -> str:
    return f"{workload}, checkpoint {checkpoint}" if checkpoint else workload


# Tables


@dataclass(frozen=True)
class ServedGroup:
    """One table: a workload on an engine with a checkpoint."""

    workload: str
    engine: str
    temperature: float
    checkpoint: str | None  # None where only plain decoding was served
    rate: float | None  # requests per second; None where all are sent at once
    rows: list[Row]
    loads: list[LoadKey]
    top_tau: float | None
    top_speedup: float | None


def group_tables(rows: list[Row]) -> list[ServedGroup]:
    """Return a table for each workload, engine and checkpoint.

    A table has, load by load, its trees and the fastest plain decoding; at its end what the engine can't run.
    """
    found = []
    for workload, engine in dict.fromkeys((row["workload"], row["engine"]) for row in rows):
        members = [row for row in rows if (row["workload"], row["engine"]) == (workload, engine)]
        drafted = [row for row in members if row["decoding"] == SPECULATIVE]
        for checkpoint in dict.fromkeys(row["checkpoint"] for row in drafted) or [None]:
            found.append(_build_group(members, checkpoint))  # noqa: PERF401
    return found


def _build_group(rows: list[Row], checkpoint: str | None) -> ServedGroup:
    plain = select_best_plain(rows)
    trees = [row for row in rows if row["decoding"] == SPECULATIVE and row["checkpoint"] == checkpoint]
    ran = [row for row in trees if row["status"] == served_records.RAN]
    loads = sorted({get_load(row) for row in ran} | set(plain))
    lines: list[Row] = []
    for load in loads:
        lines += [row for row in ran if get_load(row) == load]
        lines += [plain[load]] if load in plain else []
    lines += [row for row in trees if row not in ran]
    lines += [row for row in rows if row["decoding"] == PLAIN and row["status"] == served_records.UNSUPPORTED]
    first = lines[0]
    top_tau, top_speedup = (
        max((row[k] for row in ran if row[k] is not None), default=None) for k in ("tau", "speedup")
    )
    return ServedGroup(
        first["workload"], first["engine"], first["temperature"], checkpoint, get_request_rate(first), lines, loads,
        top_tau, top_speedup,
    )  # fmt: skip


def select_best_plain(rows: list[Row]) -> dict[LoadKey, Row]:
    """Return the fastest plain decoding of each load, measured by the baseline or in turns with a cell."""
    best: dict[LoadKey, Row] = {}
    for row in rows:
        if row["decoding"] == PLAIN and row["status"] == served_records.RAN:
            best[get_load(row)] = max(best.get(get_load(row), row), row, key=lambda r: r["output_throughput"])
    return best


def format_served_table(rows: list[Row]) -> list[str]:
    """Return the terminal's lines."""
    lines: list[str] = []
    for group in group_tables(rows):
        by = "by the torch engine" if group.engine == served_records.TORCH_ENGINE else f"served by {group.engine}"
        lines.append(f"{format_group_title(group.workload, group.checkpoint)}, {by}")
        ran = [row for row in group.rows if row["status"] == served_records.RAN]
        if 0 < len(ran) <= MAX_TABLE_LINES:
            lines += align_columns([*zip(*SERVED_HEADINGS, strict=True), *map(_format_served_row, ran)])
        elif ran:
            lines.append(f"{len(ran)} lines: results/served.csv")
        members = [row for row in rows if (row["workload"], row["engine"]) == (group.workload, group.engine)]
        for sweep in build_sweeps(members):
            if sweep.checkpoint == group.checkpoint:
                lines += [f"{sweep.name}: {sentence}" for sentence in sweep.by_length or sweep.by_cap]
        for row in ran:
            lines += [f"! {describe_decoding(row)}, {format_load(row)}: {remark}" for remark in _list_remarks(row)]
        unsupported = [row for row in group.rows if row not in ran]
        lines += [f"! {describe_decoding(row)}: {describe_unsupported(row)}" for row in unsupported]
        lines.append("")
    return lines


def _format_served_row(row: Row) -> tuple[str, ...]:
    times = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s", "itl_mean_s")
    speedup = 1.0 if row["decoding"] == PLAIN else row["speedup"]
    return (
        describe_decoding(row), format_load(row), format_number(row["tau"]),
        tau_span(row), format_number(row["replay_tau"]), format_number(row["accept_rate"], 1, 100),
        *(format_number(row[name], 1, 1000) for name in times), format_number(row["output_throughput"], 1),
        format_number(row["total_throughput"], 1), format_number(speedup) + ("" if speedup is None else "x"),
        speedup_span(row),
    )  # fmt: skip


def tau_span(row: Row) -> str:
    """Return tau's interval, or why it has none; nothing without a tau."""
    if row["tau"] is None:
        return ""
    return format_interval(row["tau_low"], row["tau_high"], UNCOUNTED if row["engine"] == "vllm" else ONE_PROMPT)


def speedup_span(row: Row) -> str:
    """Return the speedup's interval, or why it has none; nothing without a speedup."""
    return "" if row["speedup"] is None else format_interval(row["speedup_low"], row["speedup_high"], ONE_REPEAT)


def _list_remarks(row: Row) -> list[str]:
    failed = row["requests"] - row["completed"]
    lost = f"{failed:g} of {row['requests']:g} requests failed" if failed else ""
    return list(filter(None, [row["remark"], explain_tau_gap(row), lost]))


def describe_unsupported(row: Row) -> str:
    replayed = "" if row["replay_tau"] is None else f"; replayed, its tau is {row['replay_tau']:.2f}"
    return f"{row['remark']}{replayed}"


def explain_tau_gap(row: Row) -> str:
    """Return why a served tau away from the replayed one matters; nothing where they agree or needn't."""
    if row["replay_agrees"] != "no":
        return ""
    within_interval = row["tau_low"] is not None and row["tau_low"] <= row["replay_tau"] <= row["tau_high"]
    return (
        f"tau {row['tau']:.2f} is {row['replay_ratio']:.2f} of the replayed {row['replay_tau']:.2f}. A replay accepts exactly "
        "what this draft and tree accept on these prompts, so the engine drafts from something else than was trained: other "
        "weights or some it skipped, other feature layers, positions, a chat template or a map of the vocabulary. Until that "
        "is found, this line says nothing of the draft."
        + (
            " But its interval holds the replayed tau: so few prompts may explain it; ask more."
            if within_interval
            else ""
        )
    )


def summarise_served(rows: list[Row]) -> Row:
    """Return what results/metrics.json has of served cells."""
    ran = [row for row in rows if row["decoding"] == SPECULATIVE and row["status"] == served_records.RAN]
    joined = [row for row in ran if row["speedup"] is not None]
    first = max(joined, key=lambda row: row["speedup"], default=None)
    names = ("workload", "checkpoint", "tree", "max_new_tokens", "concurrency", "tau", "speedup")
    return {
        "points": len(ran),
        "plain_points": sum(row["decoding"] == PLAIN and row["status"] == served_records.RAN for row in rows),
        "unsupported": sum(row["status"] == served_records.UNSUPPORTED for row in rows),
        "not_compared": len(ran) - len(joined),
        "off_replay": sum(row["replay_agrees"] == "no" for row in ran),
        "best_by_speedup": first and {k: first[k] for k in names},
    }


# What only the cells hold


@dataclass(frozen=True)
class ServerMemory:
    """Memory of one server, in GiB; None for what the engine does not report."""

    server: str
    checkpoint: str | None
    reported: Row  # the cell's `memory`
    sum: float | None  # of weights, draft and KV cache
    held: float | None  # GPU memory that the server took


@dataclass(frozen=True)
class PointName:
    """One point of a served cell, in words."""

    workload: str
    checkpoint: str | None
    decoding: str
    tree: str
    load: str


@dataclass(frozen=True)
class GradedPoint:
    point: PointName
    quality: Row  # the point's `quality`
    baseline_accuracy: float | None


@dataclass(frozen=True)
class EngineFigures:
    point: PointName
    acceptance: Row  # our counts: the point's `acceptance`
    reported: str  # the engine's own figures, by its names


@dataclass(frozen=True)
class PointWarning:
    point: PointName
    text: str


@dataclass(frozen=True)
class ServerCommand:
    name: str
    command: str | None  # None for a server that was already running


def tabulate_memory(cells: list[Row]) -> dict[str, list[ServerMemory]]:
    """Return each workload's servers of which any memory is known."""
    found: dict[str, list[ServerMemory]] = {}
    for cell in cells:
        m, checkpoint = cell["memory"], cell["checkpoint"]
        if all(m[k] is None for k in ("weights", "draft", "kv_cache", "gpu_serving")):
            continue
        parts = [m["weights"], m["kv_cache"], *([m["draft"]] if checkpoint else [])]
        held = None if None in (m["gpu_serving"], m["gpu_before"]) else m["gpu_serving"] - m["gpu_before"]
        total = None if None in parts else sum(parts)
        found.setdefault(cell["workload"], []).append(ServerMemory(describe_decoding(cell), checkpoint, m, total, held))
    return found


def list_graded_points(lines: list[ServedTableLine]) -> list[GradedPoint]:
    """Return the graded points; speculative ones have the baseline's accuracy too."""
    return [
        GradedPoint(_name_point(line), line.point["quality"], line.row["baseline_accuracy"])
        for line in lines
        if line.point and line.point["quality"]
    ]


def list_engine_figures(lines: list[ServedTableLine]) -> list[EngineFigures]:
    """Return our counts and the server's own figures of each speculative point."""
    return [
        EngineFigures(_name_point(line), acceptance, _format_figures(acceptance["engine"]))
        for line in lines
        if line.point
        and (acceptance := line.point["acceptance"])
        and line.cell["engine"] != served_records.TORCH_ENGINE
    ]


def list_warnings(lines: list[ServedTableLine]) -> list[PointWarning]:
    """Return the cells' warnings, and how many requests have no answer, by reason."""
    found = []
    for line in lines:
        if not line.point:
            continue
        failed = sum((Counter(load["failed"]) for load in line.point["loads"]), Counter())
        lost = [f"{line.row['requests']} requests, of them failed: {', '.join(f'{k} {n}' for k, n in failed.items())}"]
        texts = [*line.point["warnings"], *(lost if failed else [])]
        found += [PointWarning(_name_point(line), text) for text in texts]
    return found


def list_server_commands(cells: list[Row]) -> list[ServerCommand]:
    """Return how each server was started."""
    return [
        ServerCommand(
            served_records.name_served_cell(cell["workload"], cell["checkpoint"], cell["tree"]),
            _format_command(cell["server"]["command"]),
        )
        for cell in cells
        if cell["status"] == served_records.RAN and cell["engine"] != served_records.TORCH_ENGINE
    ]


def _name_point(line: ServedTableLine) -> PointName:
    row = line.row
    return PointName(row["workload"], row["checkpoint"], row["decoding"], describe_decoding(row), format_load(row))


def _format_figures(figures: Row | None) -> str:
    """Return an engine's figures in one line, by its names."""
    found = (figures or {}).items()
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v if isinstance(v, str) else json.dumps(v)}"
        for k, v in found
    )


def _format_command(command: list[str] | str | None) -> str | None:
    return command if command is None or isinstance(command, str) else shlex.join(command)
