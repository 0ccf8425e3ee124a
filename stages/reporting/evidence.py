"""The evidence of the verdict: predicted and measured speedups by load."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from stages.cells.prediction import LaunchAdvice, PredictedSpeedup, SpeedupConditions
from stages.cells.table import ResultRow


@dataclass(frozen=True)
class SpeedupEvidence:
    """A predicted or measured speedup of one tree with one checkpoint."""

    tree: str
    checkpoint: str
    speedup: float
    low: float | None
    high: float | None
    stage: str | None = None  # that measured it; None of a prediction
    is_doubted: bool = False  # its times are odd

    @property
    def name(self) -> str:
        return f"{self.tree} with {self.checkpoint}"

    @property
    def is_faster(self) -> bool:
        """Return whether the interval lies above 1; False without one."""
        return self.low is not None and self.low > 1

    def __str__(self) -> str:
        ends = "no interval" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.speedup:.2f}x ({ends}{', doubtful timings' if self.is_doubted else ''})"


Predictions = dict[SpeedupConditions, SpeedupEvidence]
Measurements = dict[SpeedupConditions, list[SpeedupEvidence]]


def collect_predicted(launch: Iterable[LaunchAdvice], predicted: Iterable[PredictedSpeedup]) -> Predictions:
    """Return the preferred predicted tree of each load: of a served engine that which can be launched, where one can."""
    advised = _index_best((row for row in launch if not row.measured), lambda row: row.speedup)
    found = advised | _index_best(predicted, lambda row: row.preference) | advised
    return {
        conditions: SpeedupEvidence(row.shape.name, row.checkpoint, row.speedup, row.low, row.high)
        for conditions, row in found.items()
    }


def _index_best(
    rows: Iterable[PredictedSpeedup], key: Callable[[PredictedSpeedup], Any]
) -> dict[SpeedupConditions, PredictedSpeedup]:
    best: dict[SpeedupConditions, PredictedSpeedup] = {}
    for row in rows:
        best[row.conditions] = max(best.get(row.conditions, row), row, key=key)
    return best


def collect_measured(rows: Iterable[ResultRow], doubted: Collection[str]) -> Measurements:
    """Return the measured trees of each load."""
    found: Measurements = {}
    for row in rows:
        if row.is_plain or row.speedup is None or row.rate is not None:
            continue
        names, ends = (str(row.tree), str(row.checkpoint)), (row.speedup_low, row.speedup_high)
        evidence = SpeedupEvidence(*names, row.speedup, *ends, row.stage, row.stage in doubted)
        found.setdefault(row.conditions, []).append(evidence)
    return found
