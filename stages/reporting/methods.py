"""What the report makes of the table of methods, and of what the engine gives beside what the method gives."""

import csv
from collections.abc import Iterable, Mapping
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


def build_method_rows(cells: list[Row], trained: Mapping[str, Row]) -> list[Row]:
    """Lines of the table, plain decoding's first; `cells` as in results/method_records.py, `trained` the reports of training."""
    return [_build_baseline_row(cells), *(_build_method_row(c, trained) for c in cells)] if cells else []


def _build_baseline_row(cells: list[Row]) -> Row:
    """The fastest plain decoding of all."""
    best = max(cells, key=lambda c: c["metrics"]["baseline_output_tok_s"])
    alone = {
        "row": BASELINE_ROW,
        "method": BASELINE_ROW,
        "workload": best["workload"],
        "engine": best["engine"],
        "tau": 1.0,
    }
    fastest = best["metrics"]["baseline_output_tok_s"]
    alone |= {"output_tok_s": fastest, "baseline_output_tok_s": fastest, "speedup": 1.0, "identical_share": 1.0}
    return dict.fromkeys(METHOD_TABLE_COLUMNS) | alone | {
        "weights_bytes": 0, "state_bytes": 0, "needs_training": "no", "parameters": 0, "moe": _describe_moe(best),
    }  # fmt: skip


def _build_method_row(c: Row, trained: Mapping[str, Row]) -> Row:
    metrics = c["metrics"]
    found = {k: c[k] for k in ("row", "method", "checkpoint", "workload", "parameters", "engine")}
    found |= {k: metrics[k] for k in (*METRIC_COLUMNS, "identical_share")}
    needs = c["parameters"] > 0
    return found | {
        "tree": describe_guesses(c["method"], c["settings"]),
        "weights_bytes": c["memory"]["weights"],
        "state_bytes": c["memory"]["state"],
        "needs_training": "yes" if needs else "no",
        "training_s": sum_training_seconds(c["checkpoint"], trained) if needs else 0.0,
        "moe": _describe_moe(c),
    }


def _describe_moe(c: Row) -> str:
    """Whether it was seen to work on a target with experts: on this run's target, or not at all."""
    return "works" if c["mixture"] else NOT_RUN


def sum_training_seconds(checkpoint: str, trained: Mapping[str, Row]) -> float | None:
    """Of all segments that lead to it; None for a draft that others trained."""
    seconds, name = None, checkpoint
    while name in trained:
        seconds, name = (seconds or 0.0) + trained[name]["seconds"], trained[name]["from"]
    return seconds


def describe_guesses(method: str, settings: Row) -> str:
    """What is guessed, in a word."""
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
    """results/methods.csv as numbers; [] where there is none."""
    if not METHOD_TABLE.exists():
        return []
    with METHOD_TABLE.open(newline="", encoding="utf-8") as lines:
        return [{k: _parse_value(k, text) for k, text in line.items()} for line in csv.DictReader(lines)]


TEXT_COLUMNS = {"row", "method", "checkpoint", "tree", "workload", "needs_training", "moe", "engine"}


def _parse_value(column: str, text: str) -> Any:
    return (text or None) if column in TEXT_COLUMNS else float(text) if text else None


# The terminal

METHOD_HEADINGS = (
    ("method", ""), ("tree", ""), ("tau", ""), ("accept_rate", "(%)"), ("speedup", ""), ("95%", "interval"), ("tokens/s", ""),
    ("plain", "tokens/s"), ("identical", "(%)"), ("memory", "weights"), ("memory", "state"), ("needs", "training"),
    ("trained", "parameters"), ("training", "(s)"), ("MoE", ""),
)  # fmt: skip


def format_method_table(found: list[Row]) -> list[str]:
    if not found:
        return []
    return [
        f"Methods on one verifier, {found[0]['workload']}",
        *align_columns([*zip(*METHOD_HEADINGS, strict=True), *map(format_method_row, found)]),
        "",
    ]


def format_method_row(row: Row) -> tuple[str, ...]:
    """A line of the table, under HEAD."""
    name = row["row"] if row["row"] == row["method"] else f"{row['row']} ({row['method']})"
    shape = row["tree"] or "–"
    interval = format_interval(
        row["speedup_low"], row["speedup_high"], "–" if row["row"] == BASELINE_ROW else ONE_PROMPT
    )
    return (
        name,
        format_tree(shape) if shape[0] == "t" else shape,
        format_number(row["tau"]),
        format_number(row["accept_rate"], 1, 100),
        f"{row['speedup']:.2f}x",
        interval,
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
    """Bytes, in the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


# What the engine gives, and what the method gives


def compare_engines(found: list[Row], cells: Iterable[Row], lines: Iterable[ServedTableLine]) -> list[Row]:
    """Tokens a second of a single request: a line for each way to decode, {engine: tokens/s or None}.

    The torch engine's are its fastest plain decoding, and that times the best speedup of the table and of benchmark's cells: a
    speedup is over plain decoding in turns, while a machine may be slower for one row than for another. A server's are of
    served cells of that workload at concurrency 1, of several trees the fastest. No server here speaks Medusa.
    """
    if not found:
        return []
    workload = found[0]["workload"]
    mine = [c["metrics"] for c in cells if c["workload"] == workload]
    speedups = {way: [row["speedup"] for row in found if row["method"] == way] for way in COMPARED_WAYS}
    speedups["eagle3"] += [metrics["speedup"] for metrics in mine]
    plain = max(row["baseline_output_tok_s"] for row in [*found, *mine])
    torch = {"autoregressive": plain} | {way: plain * max(some) for way, some in speedups.items() if some}
    ways = {PLAIN: "autoregressive", SPECULATIVE: "eagle3"}
    served: dict[tuple[str, str], float] = {}
    for row in (line.row for line in lines):
        if row["workload"] == workload and row["concurrency"] == 1 and row["output_throughput"] is not None:
            key = ways[row["decoding"]], row["engine"]
            served[key] = max(served.get(key, 0.0), row["output_throughput"])
    return [{"way": way, "torch": torch.get(way), "sglang": served.get((way, "sglang"))} for way in COMPARED_WAYS]


def format_speed(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


def build_methods_page(found: list[Row], engines: list[Row]) -> Row | None:
    """What report.methods.html.j2 shows; None where there are no rows."""
    if not found:
        return None
    head = [" ".join(filter(None, parts)) for parts in METHOD_HEADINGS]
    lines = [(format_method_row(row), row["speedup"] == max(r["speedup"] for r in found)) for row in found]
    return {
        "workload": found[0]["workload"],
        "head": head,
        "lines": lines,
        "engines": engines,
        "names": COMPARED_ENGINES,
        "speed": format_speed,
    }
