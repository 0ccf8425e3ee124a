"""The table of decoding methods on one verifier (results/methods.csv), and their tokens per second in each engine.

docs/methods.md defines the columns.
"""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.reporting.text import ONE_PROMPT, align_columns, format_interval, format_number, format_tree
from stages.results.served_table import PLAIN, SPECULATIVE, ServedTableLine
from stages.runtime import atomic

Row = dict[str, Any]

METHOD_TABLE = Path("results/methods.csv")
BASELINE_ROW = "baseline"  # the row of plain decoding
METRIC_COLUMNS = (
    "tau", "tau_low", "tau_high", "accept_rate", "output_tok_s", "baseline_output_tok_s", "speedup", "speedup_low",
    "speedup_high",
)  # fmt: skip
METHOD_TABLE_COLUMNS = (
    "row", "method", "checkpoint", "tree", "workload", *METRIC_COLUMNS, "identical_share", "weights_bytes", "state_bytes",
    "needs_training", "parameters", "training_s", "moe", "engine",
)  # fmt: skip
NOT_RUN, NOT_MEASURED = "not run", "not measured"
COMPARED_ENGINES = ("torch", "sglang")
COMPARED_WAYS = ("autoregressive", "medusa", "eagle3")
TEXT_COLUMNS = {"row", "method", "checkpoint", "tree", "workload", "needs_training", "moe", "engine"}
METHOD_HEADINGS = (
    ("method", ""), ("tree", ""), ("tau", ""), ("accept_rate", "(%)"), ("speedup", ""), ("95%", "interval"), ("tokens/s", ""),
    ("plain", "tokens/s"), ("identical", "(%)"), ("memory", "weights"), ("memory", "state"), ("needs", "training"),
    ("trained", "parameters"), ("training", "(s)"), ("MoE", ""),
)  # fmt: skip


def build_method_rows(cells: list[Row], trained: Mapping[str, Row]) -> list[Row]:
    """Return the lines of methods.csv, plain decoding's first.

    `cells` as in results/method_records.py; `trained` has each checkpoint's training report.
    """
    return [_build_baseline_row(cells), *(_build_method_row(cell, trained) for cell in cells)] if cells else []


def _build_baseline_row(cells: list[Row]) -> Row:
    """Return the line of plain decoding, the fastest of all cells."""
    fastest = max(cells, key=lambda cell: cell["metrics"]["baseline_output_tok_s"])
    tok_s = fastest["metrics"]["baseline_output_tok_s"]
    return dict.fromkeys(METHOD_TABLE_COLUMNS) | {
        "row": BASELINE_ROW, "method": BASELINE_ROW, "workload": fastest["workload"], "engine": fastest["engine"], "tau": 1.0,
        "output_tok_s": tok_s, "baseline_output_tok_s": tok_s, "speedup": 1.0, "identical_share": 1.0, "weights_bytes": 0,
        "state_bytes": 0, "needs_training": "no", "parameters": 0, "moe": _describe_moe(fastest),
    }  # fmt: skip


def _build_method_row(cell: Row, trained: Mapping[str, Row]) -> Row:
    needs_training = cell["parameters"] > 0
    return {
        **{k: cell[k] for k in ("row", "method", "checkpoint", "workload", "parameters", "engine")},
        **{k: cell["metrics"][k] for k in (*METRIC_COLUMNS, "identical_share")},
        "tree": describe_guesses(cell["method"], cell["settings"]),
        "weights_bytes": cell["memory"]["weights"],
        "state_bytes": cell["memory"]["state"],
        "needs_training": "yes" if needs_training else "no",
        "training_s": sum_training_seconds(cell["checkpoint"], trained) if needs_training else 0.0,
        "moe": _describe_moe(cell),
    }


def _describe_moe(cell: Row) -> str:
    """Return whether the method ran on a target with experts: this run's target has them, or it was not tried."""
    return "works" if cell["mixture"] else NOT_RUN


def sum_training_seconds(checkpoint: str, trained: Mapping[str, Row]) -> float | None:
    """Return the seconds of all segments that lead to the checkpoint; None for a draft that was not trained here."""
    seconds, name = None, checkpoint
    while name in trained:
        seconds, name = (seconds or 0.0) + trained[name]["seconds"], trained[name]["from"]
    return seconds


def describe_guesses(method: str, settings: Row) -> str:
    """Return what a method proposes in a cycle, in a few words."""
    if "tree" in settings:
        return settings["tree"]
    if method == "ngram":
        return f"{settings['longest']}- to {settings['shortest']}-grams, {settings['length']} tokens"
    if method == "lookahead":
        return f"W {settings['window']}, N {settings['level']}, G {settings['guesses']}"
    return f"static, {settings['nodes']} nodes, {settings['steps']} deep"


def write_method_table(found: list[Row]) -> None:
    atomic.write_csv(METHOD_TABLE, METHOD_TABLE_COLUMNS, found)


def read_method_table() -> list[Row]:
    """Return the lines of results/methods.csv with their numbers; [] where the file does not exist."""
    if not METHOD_TABLE.exists():
        return []
    with METHOD_TABLE.open(newline="", encoding="utf-8") as lines:
        return [{k: _parse_value(k, text) for k, text in line.items()} for line in csv.DictReader(lines)]


def _parse_value(column: str, text: str) -> Any:
    return (text or None) if column in TEXT_COLUMNS else float(text) if text else None


# The terminal


def format_method_table(found: list[Row]) -> list[str]:
    if not found:
        return []
    return [
        f"Methods on one verifier, {found[0]['workload']}",
        *align_columns([*zip(*METHOD_HEADINGS, strict=True), *map(format_method_row, found)]),
        "",
    ]


def format_method_row(row: Row) -> tuple[str, ...]:
    """Return a line of the table, as METHOD_HEADINGS."""
    name = row["row"] if row["row"] == row["method"] else f"{row['row']} ({row['method']})"
    shape = row["tree"] or "–"
    no_interval = "–" if row["row"] == BASELINE_ROW else ONE_PROMPT
    return (
        name,
        format_tree(shape) if shape[0] == "t" else shape,
        format_number(row["tau"]),
        format_number(row["accept_rate"], 1, 100),
        f"{row['speedup']:.2f}x",
        format_interval(row["speedup_low"], row["speedup_high"], no_interval),
        f"{row['output_tok_s']:.1f}",
        format_number(row["baseline_output_tok_s"], 1),
        format_number(row["identical_share"], 0, 100),
        format_bytes(row["weights_bytes"]),
        format_bytes(row["state_bytes"]),
        row["needs_training"],
        f"{row['parameters']:,.0f}",
        format_number(row["training_s"], 0),
        row["moe"],
    )


def format_bytes(count: float) -> str:
    """Return bytes in the largest unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


# Engines


def compare_engines(found: list[Row], cells: Iterable[Row], lines: Iterable[ServedTableLine]) -> list[Row]:
    """Return a line for each way to decode: `way`, and tokens/s of a single request by engine, None where not measured.

    The torch engine's tokens/s are its fastest plain decoding, times the best speedup of the table and of benchmark's
    cells: a speedup is over plain decoding in turns, while the machine may be slower for one row than for another. A
    server's are the fastest tree of the served cells of that workload at concurrency 1. No engine here serves Medusa.
    """
    if not found:
        return []
    workload = found[0]["workload"]
    measured = [cell["metrics"] for cell in cells if cell["workload"] == workload]
    speedups = {way: [row["speedup"] for row in found if row["method"] == way] for way in COMPARED_WAYS}
    speedups["eagle3"] += [metrics["speedup"] for metrics in measured]
    plain_tok_s = max(row["baseline_output_tok_s"] for row in [*found, *measured])
    torch = {"autoregressive": plain_tok_s} | {way: plain_tok_s * max(some) for way, some in speedups.items() if some}
    ways = {PLAIN: "autoregressive", SPECULATIVE: "eagle3"}
    served: dict[tuple[str, str], float] = {}
    for row in (line.row for line in lines):
        if row["workload"] == workload and row["concurrency"] == 1 and row["output_throughput"] is not None:
            key = ways[row["decoding"]], row["engine"]
            served[key] = max(served.get(key, 0.0), row["output_throughput"])
    return [{"way": way, "torch": torch.get(way), "sglang": served.get((way, "sglang"))} for way in COMPARED_WAYS]


def format_speed(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


@dataclass(frozen=True)
class MethodsPage:
    """The content of templates/methods.html.j2, with the function called there."""

    workload: str
    headings: list[str]
    lines: list[tuple[tuple[str, ...], bool]]  # (texts, whether its speedup is the highest)
    engines: list[Row]
    engine_names: tuple[str, ...] = COMPARED_ENGINES
    format_speed: Callable[[float | None], str] = format_speed


def build_methods_page(found: list[Row], engines: list[Row]) -> MethodsPage | None:
    """Return the page's part; None where no method was measured."""
    if not found:
        return None
    headings = [" ".join(filter(None, parts)) for parts in METHOD_HEADINGS]
    top_speedup = max(row["speedup"] for row in found)
    lines = [(format_method_row(row), row["speedup"] == top_speedup) for row in found]
    return MethodsPage(found[0]["workload"], headings, lines, engines)
