"""When a cell has been repeated often enough: docs/workloads.md, "until"."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from stages.cells import interval
from stages.cells.cell import PooledSpeedup, StoppingRecord


@dataclass(frozen=True)
class RepeatRule:
    """The repeats of a workload: `repeats` and `until` of params.yaml."""

    fewest: int
    most: int
    # Of the speedup's interval, as a share of the speedup; None: `most` repeats whatever it is.
    half_width: float | None

    def run(
        self, measure_repeat: Callable[[int], None], measure_half: Callable[[], float | None], prints: bool = True
    ) -> StoppingRecord:
        """Measure repeats until one is the last; `measure_half` gives the half-width of all so far."""
        ended, repeat = None, 0
        while ended is None:
            measure_repeat(repeat)
            repeat += 1
            ended = self.judge(repeat, measure_half(), prints)
        return ended

    def judge(self, repeats: int, half_width: float | None, prints: bool = True) -> StoppingRecord | None:
        """Return why a measurement of this half-width ends after so many repeats; None while it goes on.

        Where the number of repeats is not fixed, a line says how far it is, unless `prints` is False.
        """
        wanted = self.half_width
        if wanted is not None and prints:
            known = "no interval yet" if half_width is None else f"speedup known to ±{half_width:.1%}"
            print(f"repeat {repeats} of at most {self.most}: {known}, wanted ±{wanted:.1%}", flush=True)
        if wanted is not None and half_width is not None and repeats >= self.fewest and half_width <= wanted:
            return StoppingRecord(repeats=repeats, rule="half_width", half_width=half_width)
        if repeats >= self.most:
            ended_by: Literal["repeats", "most_repeats"] = "repeats" if wanted is None else "most_repeats"
            return StoppingRecord(repeats=repeats, rule=ended_by, half_width=half_width)
        return None


def measure_pooled_half_width(found: PooledSpeedup) -> float | None:
    """Return half of the interval of a pooled speedup, as a share of it; None without an interval."""
    if found.speedup_low is None or found.speedup_high is None:
        return None
    return interval.compute_relative_half(interval.Interval(found.speedup_low, found.speedup_high), found.speedup)


def measure_loads_half_width(
    throughputs: Sequence[float | None], baseline_throughputs: Sequence[float | None]
) -> float | None:
    """Return half of the interval of a load's speedup, as a share of it; from output tokens/s of each repeat.

    None with fewer than two repeats, or where one answered nothing, or its tokens are not counted.
    """
    pairs = zip(throughputs, baseline_throughputs, strict=True)
    speedups = [a / b for a, b in pairs if a is not None and b]
    if len(speedups) < len(throughputs):
        return None
    return interval.compute_relative_half(interval.compute_mean_interval(speedups), fmean(speedups))
