"""Predictions of time_cycles beside served cells that no grid was fitted to.

    python -m benchmarks.served_predictions [PROJECT] [--checkpoint e009]

PROJECT has run `benchmark_served` and `time_cycles` on the same workload and one machine, as `benchmarks/big_graph.py --costs`
does. For each served cell and concurrency: the speedup of decoding as measured, and as predicted from replay's tau and the
grid's costs. Then, for each load, whether the served tree that is predicted to be the fastest is the fastest, or within 3% of
it. Cells that can't be compared are left out and named, each with its reason: outside the grid, not replayed, of another machine.
Asked: predictions within 10%.
"""

import argparse
import math
import os
from collections import defaultdict

from stages.cells import prediction_check, table, timing_grid
from stages.cells.cell import Cell
from stages.cells.prediction_check import ComparedPrediction
from stages.cells.replay_records import ReplayedTree
from stages.cells.table import ResultRow
from stages.cells.timing_grid import TimingGrid
from stages.params import schema

CLOSE_ENOUGH = 1.03


def main(checkpoint: str | None = None) -> None:
    p = schema.load_params()
    checkpoint = checkpoint or p.benchmark_served.checkpoints[0]
    engine, served = p.benchmark_served.engines[0], p.benchmark_served
    timed = p.time_cycles.checkpoints
    grids = [grid for name in timed for grid in timing_grid.read_grids(engine, name, p.target.model)]
    replays = {checkpoint: ReplayedTree.read(checkpoint)}
    cells = [cell for name in served.workloads for cell in read_cells(engine, name, checkpoint, served.trees)]
    lines = table.join_lines(cells, replays, served.workloads)

    def find_cost(row: ResultRow) -> TimingGrid | None:
        of_load = [grid for grid in grids if (grid.workload, grid.max_new_tokens) == (row.workload, row.max_new_tokens)]
        shapes = p.find_first_of_shapes(str(row.checkpoint))
        return next((grid for grid in of_load if p.find_first_of_shapes(grid.checkpoint) == shapes), None)

    compared, left_out = prediction_check.compare_lines(lines, replays, find_cost)
    if not compared:
        raise ValueError("no served cell can be compared, expected some of the grids' loads; run: dvc repro")
    print_comparisons(compared)
    for why, members in left_out.items():
        for row in (line.row for line in members):
            print(f"left out: {row.tree}, {row.workload}, {row.concurrency} at once: {why}")
    errors = [abs(math.log(each.predicted.speedup / each.measured.speedup)) for each in compared]
    within = sum(error <= math.log(1.1) for error in errors)
    print(f"within 10%: {within} of {len(errors)}; at worst {math.expm1(max(errors)):.1%}")
    print_choices(compared)


def read_cells(engine: str, workload: str, checkpoint: str, trees: list[str]) -> list[Cell]:
    """Return the cells of a workload, the baseline first where one of them does not have its own."""
    cells = [Cell.read(engine, workload, checkpoint, tree) for tree in trees]
    return cells if all(cell.baseline_points for cell in cells) else [Cell.read(engine, workload), *cells]


def print_comparisons(compared: list[ComparedPrediction]) -> None:
    print(f"{'tree':10}{'at once':>8}{'C':>8}{'predicted':>11}{'speedup':>9}{'predicted':>11}{'95%':>14}{'off by':>9}")
    for each in compared:
        guess, measured = each.predicted, each.measured
        span = f"{guess.low:.2f}-{guess.high:.2f}" if guess.low and guess.high else "none"
        print(
            f"{each.row.tree:10}{each.row.concurrency:8}{measured.C:8.2f}{guess.C:11.2f}{measured.speedup:9.2f}{guess.speedup:11.2f}"
            f"{span:>14}{guess.speedup / measured.speedup - 1:9.1%}"
        )


def print_choices(compared: list[ComparedPrediction]) -> None:
    """Print, for each load, how the tree that is predicted to be the fastest compares with the fastest."""
    loads: dict[str, list[ComparedPrediction]] = defaultdict(list)
    for each in compared:
        loads[f"{each.row.workload}, {each.row.concurrency} at once"].append(each)
    for load, some in loads.items():
        best = max(some, key=lambda each: each.measured.speedup)
        chosen = max(some, key=lambda each: each.predicted.speedup)
        behind = best.measured.speedup / chosen.measured.speedup
        verdict = "the fastest" if best is chosen else f"{behind - 1:.1%} behind {best.row.tree}"
        print(f"{load}: chosen {chosen.row.tree}, {verdict}: {'right' if behind <= CLOSE_ENOUGH else 'wrong'}")


if __name__ == "__main__":
    takes = argparse.ArgumentParser()
    takes.add_argument("project", nargs="?", default=".")
    takes.add_argument("--checkpoint")
    o = takes.parse_args()
    os.chdir(o.project)
    main(o.checkpoint)
