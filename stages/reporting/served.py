"""The page's part on loads, of servers and the torch engine: tables, sweeps, memory, right answers, engines' own figures."""

import json
import math
import shlex
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stages.cells.cell import RAN, Cell
from stages.cells.table import ResultRow, TableLine
from stages.params.tree_shape import Load
from stages.reporting.provenance import MachineGroup, group_machines
from stages.reporting.tables import MAX_TABLE_LINES, ResultGroup, group_loads
from stages.reporting.text import format_tree


@dataclass(frozen=True)
class LoadSweep:
    """Speedups of one tree, or of the best tree at each load, at several loads."""

    name: str
    workload: str
    checkpoint: str | None
    engine: str
    by_load: dict[Load, ResultRow]
    of_trees: bool = False  # the best tree at each load

    @cached_property
    def speedups(self) -> dict[Load, float]:
        return {load: row.speedup for load, row in self.by_load.items() if row.speedup is not None}

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({load.max_new_tokens for load in self.by_load})

    @cached_property
    def caps(self) -> list[int | None]:
        """Return the concurrencies; None is no limit."""
        return sorted({load.concurrency for load in self.by_load}, key=lambda cap: (cap is None, cap))

    @property
    def slower(self) -> list[Load]:
        """Return the loads at which plain decoding is faster."""
        return sorted((load for load, speedup in self.speedups.items() if speedup < 1), key=lambda load: load.sort_key)

    def weigh(self, row: ResultRow) -> float:
        """Return the strength of a load's colour, in 0..1; none where the interval holds 1, or is not known."""
        if row.speedup_low is None or holds_one(row):
            return 0.0
        farthest = max(abs(math.log(speedup)) for speedup in self.speedups.values()) or 1.0
        return abs(math.log(self.speedups[row.load])) / farthest


def holds_one(row: ResultRow) -> bool:
    """Return whether the speedup's interval holds 1; False without one."""
    return row.speedup_low is not None and row.speedup_high is not None and row.speedup_low <= 1 <= row.speedup_high


def build_sweeps(rows: list[ResultRow]) -> list[LoadSweep]:
    """Return a sweep for each tree that was measured at several loads, and before them one of the best tree at each load.

    Loads with a request rate are left out: throughput follows the arrivals as long as the server keeps up, and nothing
    breaks even.
    """
    groups: dict[tuple[str, str | None, str], list[ResultRow]] = {}
    for row in rows:
        if row.speedup is not None and row.rate is None and not row.in_turns:
            groups.setdefault((row.workload, row.checkpoint, row.engine), []).append(row)
    found = []
    for names, group in groups.items():
        trees: dict[str, dict[Load, ResultRow]] = {}
        for row in group:
            trees.setdefault(str(row.tree), {})[row.load] = row
        if len(trees) > 1:
            fastest = {row.load: row for row in sorted(group, key=lambda row: row.speedup or 0.0)}
            found.append(LoadSweep("the best tree at each load", *names, fastest, of_trees=True))
        found += [LoadSweep(format_tree(tree), *names, by_load) for tree, by_load in trees.items()]
    return [sweep for sweep in found if len(sweep.by_load) > 1]


@dataclass(frozen=True)
class ServedPage:
    """The content of templates/served.html.j2."""

    groups: list[ResultGroup]
    sweeps: list[LoadSweep]
    memory: dict[str, list[Cell]]  # by workload, of which any is known
    graded: list[TableLine]
    counted: list[TableLine]
    warnings: list[tuple[TableLine, str]]
    servers: list[tuple[str, str | None]]  # cell and command line, None for one that was already running
    machines: list[MachineGroup]
    many: int = MAX_TABLE_LINES


def build_served_page(all_lines: list[TableLine]) -> ServedPage | None:
    """Return the page's part; None where nothing was measured in loads."""
    lines = [line for line in all_lines if not line.row.in_turns]
    if not lines:
        return None
    cells, rows = list({id(line.cell): line.cell for line in lines}.values()), [line.row for line in lines]
    served = [line for line in lines if line.cell.is_served]
    memory: dict[str, list[Cell]] = {}
    for cell in cells:
        if any(cell.memory[k] is not None for k in ("weights", "draft", "kv_cache", "gpu_serving")):
            memory.setdefault(f"{cell.workload}, {cell.engine}", []).append(cell)
    return ServedPage(
        groups=group_loads(rows),
        sweeps=build_sweeps(rows),
        memory=memory,
        graded=[line for line in lines if line.point and line.point.quality],
        counted=[line for line in served if line.point and line.point.acceptance],
        warnings=_list_warnings(lines),
        servers=[
            (cell.full_name, shlex.join(cell.server.command) or None)
            for cell in cells
            if cell.status == RAN and cell.is_served
        ],
        machines=group_machines(cells),
    )


def _list_warnings(lines: list[TableLine]) -> list[tuple[TableLine, str]]:
    """Return the cells' warnings, and how many requests have no answer, by reason."""
    found = []
    for line in lines:
        if not line.point:
            continue
        failed = sum((Counter(load.failed) for load in line.point.loads), Counter())
        lost = [f"{line.row.requests} requests, of them failed: {', '.join(f'{k} {n}' for k, n in failed.items())}"]
        found += [(line, text) for text in [*line.point.warnings, *(lost if failed else [])]]
    return found


def format_figures(figures: dict[str, Any]) -> str:
    """Return an engine's figures in one line, by its names."""
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v if isinstance(v, str) else json.dumps(v)}"
        for k, v in figures.items()
    )
