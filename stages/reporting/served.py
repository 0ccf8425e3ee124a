"""The page's part on loads, of servers and the torch engine: tables, sweeps, memory, right answers, engines' own figures."""

import json
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Any

from stages.cells.cell import RAN, Cell
from stages.cells.table import TableLine
from stages.reporting.provenance import MachineGroup, group_machines
from stages.reporting.served_sweeps import LoadSweep, build_sweeps
from stages.reporting.tables import MAX_TABLE_LINES, ResultGroup, group_loads


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
