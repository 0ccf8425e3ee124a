"""What the report shows of served cells: tables by workload and checkpoint, when not to speculate, memory, the engine's words.

`Row` is a line of results/served.csv (results/served_table.py), as it was joined or as it was read back: the terminal's table
is made of nothing else. What the page shows besides comes from the cells.
"""

import json
import math
import shlex
from collections import Counter
from typing import Any

from stages.reporting.text import (
    ONE_PROMPT,
    ONE_REPEAT,
    UNCOUNTED,
    align_columns,
    format_interval,
    format_number,
    format_tree,
)
from stages.results import break_even, served_records
from stages.results.served_table import PLAIN, SPECULATIVE, ServedTableLine

Row = dict[str, Any]
LoadKey = tuple[float, float]  # (max_new_tokens, concurrency); infinite where it has no limit

MAX_TABLE_LINES = 40  # lines of a table; a sweep has more, which the page folds away and the terminal leaves to the CSV
SERVED_HEADINGS = (
    ("Tree_structure", ""), ("tokens", "x at once"), ("tau", ""), ("95%", "interval"), ("tau,", "replayed"),
    ("accept", "rate (%)"), ("TTFT mean", "(ms)"), ("p99", ""), ("TPOT mean", "(ms)"), ("p50", ""), ("p90", ""), ("p99", ""),
    ("ITL mean", "(ms)"), ("output", "tokens/s"), ("total", "tokens/s"), ("speedup", ""), ("95%", "interval"),
)  # fmt: skip


def get_load(row: Row) -> LoadKey:
    return row["max_new_tokens"], math.inf if row["concurrency"] is None else row["concurrency"]


def format_load(row: Row) -> str:
    tokens, cap = get_load(row)
    return f"{tokens:g} x {'no limit' if math.isinf(cap) else f'{cap:g}'}"


def describe_load(row: Row) -> str:
    tokens, cap = get_load(row)
    return f"{tokens:g} tokens, {'no limit of concurrency' if math.isinf(cap) else f'{cap:g} at once'}"


def _get_request_rate(row: Row) -> float | None:
    """Requests a second; None where all come at once, which JSON, without an infinity, says by null or a word."""
    rate = float(row["request_rate"] or "inf")
    return None if math.isinf(rate) else rate


def describe_decoding(row: Row) -> str:
    """The tree a server ran, or that it ran none."""
    plain = row["tree"] is None or row.get("decoding") == PLAIN
    return "plain decoding" if plain else format_tree(row["tree"])


# Tables


def group_tables(rows: list[Row]) -> list[Row]:
    """A table for each workload, engine and checkpoint: load by load its trees and the best plain decoding; last what can't
    run."""
    found = []
    for workload, engine in dict.fromkeys((row["workload"], row["engine"]) for row in rows):
        mine = [row for row in rows if (row["workload"], row["engine"]) == (workload, engine)]
        plain = select_best_plain(mine)
        drafted = [row for row in mine if row["decoding"] == SPECULATIVE]
        for checkpoint in dict.fromkeys(row["checkpoint"] for row in drafted) or [None]:
            trees = [row for row in drafted if row["checkpoint"] == checkpoint]
            can = [row for row in trees if row["status"] == served_records.RAN]
            loads = sorted({get_load(row) for row in can} | set(plain))
            lines = [
                row for at in loads for row in [*(r for r in can if get_load(r) == at), *filter(None, [plain.get(at)])]
            ]
            lines += [row for row in trees if row not in can]
            lines += [row for row in mine if row["decoding"] == PLAIN and row["status"] == served_records.UNSUPPORTED]
            shared = {k: lines[0][k] for k in ("workload", "engine", "temperature")}
            top = {k: max((row[k] for row in can if row[k] is not None), default=None) for k in ("tau", "speedup")}
            found.append(
                shared
                | {
                    "rate": _get_request_rate(lines[0]),
                    "checkpoint": checkpoint,
                    "rows": lines,
                    "loads": loads,
                    "top": top,
                }
            )
    return found


def select_best_plain(rows: list[Row]) -> dict[LoadKey, Row]:
    """Of each load, the fastest plain decoding that was measured, by the baseline or in turns with a cell."""
    best: dict[LoadKey, Row] = {}
    for row in rows:
        if row["decoding"] == PLAIN and row["status"] == served_records.RAN:
            best[get_load(row)] = max(best.get(get_load(row), row), row, key=lambda r: r["output_throughput"])
    return best


def format_served_table(rows: list[Row]) -> list[str]:
    """The terminal's lines."""
    lines: list[str] = []
    for group in group_tables(rows):
        by = "by the torch engine" if group["engine"] == served_records.TORCH_ENGINE else f"served by {group['engine']}"
        lines.append(f"{format_group_title(group)}, {by}")
        can = [row for row in group["rows"] if row["status"] == served_records.RAN]
        if 0 < len(can) <= MAX_TABLE_LINES:
            lines += align_columns([*zip(*SERVED_HEADINGS, strict=True), *map(_format_served_row, can)])
        elif can:
            lines.append(f"{len(can)} lines: results/served.csv")
        for sweep in build_sweeps(
            [r for r in rows if (r["workload"], r["engine"]) == (group["workload"], group["engine"])]
        ):
            if sweep["checkpoint"] == group["checkpoint"]:
                lines += [f"{sweep['name']}: {said}" for said in sweep["by_length"] or sweep["by_cap"]]
        lines += [
            f"! {describe_decoding(row)}, {format_load(row)}: {said}" for row in can for said in _list_remarks(row)
        ]
        lines += [f"! {describe_decoding(row)}: {describe_unsupported(row)}" for row in group["rows"] if row not in can]
        lines.append("")
    return lines


def format_group_title(group: Row) -> str:
    return f"{group['workload']}, checkpoint {group['checkpoint']}" if group["checkpoint"] else group["workload"]


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
    """Return tau's interval, or why there is none; nothing without a tau."""
    if row["tau"] is None:
        return ""
    return format_interval(row["tau_low"], row["tau_high"], UNCOUNTED if row["engine"] == "vllm" else ONE_PROMPT)


def speedup_span(row: Row) -> str:
    """Return the speedup's interval, or why there is none; nothing without a speedup."""
    return "" if row["speedup"] is None else format_interval(row["speedup_low"], row["speedup_high"], ONE_REPEAT)


def _list_remarks(row: Row) -> list[str]:
    failed = row["requests"] - row["completed"]
    lost = f"{failed:g} of {row['requests']:g} requests failed" if failed else ""
    return list(filter(None, [row["remark"], explain_tau_gap(row), lost]))


def describe_unsupported(row: Row) -> str:
    replayed = "" if row["replay_tau"] is None else f"; replayed, its tau is {row['replay_tau']:.2f}"
    return f"{row['remark']}{replayed}"


def explain_tau_gap(row: Row) -> str:
    """Why a served tau away from the replayed one matters; nothing where they agree or needn't."""
    if row["replay_agrees"] != "no":
        return ""
    few = row["tau_low"] is not None and row["tau_low"] <= row["replay_tau"] <= row["tau_high"]
    return (
        f"tau {row['tau']:.2f} is {row['replay_ratio']:.2f} of the replayed {row['replay_tau']:.2f}. A replay accepts exactly "
        "what this draft and tree accept on these prompts, so the engine drafts from something else than was trained: other "
        "weights or some it skipped, other feature layers, positions, a chat template or a map of the vocabulary. Until that "
        "is found, this line says nothing of the draft."
        + (" But its interval holds the replayed tau: so few prompts may explain it; ask more." if few else "")
    )


# When not to speculate


def build_sweeps(rows: list[Row]) -> list[Row]:
    """Of each tree that was measured at several loads, and of the best tree of each load: speedups and break-evens.

    At a request rate, throughput follows the arrivals as long as the server keeps up, and nothing breaks even: left out.
    """
    mine = [row for row in rows if row["speedup"] is not None and _get_request_rate(row) is None]
    found = []
    names = ("workload", "engine", "checkpoint")
    for group in dict.fromkeys(tuple(row[k] for k in names) for row in mine):
        cells = [row for row in mine if tuple(row[k] for k in names) == group]
        trees = list(dict.fromkeys(row["tree"] for row in cells))
        if len(trees) > 1:
            fastest = {get_load(row): row for row in sorted(cells, key=lambda row: row["speedup"])}
            found.append(_build_sweep("the best tree at each load", list(fastest.values())) | {"of_trees": True})
        found += [_build_sweep(format_tree(tree), [row for row in cells if row["tree"] == tree]) for tree in trees]
    return [sweep for sweep in found if sweep["loads"] > 1]


def _build_sweep(name: str, rows: list[Row]) -> Row:
    by_load = {get_load(row): row for row in rows}
    lengths, caps = sorted({tokens for tokens, _ in by_load}), sorted({cap for _, cap in by_load})
    farthest = max(abs(math.log(row["speedup"])) for row in rows) or 1.0
    heat = [
        {"tokens": tokens, "cells": [_build_heat_cell(by_load.get((tokens, cap)), farthest) for cap in caps]}
        for tokens in lengths
    ]
    slower = [row for _, row in sorted(by_load.items()) if row["speedup"] < 1]
    shared = {k: rows[0][k] for k in ("workload", "checkpoint", "engine")} | {
        "name": name,
        "loads": len(rows),
        "slower": slower,
    }
    by_length, by_cap = _describe_break_evens(by_load, lengths, caps)
    shared |= {"by_length": by_length, "by_cap": by_cap, "of_trees": False}
    return shared | {"caps": caps, "heat": heat, "plot": _build_speedup_plot(by_load, lengths, caps)}


def _build_heat_cell(row: Row | None, farthest: float) -> Row | None:
    """`weight` in 0..1 is its colour's strength; `clear` where the interval leaves no doubt to which side of 1 it lies."""
    if row is None:
        return None
    doubt = row["speedup_low"] is not None and row["speedup_low"] <= 1 <= row["speedup_high"]
    return row | {"weight": abs(math.log(row["speedup"])) / farthest, "clear": not doubt}


def _describe_break_evens(
    by_load: dict[LoadKey, Row], lengths: list[float], caps: list[float]
) -> tuple[list[str], list[str]]:
    """Break-evens in words: along the concurrency for each length of an answer, and along the length for each concurrency."""
    limits = [cap for cap in caps if not math.isinf(cap)]  # no limit has no place on the axis
    by_length, by_cap = [], []
    for tokens in lengths:
        points = [(cap, by_load[tokens, cap]["speedup"]) for cap in limits if (tokens, cap) in by_load]
        if len(points) > 1:
            by_length.append(f"answers of {tokens:g} tokens: {break_even.describe_crossings(points, 'concurrency')}")
    for cap in caps:
        points = [(tokens, by_load[tokens, cap]["speedup"]) for tokens in lengths if (tokens, cap) in by_load]
        if len(points) > 1:
            at = "without a limit of concurrency" if math.isinf(cap) else f"at concurrency {cap:g}"
            by_cap.append(f"{at}: {break_even.describe_crossings(points, 'answer length')}")
    return by_length, by_cap


def _build_speedup_plot(by_load: dict[LoadKey, Row], lengths: list[float], caps: list[float]) -> Row | None:
    """What plots.draw_speedups takes: a line per answer length over concurrency; over answer length where that is all."""
    limits = [cap for cap in caps if not math.isinf(cap)]
    if len(limits) > 1:
        axis, unit = "concurrency", "tokens"
        series = {tokens: [(cap, by_load.get((tokens, cap))) for cap in limits] for tokens in lengths}
    elif len(lengths) > 1:
        axis, unit = "answer length (tokens)", "at once"
        series = {cap: [(tokens, by_load.get((tokens, cap))) for tokens in lengths] for cap in caps}
    else:
        return None
    lines = [
        {
            "name": f"{name:g}",
            "points": [(x, *(r[k] for k in ("speedup", "speedup_low", "speedup_high"))) for x, r in points if r],
        }
        for name, points in series.items()
    ]
    return {"lines": [line for line in lines if line["points"]], "axis": axis, "unit": unit}


def summarise_served(rows: list[Row]) -> Row:
    """What results/metrics.json says of served cells."""
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


# What only the cells know


def tabulate_memory(cells: list[Row]) -> dict[str, list[Row]]:
    """Workload -> its servers' memory in GiB, where any of it is known; `sum` of what the engine says, as far as it says."""
    found: dict[str, list[Row]] = {}
    for cell in cells:
        m = cell["memory"]
        if all(m[k] is None for k in ("weights", "draft", "kv_cache", "gpu_serving")):
            continue
        parts = [m["weights"], m["kv_cache"], *([m["draft"]] if cell["checkpoint"] else [])]
        held = None if None in (m["gpu_serving"], m["gpu_before"]) else m["gpu_serving"] - m["gpu_before"]
        row = {
            "server": describe_decoding(cell),
            "checkpoint": cell["checkpoint"],
            "sum": None if None in parts else sum(parts),
            "held": held,
        }
        found.setdefault(cell["workload"], []).append(row | m)
    return found


def list_graded_points(lines: list[ServedTableLine]) -> list[Row]:
    """Graded points: of speculative ones with the baseline's accuracy beside."""
    return [_name_line(line) | line.point["quality"] for line in lines if line.point and line.point["quality"]]


def list_engine_figures(lines: list[ServedTableLine]) -> list[Row]:
    """Of each speculative point, our counts and the engine's own figures, by its names."""
    return [
        _name_line(line) | line.point["acceptance"] | {"said": _format_figures(line.point["acceptance"]["engine"])}
        for line in lines
        if line.point and line.point["acceptance"] and line.cell["engine"] != served_records.TORCH_ENGINE
    ]


def list_warnings(lines: list[ServedTableLine]) -> list[Row]:
    """What the cells warn of, and the requests that have no answer, by reason."""
    found = []
    for line in lines:
        if not line.point:
            continue
        failed = sum((Counter(load["failed"]) for load in line.point["loads"]), Counter())
        lost = [f"{line.row['requests']} requests, of them failed: {', '.join(f'{k} {n}' for k, n in failed.items())}"]
        said = [*line.point["warnings"], *(lost if failed else [])]
        found += [_name_line(line) | {"said": sentence} for sentence in said]
    return found


def list_server_commands(cells: list[Row]) -> list[Row]:
    """The command of each; None for a server that was already running."""
    return [
        {
            "name": served_records.name_served_cell(cell["workload"], cell["checkpoint"], cell["tree"]),
            "command": _format_command(cell["server"]["command"]),
        }
        for cell in cells
        if cell["status"] == served_records.RAN and cell["engine"] != served_records.TORCH_ENGINE
    ]


def _name_line(line: ServedTableLine) -> Row:
    names = ("workload", "checkpoint", "decoding", "accuracy", "baseline_accuracy")
    return {k: line.row[k] for k in names} | {"tree": describe_decoding(line.row), "load": format_load(line.row)}


def _format_figures(figures: Row | None) -> str:
    """Figures in a line, as an engine calls them."""
    found = (figures or {}).items()
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v if isinstance(v, str) else json.dumps(v)}"
        for k, v in found
    )


def _format_command(command: list[str] | str | None) -> str | None:
    return command if command is None or isinstance(command, str) else shlex.join(command)
