"""When a cell has been repeated often enough: docs/workloads.md, "until"."""

import math
from dataclasses import dataclass
from functools import partial

from stages.cells.cell import StoppingRecord

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
