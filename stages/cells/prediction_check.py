"""Predictions compared with cells: predicted and measured tau, C and speedup. docs/cost.md, version 6.

tau / C is of decoding alone, so the measured speedup here is too: prefill, which both sides pay, is left out of the times. A
cell's interval, which is of whole answers, is applied as a share; without one (one prompt, one repeat) agreement is unknown.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stages.cells import cost_served, prediction, timing_grid
from stages.cells.interval import estimate_repeats
from stages.cells.prediction import PredictedSpeedup, SpeedupEstimate
from stages.cells.replay_records import ReplayedTree, select_temperature
from stages.cells.served_table import ServedTableLine
from stages.cells.timing_grid import CycleTime, TimingGrid
from stages.cells.torch_records import TorchCell
from stages.params.tree_shape import TreeShape, parse_shape


@dataclass(frozen=True)
class MeasuredSpeedup(SpeedupEstimate):
    """The speedup of decoding, that of whole answers, and the seconds of a step of plain decoding."""

    whole: float
    plain_step_s: float

    @property
    def whole_interval(self) -> tuple[float | None, float | None]:
        """Return the ends of the interval of `whole`."""
        low, high = (None if end is None else end * self.whole / self.speedup for end in (self.low, self.high))
        return low, high


@dataclass(frozen=True)
class ComparedPrediction:
    """The prediction for a cell beside its measurement."""

    workload: str
    checkpoint: str | None
    tree: str | None
    engine: str
    concurrency: int | None
    max_new_tokens: int | None
    predicted: SpeedupEstimate | PredictedSpeedup
    measured: MeasuredSpeedup

    @property
    def shape(self) -> TreeShape:
        assert self.tree, "plain decoding has no prediction"
        return parse_shape(self.tree)

    @property
    def agrees(self) -> bool | None:
        """Return whether the intervals overlap; None without both."""
        (low, high), (other_low, other_high) = ((side.low, side.high) for side in (self.predicted, self.measured))
        if low is None or high is None or other_low is None or other_high is None:
            return None
        return low <= other_high and other_low <= high

    @property
    def farther_factor(self) -> str | None:
        """Return which of tau and C is further from its prediction; None unless the intervals are apart."""
        guess, found = self.predicted, self.measured
        if self.agrees is not False:
            return None
        return "tau" if abs(math.log(found.tau / guess.tau)) > abs(math.log(found.C / guess.C)) else "C"


def measure_torch_cell(cell: TorchCell) -> MeasuredSpeedup | None:
    """Return tau, C and the speedup of decoding, with its interval; None if no answer has more than one token."""
    rows, metrics = cell.prompts, cell.metrics
    seconds = sum(r.e2e_latency_s - r.prefill_latency_s for r in rows)
    plain = sum(r.baseline_e2e_latency_s - r.baseline_prefill_latency_s for r in rows)
    tokens, plain_tokens = sum(r.output_tokens - 1 for r in rows), sum(r.baseline_output_tokens - 1 for r in rows)
    cycles = sum(r.cycles for r in rows)
    if min(cycles, tokens, plain_tokens) < 1:
        return None
    step, ends = plain / plain_tokens, (metrics.speedup_low, metrics.speedup_high)
    decoding = step * tokens / seconds
    return _build_measurement(metrics.tau, seconds / cycles / step, decoding, metrics.speedup, ends, step)


def measure_served_line(line: ServedTableLine) -> MeasuredSpeedup | None:
    """Return the same for a served line; None if it was not compared with a baseline."""
    row, point, plain = line.row, line.point, line.baseline_point
    if not point or not plain or row.speedup is None or row.tau is None:
        return None
    cycles = cost_served.compute_cycle_seconds(point)
    steps, token_times = (cost_served.compute_step_seconds(each) for each in (plain, point))
    if not (cycles and steps and token_times):
        return None
    ends = row.speedup_low, row.speedup_high
    cycle, step, token = (estimate_repeats(seconds).value for seconds in (cycles, steps, token_times))
    return _build_measurement(row.tau, cycle / step, step / token, row.speedup, ends, step)


def _build_measurement(
    tau: float, c: float, decoding: float, whole: float, ends: tuple[float | None, float | None], plain_step_s: float
) -> MeasuredSpeedup:
    """Return a measurement; `ends` are those of the interval of `whole`, the speedup of whole answers."""
    low, high = (None if end is None else decoding * end / whole for end in ends)
    return MeasuredSpeedup(tau, c, decoding, low, high, whole, plain_step_s)


def compare_torch_cells(
    costs: dict[str, TimingGrid], cells: Iterable[TorchCell], guesses: Iterable[PredictedSpeedup]
) -> tuple[list[ComparedPrediction], list[str]]:
    """Return torch cells compared with predictions, and why others can't be; `costs` are timing grids by checkpoint."""
    by_tree = prediction.index_torch_predictions(guesses)
    made, why = [], []
    for cell in cells:
        timed = costs.get(cell.checkpoint)
        if timed is None:
            continue
        if differs := timing_grid.list_hardware_differences(timed.hardware, cell.hardware):
            why.append(
                f"{cell.workload}, {cell.checkpoint}: its cells ran on another machine than the timing grid, "
                f"{', '.join(differs)}; run one of the two again: dvc repro -f -s time_trees@{timed.checkpoint}"
            )
            continue
        guess = by_tree.get((cell.temperature, cell.checkpoint, cell.shape))
        if guess and (found := measure_torch_cell(cell)):
            names = cell.workload, cell.checkpoint, cell.tree, cell.engine
            made.append(ComparedPrediction(*names, 1, None, guess, found))
    return made, list(dict.fromkeys(why))


def compare_simulated_lines(
    costs: Iterable[TimingGrid],
    lines: Iterable[ServedTableLine],
    replays: Mapping[str, list[ReplayedTree]],
    same_shapes: Callable[[str, str], bool],
) -> tuple[list[ComparedPrediction], set[int]]:
    """Return served points compared with what a grid of simulated acceptance predicts, and the ids of their lines.

    No such point was fitted. Points of another machine, or outside the grid, are left out: `explain_left_out` tells why.
    """
    made: list[ComparedPrediction] = []
    found_lines: set[int] = set()
    speculative = [line for line in lines if line.row.checkpoint]
    for timed in costs:
        for line in speculative:
            if isinstance(compared := _compare_simulated_line(timed, line, replays, same_shapes), ComparedPrediction):
                made.append(compared)
                found_lines.add(id(line))
    return made, found_lines


def explain_left_out(
    costs: Iterable[TimingGrid],
    line: ServedTableLine,
    replays: Mapping[str, list[ReplayedTree]],
    same_shapes: Callable[[str, str], bool],
) -> str:
    """Return why `compare_simulated_lines` leaves a line out: of each grid of its load the first condition that it fails."""
    reasons = [
        _compare_simulated_line(timed, line, replays, same_shapes) for timed in costs if _is_load_of_grid(line, timed)
    ]
    return "; ".join(dict.fromkeys(why for why in reasons if isinstance(why, str))) or "no grid of its load"


def _is_load_of_grid(line: ServedTableLine, timed: TimingGrid) -> bool:
    return all(line.row[name] == timed[name] for name in ("engine", "workload", "max_new_tokens"))


def _compare_simulated_line(
    timed: TimingGrid,
    line: ServedTableLine,
    replays: Mapping[str, list[ReplayedTree]],
    same_shapes: Callable[[str, str], bool],
) -> ComparedPrediction | str:
    """Return a served point compared with what a grid of simulated acceptance predicts, or why it can't be."""
    row, shape = line.row, line.cell.shape
    if not _is_load_of_grid(line, timed):
        return "another load than the grid's"
    if differs := timing_grid.list_hardware_differences(timed.hardware, line.cell.hardware):
        return "; ".join(differs)
    if row.checkpoint != timed.checkpoint and not same_shapes(timed.checkpoint, str(row.checkpoint)):
        return f"of other shapes than the grid's draft, {timed.checkpoint}"
    plain = next((step for step in timed.plain if step.batch == row.concurrency), None)
    if plain is None or not prediction.is_inside_grid(prediction.get_grid_bounds(timed), shape, plain.batch):
        return "outside the grid"
    replayed = replays.get(str(row.checkpoint), [])
    trees = select_temperature(replayed, timed.settings["temperature"], timed.draft_sampling)
    tree = next((tree for tree in trees if tree.shape == shape), None)
    if tree is None:
        return "not replayed"
    if (found := measure_served_line(line)) is None:
        return "no speedup was measured"
    guess = prediction.predict_speedup(tree, timed.fit, plain)
    labels = row.workload, row.checkpoint, row.tree, row.engine, row.concurrency, row.max_new_tokens
    return ComparedPrediction(*labels, guess, found)


def compare_served_lines(
    costs: Iterable[TimingGrid], lines: Iterable[ServedTableLine], replays: Mapping[str, list[ReplayedTree]]
) -> list[ComparedPrediction]:
    """Return served points compared with what the other points of their timing grid predict for them."""
    all_lines, comparisons = list(lines), []
    for timed in costs:
        trees = select_temperature(
            replays.get(timed.checkpoint, []), timed.settings["temperature"], timed.draft_sampling
        )
        for left_out_s, point in zip(timed.fit.left_out_s, timed.grid, strict=True):
            tree = next((tree for tree in trees if tree.shape == point.shape), None)
            line = next((line for line in all_lines if _is_grid_point(line, timed, point)), None)
            if tree and line and (found := measure_served_line(line)):
                step = next(plain for plain in timed.plain if plain.batch == point.batch)
                guess = prediction.estimate_speedup(tree, left_out_s, timed.fit, step)
                row = line.row
                names = row.workload, row.checkpoint, row.tree, row.engine, row.concurrency, row.max_new_tokens
                comparisons.append(ComparedPrediction(*names, guess, found))
    return comparisons


def _is_grid_point(line: ServedTableLine, timed: TimingGrid, point: CycleTime) -> bool:
    """Return whether a grid's point was taken from this line."""
    names = ("engine", "workload", "max_new_tokens", "checkpoint")
    return (
        line.baseline_point is not None
        and all(line.row[name] == timed[name] for name in names)
        and (line.cell.shape, line.row.concurrency) == (point.shape, point.batch)
    )
