"""The cost of a serving engine's cycles, from served cells: what was measured on the engine is what it costs.

A request decodes from its first token to its last, so at one concurrency

    cycle = sum of (e2e - ttft) over requests / sum of their cycles        of a cell with a draft
    step  = sum of (e2e - ttft) over requests / sum of (tokens - 1)        of the same server without one

Both hold what the load adds: waiting for others' prefills, for the batch. So a cost is of one workload and answer length,
and its batch is the load's concurrency. At a request rate the batch follows the arrivals, and nothing is taken.
"""

import json
import math
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from stages.results import interval, timing_grid
from stages.results.served_table import SPECULATIVE, Line

Row = dict[str, Any]


def costs(lines: Iterable[Line]) -> tuple[list[Row], list[str]]:
    """A cost (as cost.KEYS) of each workload, answer length, checkpoint and server, and why there is none of others.

    Only lines that were compared with a baseline count: those are of one engine, machine and prompts.
    """
    made, why = [], []
    for name, some in _groups(list(lines)).items():
        grid = list(_grid(some))
        try:
            made.append(_cost(some, grid, list(_plain(some))))
        except ValueError as error:
            why.append(f"{name}: {error}")
    return made, why


def _groups(lines: list[Line]) -> dict[str, list[Line]]:
    """Speculative lines whose loads are closed loops, each group on servers that agree; by its name."""
    found: dict[tuple[str, str], list[Line]] = {}
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


def _cost(lines: list[Line], grid: list[Row], plain: list[Row]) -> Row:
    from stages.results import cost_fit  # with numpy, which the terminal's table can do without

    first = lines[0]
    served = first.cell
    requests = [r for line in lines for r in _answered(line.point)]
    settings = {
        "temperature": served["temperature"],
        "context": round(fmean(r["prompt_tokens"] + r["output_tokens"] / 2 for r in requests)),
        "repeats": first.row["repeats"],
    }
    return timing_grid.check(
        {
            "definitions": timing_grid.DEFINITIONS,
            "engine": served["engine"],
            "workload": served["workload"],
            "max_new_tokens": first.row["max_new_tokens"],
            "checkpoint": served["checkpoint"],
            "draft": None,
            "target": served["fingerprint"].get("target"),
            "settings": settings,
            "plain": plain,
            "grid": grid,
            "fit": cost_fit.fit(grid).to_json(),
            "hardware": served["hardware"],
            "versions": served["versions"],
            "seconds": sum(c["seconds"] for c in {id(line.cell): line.cell for line in lines}.values()),
        }
    )


def _grid(lines: list[Line]) -> Iterator[Row]:
    for line in lines:
        if line.point and (cycles := cycle_s(line.point)):
            row = line.row
            yield {
                "steps": row["num_steps"], "topk": row["topk"], "tokens": row["num_draft_tokens"],
                "batch": row["concurrency"], **_timed("cycle_s", cycles),
            }  # fmt: skip


def _plain(lines: list[Line]) -> Iterator[Row]:
    """Of each concurrency, all plain decoding that the group was compared with."""
    steps: dict[int, list[float]] = {}
    seen: set[int] = set()
    for line in lines:
        assert line.plain is not None, "a line with a speedup was compared with a point"
        if id(line.plain) not in seen:  # one baseline serves many cells
            seen.add(id(line.plain))
            steps.setdefault(line.row["concurrency"], []).extend(step_s(line.plain))
    for batch in sorted(steps):
        yield {"batch": batch, **_timed("step_s", steps[batch])}


def _timed(name: str, values: list[float]) -> Row:
    """Return the columns `name`, error and samples of cost.GRID or cost.PLAIN, from the values of each repeat."""
    found = interval.mean_time(values)
    return {name: found.value, "error": found.error, "samples": len(values)}


def cycle_s(point: Row) -> list[float]:
    """Of each repeat, the seconds of a cycle; a server that counts over all requests gives one of all repeats."""
    each = _by_repeat(point, lambda r: r["cycles"])
    if each or not point["acceptance"] or any(r["failed"] for r in point["requests"]):
        return each
    decoding = sum(_decoding(r) for r in point["requests"])
    return [decoding / cycles] if (cycles := point["acceptance"]["cycles"]) else []


def step_s(point: Row) -> list[float]:
    """Of each repeat, the seconds of a step of plain decoding."""
    return _by_repeat(point, lambda r: r["output_tokens"] - 1)


def _by_repeat(point: Row, count: Any) -> list[float]:
    """Seconds of decoding by what was counted, of requests that count something; none where nothing is."""
    rows = [(r["repeat"], _decoding(r), count(r)) for r in _answered(point)]
    repeats = sorted({repeat for repeat, _, n in rows if n})
    sums = [[(s, n) for at, s, n in rows if at == repeat and n] for repeat in repeats]
    return [sum(s for s, _ in some) / sum(n for _, n in some) for some in sums]


def _answered(point: Row | None) -> list[Row]:
    return [r for r in (point or {"requests": []})["requests"] if not r["failed"]]


def _decoding(r: Row) -> float:
    return r["e2e_s"] - r["ttft_s"]
