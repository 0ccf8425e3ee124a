"""Predictions compared with cells: predicted and measured tau, C and speedup. docs/cost.md, version 6.

tau / C is of decoding alone, so the measured speedup here is too: prefill, which both sides pay, is left out of the times. A
cell's interval, which is of whole answers, is applied as a share; without one (one prompt, one repeat) agreement is unknown.
No cell is fitted: a grid is timed by itself.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stages.cells import cycle_times, prediction, timing_grid
from stages.cells.interval import estimate_repeats
from stages.cells.prediction import SpeedupEstimate
from stages.cells.replay_records import ReplayedTree, select_temperature
from stages.cells.table import ResultRow, TableLine
from stages.cells.timing_grid import TimingGrid

OTHER_MACHINE = "measured on another machine than the timing grid"
FindCost = Callable[[ResultRow], TimingGrid | None]  # the grid by which a line is predicted


@dataclass(frozen=True)
class ComparedPrediction:
    """The prediction for a line of the table beside its measurement."""

    row: ResultRow
    predicted: SpeedupEstimate
    measured: SpeedupEstimate  # of decoding

    @property
    def group(self) -> tuple[object, ...]:
        """Return what the lines of one load have in common."""
        return *self.row.conditions, self.row.checkpoint

    @property
    def agrees(self) -> bool | None:
        """Return whether the intervals overlap; None without both."""
        (low, high), (other_low, other_high) = ((side.low, side.high) for side in (self.predicted, self.measured))
        if low is None or high is None or other_low is None or other_high is None:
            return None
        return low <= other_high and other_low <= high

    @property
    def farther_factor(self) -> str:
        """Return which of tau and C is further from its prediction."""
        guess, found = self.predicted, self.measured
        return "tau" if abs(math.log(found.tau / guess.tau)) > abs(math.log(found.C / guess.C)) else "C"


def measure_line(line: TableLine) -> SpeedupEstimate | None:
    """Return tau, C and the speedup of decoding, with its interval; None if the line was not compared with a baseline."""
    row, point, plain = line.row, line.point, line.baseline_point
    if not point or not plain or row.speedup is None or row.tau is None:
        return None
    cycles = cycle_times.compute_cycle_seconds(point)
    steps, token_times = (cycle_times.compute_step_seconds(each) for each in (plain, point))
    if not (cycles and steps and token_times):
        return None
    cycle, step, token = (estimate_repeats(seconds).value for seconds in (cycles, steps, token_times))
    decoding = step / token
    low, high = (None if end is None else decoding * end / row.speedup for end in (row.speedup_low, row.speedup_high))
    return SpeedupEstimate(row.tau, cycle / step, decoding, low, high)


def compare_lines(
    lines: Iterable[TableLine], replays: Mapping[str, list[ReplayedTree]], find_cost: FindCost
) -> tuple[list[ComparedPrediction], dict[str, list[TableLine]]]:
    """Return lines compared with what their grids predict, and the lines of which none is, by the reason."""
    made: list[ComparedPrediction] = []
    left_out: dict[str, list[TableLine]] = {}
    for line in lines:
        if line.point is None or line.row.is_plain:
            continue
        found = _compare_line(line, replays, find_cost(line.row))
        if isinstance(found, str):
            left_out.setdefault(found, []).append(line)
        else:
            made.append(found)
    return made, left_out


def _compare_line(
    line: TableLine, replays: Mapping[str, list[ReplayedTree]], timed: TimingGrid | None
) -> ComparedPrediction | str:
    """Return the comparison, or why there is none."""
    row, shape = line.row, line.cell.shape
    if timed is None:
        return "no grid of its load"
    if differs := timing_grid.list_hardware_differences(timed.hardware, line.cell.hardware):
        return f"{OTHER_MACHINE}, {', '.join(differs)}"
    plain = next((step for step in timed.plain if step.batch == row.concurrency), None)
    if plain is None or not timed.covers(shape, plain.batch):
        return "outside the grid"
    trees = select_temperature(replays.get(str(row.checkpoint), []), row.temperature, line.cell.draft_sampling)
    tree = next((tree for tree in trees if tree.shape == shape), None)
    if tree is None:
        return "not replayed"
    if (found := measure_line(line)) is None:
        return "no speedup was measured"
    return ComparedPrediction(row, prediction.predict_speedup(tree, timed.fit, plain), found)
