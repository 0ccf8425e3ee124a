"""Predictions of serving_costs beside served cells that no grid was fitted to.

    python -m benchmarks.serving_costs [PROJECT] [--checkpoint e009]

PROJECT has run `benchmark_served` and `serving_costs` on one machine, as plan dense-costs of benchmarks/gpu_graph.py does. For
each served cell and concurrency: the speedup of decoding as measured, and as predicted from replay's tau and the grid's costs.
Then, for each concurrency, whether the served tree that is predicted to be the fastest is the fastest, or within 3% of it.
Cells of trees outside the grid, or of another machine, are left out and named. Asked: predictions within 10%. With one checkpoint
there are as many choices of a tree as concurrencies: four of dense-costs, so "10 of 12" takes three checkpoints or workloads.
"""

import argparse
import math
import os
from collections import defaultdict

from stages.params import schema
from stages.results import cost_measured, prediction, replay_records, served_table, timing_grid

CLOSE_ENOUGH = 1.03


def main(checkpoint: str | None = None) -> None:
    p = schema.load_params()
    served = p.benchmark_served
    checkpoint = checkpoint or served.checkpoints[0]
    (grid,) = timing_grid.read_serving_costs(p.serving_costs.workloads[0], p.target.model)
    replays = {checkpoint: replay_records.read_replay(checkpoint)}
    taus = {
        tree.shape: tree
        for tree in replay_records.select_temperature(replays[checkpoint], grid.settings["temperature"])
    }
    cells = served_table.read_served_cells(served.workloads, [checkpoint], served.trees)
    within = prediction.get_grid_bounds(grid)
    left_out: list[str] = []
    found: dict[int, list[tuple[str, float, float]]] = defaultdict(list)
    print(f"{'tree':10}{'at once':>8}{'C':>8}{'predicted':>11}{'speedup':>9}{'predicted':>11}{'95%':>14}{'off by':>9}")
    for line in served_table.join_lines(cells, replays, served.workloads):
        measured = cost_measured.measure_served_line(line)
        plain = next((step for step in grid.plain if step.batch == line.row.concurrency), None)
        if not measured or not plain:
            continue
        shape = line.cell.shape
        differs = timing_grid.list_hardware_differences(grid.hardware, line.cell.hardware)
        if differs or shape not in taus or not prediction.is_inside_grid(within, shape, plain.batch):
            reason = "; ".join(differs) or ("not replayed" if shape not in taus else "outside the grid")
            left_out.append(f"left out: {shape.name}, {plain.batch} at once: {reason}")
            continue
        cycle_s = grid.fit.predict_cycle_s(shape, plain.batch)
        guess = prediction.estimate_speedup(taus[shape], cycle_s, grid.fit, plain)
        span = f"{guess.low:.2f}-{guess.high:.2f}" if guess.low and guess.high else "none"
        found[plain.batch].append((shape.name, measured.speedup, guess.speedup))
        print(
            f"{shape.name:10}{plain.batch:8}{measured.C:8.2f}{guess.C:11.2f}{measured.speedup:9.2f}{guess.speedup:11.2f}"
            f"{span:>14}{guess.speedup / measured.speedup - 1:9.1%}"
        )
    print(*left_out, sep="\n", end="\n" if left_out else "")
    if not found:
        raise ValueError("no served cell can be compared, expected some at the grid's concurrencies; run: dvc repro")
    errors = [abs(math.log(guess / measured)) for rows in found.values() for _, measured, guess in rows]
    within = sum(error <= math.log(1.1) for error in errors)
    print(f"within 10%: {within} of {len(errors)}; at worst {math.expm1(max(errors)):.1%}")
    for batch, rows in found.items():
        best, chosen = max(rows, key=lambda row: row[1]), max(rows, key=lambda row: row[2])
        verdict = "the fastest" if best == chosen else f"{best[1] / chosen[1] - 1:.1%} behind {best[0]}"
        right = "right" if best[1] <= CLOSE_ENOUGH * chosen[1] else "wrong"
        print(f"{batch} at once: chosen {chosen[0]}, {verdict}: {right}")


if __name__ == "__main__":
    takes = argparse.ArgumentParser()
    takes.add_argument("project", nargs="?", default=".")
    takes.add_argument("--checkpoint")
    o = takes.parse_args()
    os.chdir(o.project)
    main(o.checkpoint)
