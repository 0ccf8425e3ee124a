"""Predictions of serving_costs beside served cells that no grid was fitted to.

    python -m benchmarks.serving_costs [PROJECT] [--checkpoint e009]

PROJECT has run `benchmark_served` and `serving_costs` on the same workloads and one machine, as
`benchmarks/big_graph.py --costs` does. For each served cell and concurrency: the speedup of decoding as
measured, and as predicted from replay's tau and the grid's costs. Then, for each load, whether the served tree that is
predicted to be the fastest is the fastest, or within 3% of it. Cells of trees outside the grid, or of another machine, are left
out and named. Asked: predictions within 10%.
"""

import argparse
import math
import os
from collections import defaultdict

from stages.params import schema
from stages.params.tree_shape import TreeShape
from stages.results import cost_measured, prediction, replay_records, served_table, timing_grid
from stages.results.replay_records import ReplayedTree
from stages.results.served_table import ServedTableLine
from stages.results.timing_grid import TimingGrid

CLOSE_ENOUGH = 1.03


def main(checkpoint: str | None = None) -> None:
    p = schema.load_params()
    checkpoint = checkpoint or p.benchmark_served.checkpoints[0]
    grids = [
        grid for name in p.serving_costs.workloads for grid in timing_grid.read_serving_costs(name, p.target.model)
    ]
    replays = {checkpoint: replay_records.read_replay(checkpoint)}
    temperature = grids[0].settings["temperature"]
    taus = {tree.shape: tree for tree in replay_records.select_temperature(replays[checkpoint], temperature)}
    served = p.benchmark_served
    cells = served_table.read_served_cells(served.workloads, [checkpoint], served.trees)
    found: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    left_out: list[str] = []
    print(f"{'tree':10}{'at once':>8}{'C':>8}{'predicted':>11}{'speedup':>9}{'predicted':>11}{'95%':>14}{'off by':>9}")
    for line in served_table.join_lines(cells, replays, served.workloads):
        grid = next((each for each in grids if is_of_load(each, line)), None)
        plain = grid and next((step for step in grid.plain if step.batch == line.row.concurrency), None)
        measured = cost_measured.measure_served_line(line)
        if not measured or not grid or not plain:
            continue
        shape, load = line.cell.shape, f"{line.row.workload}, {plain.batch} at once"
        if reason := explain_left_out(grid, line, taus):
            left_out.append(f"left out: {shape.name}, {load}: {reason}")
            continue
        guess = prediction.predict_speedup(taus[shape], grid.fit, plain)
        span = f"{guess.low:.2f}-{guess.high:.2f}" if guess.low and guess.high else "none"
        found[load].append((shape.name, measured.speedup, guess.speedup))
        print(
            f"{shape.name:10}{plain.batch:8}{measured.C:8.2f}{guess.C:11.2f}{measured.speedup:9.2f}{guess.speedup:11.2f}"
            f"{span:>14}{guess.speedup / measured.speedup - 1:9.1%}"
        )
    print(*left_out, sep="\n", end="\n" if left_out else "")
    if not found:
        raise ValueError("no served cell can be compared, expected some of the grids' loads; run: dvc repro")
    errors = [abs(math.log(guess / measured)) for rows in found.values() for _, measured, guess in rows]
    within = sum(error <= math.log(1.1) for error in errors)
    print(f"within 10%: {within} of {len(errors)}; at worst {math.expm1(max(errors)):.1%}")
    for load, rows in found.items():
        best, chosen = max(rows, key=lambda row: row[1]), max(rows, key=lambda row: row[2])
        verdict = "the fastest" if best == chosen else f"{best[1] / chosen[1] - 1:.1%} behind {best[0]}"
        right = "right" if best[1] <= CLOSE_ENOUGH * chosen[1] else "wrong"
        print(f"{load}: chosen {chosen[0]}, {verdict}: {right}")


def is_of_load(grid: TimingGrid, line: ServedTableLine) -> bool:
    row = line.row
    return (grid.engine, grid.workload, grid.max_new_tokens) == (row.engine, row.workload, row.max_new_tokens)


def explain_left_out(grid: TimingGrid, line: ServedTableLine, taus: dict[TreeShape, ReplayedTree]) -> str:
    """Return why the line can't be predicted; empty where it can."""
    shape, batch = line.cell.shape, line.row.concurrency or 0
    if differs := timing_grid.list_hardware_differences(grid.hardware, line.cell.hardware):
        return "; ".join(differs)
    if shape not in taus:
        return "not replayed"
    return "" if prediction.is_inside_grid(prediction.get_grid_bounds(grid), shape, batch) else "outside the grid"


if __name__ == "__main__":
    takes = argparse.ArgumentParser()
    takes.add_argument("project", nargs="?", default=".")
    takes.add_argument("--checkpoint")
    o = takes.parse_args()
    os.chdir(o.project)
    main(o.checkpoint)
