"""The cost of a serving engine's cycles, derived from served cells.

A request decodes from its first token to its last, so at one concurrency

    cycle = sum of (e2e - ttft) over requests / sum of their cycles        of a cell with a draft
    step  = sum of (e2e - ttft) over requests / sum of (tokens - 1)        of the same server without one

Both include what the load adds: waiting for other prefills, and for the batch. So a cost belongs to one workload and answer
length, and its batch is the load's concurrency. Loads at a request rate are skipped, since their batch follows the arrivals.
"""

import json
import math
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from stages.results import interval, timing_grid
from stages.results.served_table import SPECULATIVE, ServedTableLine

Row = dict[str, Any]


def derive_costs(lines: Iterable[ServedTableLine]) -> tuple[list[Row], list[str]]:
    """Return a timing grid of each workload, answer length, checkpoint and server, and why others have none.

    Only lines that were compared with a baseline are used: they share engine, machine and prompts.
    """
    made, why = [], []
    for name, some in _group_lines(list(lines)).items():
        grid = list(_build_grid(some))
        try:
            made.append(_build_cost(some, grid, list(_build_plain_steps(some))))
        except ValueError as error:
            why.append(f"{name}: {error}")
    return made, why


def _group_lines(lines: list[ServedTableLine]) -> dict[str, list[ServedTableLine]]:
    """Group speculative lines of closed loops by name and server configuration."""
    found: dict[tuple[str, str], list[ServedTableLine]] = {}
    for line in lines:
        row = line.row
        if row["decoding"] != SPECULATIVE or row["speedup"] is None or row["concurrency"] is None:
            continue
        if math.isinf(float(row["request_rate"] or "inf")):
            name = f"{row['workload']}, {row['checkpoint']}, {row['max_new_tokens']} tokens"
            found.setdefault((name, json.dumps(line.cell["fingerprint"], sort_keys=True)), []).append(line)
    names = [name for name, _ in found]
    return {
        name if names.count(name) == 1 else f"{name}, servers {number}": some
        for number, ((name, _), some) in enumerate(found.items(), 1)
    }


def _build_cost(lines: list[ServedTableLine], grid: list[Row], plain: list[Row]) -> Row:
    from stages.results import cost_fit  # imports numpy, which the table in the terminal does without

    first = lines[0]
    served = first.cell
    requests = [r for line in lines for r in _list_answered_requests(line.point)]
    settings = {
        "temperature": served["temperature"],
        "context": round(fmean(r["prompt_tokens"] + r["output_tokens"] / 2 for r in requests)),
        "repeats": first.row["repeats"],
    }
    return timing_grid.check_timing_grid(
        {
            "definitions": timing_grid.COST_DEFINITIONS,
            "engine": served["engine"],
            "workload": served["workload"],
            "max_new_tokens": first.row["max_new_tokens"],
            "checkpoint": served["checkpoint"],
            "draft": None,
            "target": served["fingerprint"].get("target"),
            "settings": settings,
            "plain": plain,
            "grid": grid,
            "fit": cost_fit.fit_cost_model(grid).to_json(),
            "hardware": served["hardware"],
            "versions": served["versions"],
            "seconds": sum(c["seconds"] for c in {id(line.cell): line.cell for line in lines}.values()),
        }
    )


def _build_grid(lines: list[ServedTableLine]) -> Iterator[Row]:
    for line in lines:
        if line.point and (cycles := compute_cycle_seconds(line.point)):
            row = line.row
            yield {
                "steps": row["num_steps"], "topk": row["topk"], "tokens": row["num_draft_tokens"],
                "batch": row["concurrency"], **_summarise_times("cycle_s", cycles),
            }  # fmt: skip


def _build_plain_steps(lines: list[ServedTableLine]) -> Iterator[Row]:
    """Yield the plain step of each concurrency, over all baselines that the group was compared with."""
    steps: dict[int, list[float]] = {}
    seen: set[int] = set()
    for line in lines:
        assert line.baseline_point is not None, "a line with a speedup has a baseline point"
        if id(line.baseline_point) not in seen:  # cells share a baseline
            seen.add(id(line.baseline_point))
            steps.setdefault(line.row["concurrency"], []).extend(compute_step_seconds(line.baseline_point))
    for batch in sorted(steps):
        yield {"batch": batch, **_summarise_times("step_s", steps[batch])}


def _summarise_times(name: str, values: list[float]) -> Row:
    """Return the columns `name`, error and samples of a CycleTime or PlainStepTime, from the values of each repeat."""
    found = interval.estimate_mean(values)
    return {name: found.value, "error": found.error, "samples": len(values)}


def compute_cycle_seconds(point: Row) -> list[float]:
    """Return the seconds of a cycle in each repeat; one value for all repeats if the engine counts over all requests."""
    each = _time_by_repeat(point, lambda r: r["cycles"])
    if each or not point["acceptance"] or any(r["failed"] for r in point["requests"]):
        return each
    decoding = sum(_sum_decoding_seconds(r) for r in point["requests"])
    return [decoding / cycles] if (cycles := point["acceptance"]["cycles"]) else []


def compute_step_seconds(point: Row) -> list[float]:
    """Return the seconds of a plain step in each repeat."""
    return _time_by_repeat(point, lambda r: r["output_tokens"] - 1)


def _time_by_repeat(point: Row, count: Any) -> list[float]:
    """Return, for each repeat, seconds of decoding divided by the count, over requests with a count above 0."""
    rows = [(r["repeat"], _sum_decoding_seconds(r), count(r)) for r in _list_answered_requests(point)]
    repeats = sorted({repeat for repeat, _, n in rows if n})
    sums = [[(s, n) for at, s, n in rows if at == repeat and n] for repeat in repeats]
    return [sum(s for s, _ in some) / sum(n for _, n in some) for some in sums]


def _list_answered_requests(point: Row | None) -> list[Row]:
    return [r for r in (point or {"requests": []})["requests"] if not r["failed"]]


def _sum_decoding_seconds(r: Row) -> float:
    return r["e2e_s"] - r["ttft_s"]
