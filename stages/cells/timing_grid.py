"""Timing grids on disk: what plain steps and cycles cost on one engine (time_cycles -> report), `results/cost/ENGINE-DRAFT.json`.

A grid belongs to an engine on a machine, a target, and the shapes of a draft: times do not depend on its weights. An engine that
serves has a grid for each answer length of the workload by which it is timed.
"""

from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import MinLen
from pydantic import Field

from stages.cells.cell import Hardware
from stages.cells.cost_model import CostModel, PromptArrivals
from stages.cells.interval import TimeEstimate
from stages.cells.record import GREEDY, DraftSampling, Record
from stages.params.tree_shape import TreeShape
from stages.runtime import atomic

COSTS_FOLDER = Path("results/cost")
COST_DEFINITIONS = "docs/cost.md, version 6"
NO_ARRIVALS = PromptArrivals()


class StepTime(Record):
    """A step of decoding at a number of requests at once."""

    batch: int
    error: float | None  # standard error of the seconds as a share; null with one repeat
    samples: int
    arrivals: PromptArrivals = NO_ARRIVALS  # of other requests' prompts


class PlainStepTime(StepTime):
    """A step of plain decoding."""

    step_s: float

    @classmethod
    def build(cls, batch: int, found: TimeEstimate, samples: int, arrivals: PromptArrivals = NO_ARRIVALS) -> Self:
        return cls(batch=batch, step_s=found.value, error=found.error, samples=samples, arrivals=arrivals)


class CycleTime(StepTime):
    """A cycle: drafting, verifying and all between."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    cycle_s: float

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.num_steps, self.topk, self.num_draft_tokens)

    @classmethod
    def build(
        cls, tree: TreeShape, batch: int, found: TimeEstimate, samples: int, arrivals: PromptArrivals = NO_ARRIVALS
    ) -> Self:
        sizes = {"num_steps": tree.num_steps, "topk": tree.topk, "num_draft_tokens": tree.num_draft_tokens}
        return cls(**sizes, batch=batch, cycle_s=found.value, error=found.error, samples=samples, arrivals=arrivals)


class MeasuredGrid(Record):
    """The times of an engine with one draft, as its adapter measures them."""

    workload: str | None  # whose load a server was timed under; null for the torch engine, as `max_new_tokens`
    max_new_tokens: int | None
    draft: dict[str, Any]  # config.json of the timed draft
    # what else changes times: dtype, tree_scoring, context (tokens before the first cycle), repeats
    settings: dict[str, Any]
    plain: Annotated[list[PlainStepTime], MinLen(1)]
    grid: Annotated[list[CycleTime], MinLen(1)]
    other_lengths: list[CycleTime] = Field(default_factory=list)  # of answers, fitted together with the grid
    hardware: Hardware
    versions: dict[str, str]
    process_share: float | None = None  # CPU time / wall time of the timed steps; null on a GPU and of a server
    # by how much the median plain step of the slowest round is above that of the fastest, as a share; null of one round
    spread: float | None = None


class TimingGrid(MeasuredGrid):
    """The times of an engine with one draft, and their fit."""

    definitions: str = COST_DEFINITIONS
    engine: str
    checkpoint: str  # of the timed draft
    target: list[str | None] | None  # model, revision, digest of its config
    fit: CostModel
    seconds: float

    @property
    def stage(self) -> str:
        """Return the DVC stage that timed the grid."""
        return name_stage(self.engine, self.checkpoint)

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Return the smallest and largest timed value of each axis."""
        axes = {
            name: [point[name] for point in self.grid] for name in ("num_steps", "topk", "num_draft_tokens", "batch")
        }
        return {axis: (min(values), max(values)) for axis, values in axes.items()}

    def covers(self, tree: TreeShape, batch: int) -> bool:
        """Return whether a tree at a batch lies within the timed ones: nothing is extrapolated."""
        point = tree.num_steps, tree.topk, tree.num_draft_tokens, batch
        return all(low <= value <= high for value, (low, high) in zip(point, self.bounds.values(), strict=True))

    @property
    def draft_sampling(self) -> DraftSampling:
        """Return how a serving engine chose its drafts; the torch engine's grid tells nothing."""
        return self.settings.get("draft_sampling", GREEDY)


class TimingGrids(Record):
    """The timing grids of an engine with one draft, one of each answer length."""

    definitions: str
    grids: Annotated[list[TimingGrid], MinLen(1)]


def name_stage(engine: str, checkpoint: str) -> str:
    return f"time_cycles@{engine}-{checkpoint}"


def locate_grids(engine: str, checkpoint: str) -> Path:
    return COSTS_FOLDER / f"{engine}-{checkpoint}.json"


def write_grids(grids: list[TimingGrid]) -> Path:
    """Write an engine's grids of a draft and return their path."""
    path = locate_grids(grids[0].engine, grids[0].checkpoint)
    atomic.write_json(path, TimingGrids(definitions=COST_DEFINITIONS, grids=grids).model_dump())
    return path


def read_grids(engine: str, checkpoint: str, model: str) -> list[TimingGrid]:
    """Return an engine's grids of a draft for the target `model`. Raises ValueError also if they are of others."""
    path, stage = locate_grids(engine, checkpoint), name_stage(engine, checkpoint)
    grids = TimingGrids.read_json(path, stage, COST_DEFINITIONS).grids
    for grid in grids:
        timed = grid.checkpoint, grid.target[0] if grid.target else None
        if timed != (checkpoint, model):
            raise atomic.BrokenArtifactError(
                f"{path} has timed the draft {timed[0]} of the target {timed[1]}, expected {checkpoint} of {model}",
                atomic.format_rerun_hint(stage),
            )
    return grids


def list_hardware_differences(first: Hardware, second: Hardware) -> list[str]:
    """Return the keys in which two machines differ, with both values; Python's version is ignored."""
    keys = (key for key in dict.fromkeys([*first, *second]) if key != "python")
    return [f"{key} ({first.get(key)} against {second.get(key)})" for key in keys if first.get(key) != second.get(key)]
