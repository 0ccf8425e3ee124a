"""Predicted speedups, `results/predicted.csv`, and what to launch, `results/launch.json`: docs/cost.md, version 6.

    C = cycle / plain step at the same batch          speedup = tau / C

tau is replayed for every tree; C comes from the fit of a timing grid (cost_model). Nothing is extrapolated: a tree outside the
grid has no prediction. The interval combines tau's with the error of the fit on points left out and that of the plain step; if
one of them is unknown, there is no interval.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from stages.cells import interval
from stages.cells.cost_model import CostModel
from stages.cells.record import GREEDY, DraftSampling, TableRow
from stages.cells.replay_records import ReplayedTree, select_temperature
from stages.cells.timing_grid import PlainStepTime, TimingGrid
from stages.params.engines import SERVED, is_in_process
from stages.params.tree_shape import TreeShape
from stages.runtime import atomic

LAUNCH_FILE = Path("results/launch.json")
REPLAY_COLUMNS = ("num_steps", "topk", "num_draft_tokens", "tau_low", "tau_high", "draft_sampling")
# High / low of an interval around 1: of one that is wider neither "faster" nor "not faster" can be told.
WIDEST_APART = 4.0


def can_tell(low: float | None, high: float | None) -> bool:
    """Return whether the interval of a speedup tells if it is above 1: False without one, or where it spans 1 and is too wide."""
    return low is not None and high is not None and (low > 1 or high < 1 or high <= WIDEST_APART * low)


class SpeedupConditions(NamedTuple):
    """The engine, prompts and load that a speedup is of."""

    engine: str  # on which it was timed
    workload: str | None  # None: a prediction by the torch engine's costs, whose tau is the eval split's
    max_new_tokens: int | None  # None where the torch engine answers prompt by prompt
    temperature: float
    concurrency: int | None  # None: no limit

    @property
    def at_concurrency(self) -> str:
        return "at any concurrency" if self.concurrency is None else f"at concurrency {self.concurrency}"

    @property
    def workload_suffix(self) -> str:
        """Return what the loads of a sweep share, in words; empty where the torch engine answers prompt by prompt."""
        return f" ({self.engine}, {self.workload}, {self.max_new_tokens} tokens)" if self.max_new_tokens else ""

    def find_predicted(self, replayable: Collection[str]) -> "SpeedupConditions":
        """Return the conditions under which a measured load is predicted: the torch engine's predictions are of no workload."""
        is_predicted = is_in_process(self.engine) and self.workload in replayable
        return self._replace(workload=None, max_new_tokens=None) if is_predicted else self


class PredictedSpeedup(TableRow):
    """The predicted speedup of a tree at one load."""

    TABLE = Path("results/predicted.csv")
    is_measured: ClassVar[bool] = False

    engine: str
    workload: str | None  # None for the torch engine, as `max_new_tokens`
    max_new_tokens: int | None
    temperature: float
    checkpoint: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    concurrency: int
    tau: float
    tau_low: float | None
    tau_high: float | None
    C: float
    speedup: float
    low: float | None
    high: float | None
    draft_sampling: DraftSampling = GREEDY  # of the replay whose tau this is

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.num_steps, self.topk, self.num_draft_tokens)

    @property
    def is_faster(self) -> bool:
        """Return whether the interval lies above 1; False without one."""
        return self.low is not None and self.low > 1

    @property
    def preference(self) -> tuple[bool, bool, float]:
        """Return the key by which trees of a load are chosen: surely faster than plain decoding, then measured, then speedup."""
        return self.is_faster, self.is_measured, self.speedup

    @property
    def conditions(self) -> SpeedupConditions:
        return SpeedupConditions(self.engine, self.workload, self.max_new_tokens, self.temperature, self.concurrency)


class OverruledPrediction(PredictedSpeedup):
    """A prediction whose speedup is replaced by the measured one of the same tree and load."""

    is_measured: ClassVar[bool] = True


class LaunchAdvice(PredictedSpeedup):
    """The advised launch at one load: the keys of `results/launch.json`, in this order."""

    enable: bool
    flags: list[str]  # none if speculation is not worth enabling
    min_version: str | None = None  # of the engine, that knows the draft; None: any
    measured: bool = False  # the speedup and its interval; else predicted


@dataclass(frozen=True)
class EngineLaunch:
    """How an engine is started with a draft and a tree."""

    flags: list[str]
    min_version: str | None = None  # of the engine, that knows the draft; None: any


DescribeLaunch = Callable[[str, PredictedSpeedup], EngineLaunch | None]  # of an engine by name


@dataclass(frozen=True)
class SpeedupEstimate:
    """A speedup tau / C, and its 95% interval where it is known."""

    tau: float
    C: float
    speedup: float
    low: float | None
    high: float | None


def predict_speedups(
    cost: TimingGrid,
    checkpoint: str,
    temperature: float,
    trees: Iterable[ReplayedTree],
    draft_sampling: DraftSampling = GREEDY,
) -> list[PredictedSpeedup]:
    """Return the prediction for each tree within the timing grid and each batch with a plain step."""
    found: list[PredictedSpeedup] = []
    for tree in select_temperature(trees, temperature, draft_sampling):
        found += [
            PredictedSpeedup(
                **{name: cost[name] for name in ("engine", "workload", "max_new_tokens")},
                temperature=temperature,
                checkpoint=checkpoint,
                **{name: tree[name] for name in REPLAY_COLUMNS},
                concurrency=plain.batch,
                **vars(predict_speedup(tree, cost.fit, plain)),
            )
            for plain in cost.plain
            if cost.covers(tree.shape, plain.batch)
        ]
    return found


def predict_speedup(tree: ReplayedTree, fit: CostModel, plain: PlainStepTime) -> SpeedupEstimate:
    """Return tau / C of a tree at the load of a plain step, and its 95% interval: independent errors, as shares (logarithms),
    add by their squares.

    The more tokens a cycle yields, the fewer cycles an answer has, between which as many prompts of other requests are read. The
    errors are tau's, that of the fit, and that of the plain step. If one is unknown (one conversation was replayed, or the
    plain step was timed in one repeat), there is no interval.
    """
    c = fit.predict_cycle_s(tree.shape, plain.batch, plain.arrivals.stretch(tree.tau)) / plain.step_s
    found, step_error = tree.tau / c, interval.compute_margin(plain.error, plain.samples)
    if tree.tau_low is None or tree.tau_high is None or step_error is None:
        return SpeedupEstimate(tree.tau, c, found, None, None)
    error = math.hypot(fit.margin, step_error)
    down, up = (math.hypot(math.log(a / b), error) for a, b in ((tree.tau, tree.tau_low), (tree.tau_high, tree.tau)))
    return SpeedupEstimate(tree.tau, c, found, found * math.exp(-down), found * math.exp(up))


def index_torch_predictions(
    predicted: Iterable[PredictedSpeedup],
) -> dict[tuple[float, str, TreeShape], PredictedSpeedup]:
    """Return the torch engine's predictions of one prompt at a time, by temperature, checkpoint and tree."""
    return {
        (row.temperature, row.checkpoint, row.shape): row
        for row in predicted
        if is_in_process(row.engine) and row.concurrency == 1
    }


def choose_launches(predicted: Iterable[PredictedSpeedup], describe_launch: DescribeLaunch) -> list[LaunchAdvice]:
    """Return, for each engine, load and concurrency, the preferred tree of those that the engine can run.

    Nothing is advised for an engine without a timing grid of its own: the costs of one say nothing of another, and those of a CPU
    nothing of a GPU. `describe_launch` returns None for a draft and tree that the engine can't run.
    """
    rows, found = list(predicted), []
    for engine in SERVED:
        engine_rows = [row for row in rows if row.engine == engine]
        for conditions in dict.fromkeys(row.conditions for row in engine_rows):
            group = [row for row in engine_rows if row.conditions == conditions]
            runnable = [(row, launch) for row in group if (launch := describe_launch(engine, row))]
            if runnable:
                found.append(_choose_launch(runnable))
    return found


def _choose_launch(runnable: list[tuple[PredictedSpeedup, EngineLaunch]]) -> LaunchAdvice:
    """Return the preferred tree of one load; without flags where its speedup is not surely above 1.

    As the verdict (reporting/verdict.py: judge_load), it takes no prediction of a checkpoint of which another tree was measured.
    """
    best, launch = max(runnable, key=lambda pair: pair[0].preference)
    measured = [pair for pair in runnable if pair[0].is_measured]
    if not best.is_measured and any(row.checkpoint == best.checkpoint for row, _ in measured):
        best, launch = max(measured, key=lambda pair: pair[0].preference)
    enable = best.is_faster
    launch = launch if enable else EngineLaunch([])
    return LaunchAdvice.model_validate(
        best.model_dump() | {"enable": enable, "measured": best.is_measured, **vars(launch)}
    )


def write_launch(launch: list[LaunchAdvice], costs: list[TimingGrid]) -> None:
    """Write what to launch, and the timing grids, each with its hardware."""
    content = {"launch": [row.model_dump() for row in launch], "costs": [cost.model_dump() for cost in costs]}
    atomic.write_json(LAUNCH_FILE, content)


def read_launch() -> list[LaunchAdvice]:
    """Return what to launch. Raises ValueError naming the command to run, if the file is missing."""
    return [LaunchAdvice.model_validate(row) for row in atomic.read_json(LAUNCH_FILE, made_by="report")["launch"]]
