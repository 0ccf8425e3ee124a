"""When a cell has been repeated often enough: docs/workloads.md, "until"."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from stages.cells import interval
from stages.cells.cell import PooledSpeedup, StoppingRecord

# An interval over two repeats is 12.7 standard errors to either side; of prompts that are decoded both ways it is over prompts.
FEWEST_COMPARED_REPEATS = 3


@dataclass(frozen=True)
class RepeatRule:
    """The repeats of a workload: `repeats` and `until` of params.yaml."""

    fewest: int
    most: int
    # Of the speedup's interval, as a share of the speedup; None: `most` repeats whatever it is.
    half_width: float | None
    most_seconds: float = math.inf

    def judge(
        self, repeats: int, half_width: float | None, seconds: float, prints: bool = True
    ) -> StoppingRecord | None:
        """Return why a measurement ends after so many repeats and seconds; None while it goes on.

        `half_width` is half of the speedup's interval as a share of it, None without an interval. A line says how far it is,
        unless `prints` is False.
        """
        ended = partial(StoppingRecord, repeats=repeats, half_width=half_width)
        if self.half_width is not None and self.most > 1 and prints:
            known = "no interval yet" if half_width is None else f"speedup known to ±{half_width:.1%}"
            wanted = f"wanted ±{self.half_width:.1%}; {seconds:.0f} s of {self.most_seconds:g}"
            print(f"repeat {repeats} of at most {self.most}: {known}, {wanted}", flush=True)
        if repeats >= self.most:
            return ended(rule="repeats")
        if self.half_width is not None and repeats >= self.fewest:
            if half_width is not None and half_width <= self.half_width:
                return ended(rule="half_width")
            if seconds >= self.most_seconds:
                return ended(rule="most_seconds")
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
