"""A timing grid on disk: what plain steps and cycles cost on one engine (time_trees -> report), `results/cost/torch-*.json`.

A grid belongs to an engine on a machine, a target, and the shapes of a draft: times do not depend on its weights. serving_costs
times those of a serving engine with simulated acceptance, one of each answer length, `results/cost/ENGINE-WORKLOAD.json`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import Field

from stages.cells.cell import Hardware
from stages.cells.cost_model import CostModel, PromptArrivals
from stages.cells.interval import TimeEstimate
from stages.cells.record import GREEDY, DraftSampling, Record
from stages.params.engines import TORCH
from stages.params.tree_shape import TreeShape
from stages.runtime import atomic

COSTS_FOLDER = Path("results/cost")
COST_DEFINITIONS = "docs/cost.md, version 6"


class PlainStepTime(Record):
    """A step of plain decoding."""

    batch: int
    step_s: float
    error: float | None  # standard error as a share; null with one repeat
    samples: int
    arrivals: PromptArrivals = PromptArrivals()  # of other requests' prompts


class CycleTime(Record):
    """A cycle: drafting, verifying and all between."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    batch: int
    cycle_s: float
    error: float | None
    samples: int
    arrivals: PromptArrivals = PromptArrivals()

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.num_steps, self.topk, self.num_draft_tokens)


def summarise_times(
    name: str, seconds: Sequence[float], estimate: Callable[[Sequence[float]], TimeEstimate]
) -> dict[str, Any]:
    """Return the columns `name`, error and samples of a CycleTime or PlainStepTime."""
    found = estimate(seconds)
    return {name: found.value, "error": found.error, "samples": len(seconds)}


class TimingGrid(Record):
    """The times of one engine with one draft."""

    definitions: str
    engine: str
    workload: str | None  # of a serving engine, whose load was timed; null for the torch engine
    max_new_tokens: int | None
    checkpoint: str  # of the timed draft
    draft: dict[str, Any]  # its config.json
    target: list[str | None] | None  # model, revision, digest of its config
    settings: dict[
        str, Any
    ]  # what else changes times: dtype, tree_scoring, context (tokens before the first cycle), repeats
    plain: Annotated[list[PlainStepTime], MinLen(1)]
    grid: Annotated[list[CycleTime], MinLen(1)]
    other_lengths: list[CycleTime] = Field(default_factory=list)  # of serving_costs: fitted together with the grid
    fit: CostModel
    hardware: Hardware
    versions: dict[str, str]
    seconds: float
    process_share: float | None = None  # CPU time / wall time of the timed steps; null on a GPU and of a server
    # by how much the median plain step of the slowest round is above that of the fastest, as a share; null of one round
    spread: float | None = None

    @property
    def stage(self) -> str:
        """Return the DVC stage that timed the grid."""
        return name_costs_stage(self.engine, self.workload) if self.workload else f"time_trees@{self.checkpoint}"

    @property
    def draft_sampling(self) -> DraftSampling:
        """Return how a serving engine chose its drafts; grids timed before it was recorded have greedy ones."""
        return self.settings.get("draft_sampling", GREEDY)


def name_costs_stage(engine: str, workload: str) -> str:
    return f"serving_costs@{engine}-{workload}"


def locate_timing_grid(engine: str, name: str) -> Path:
    """Return the file of an engine's grid, or of its grids; `name` is the timed checkpoint, or the workload of servers."""
    return COSTS_FOLDER / f"{engine}-{name}.json"


def write_timing_grid(grid: TimingGrid) -> Path:
    """Write a grid and return its path."""
    path = locate_timing_grid(grid.engine, grid.checkpoint)
    atomic.write_json(path, grid.model_dump())
    return path


class ServingCosts(Record):
    """The timing grids of one workload on a serving engine that simulates acceptance (serving_costs)."""

    definitions: str
    grids: list[TimingGrid]  # of each answer length


def write_serving_costs(workload: str, grids: list[TimingGrid]) -> Path:
    """Write an engine's grids of a workload and return their path."""
    path = locate_timing_grid(grids[0].engine, workload)
    atomic.write_json(path, ServingCosts(definitions=COST_DEFINITIONS, grids=grids).model_dump())
    return path


def read_serving_costs(engine: str, workload: str, model: str) -> list[TimingGrid]:
    """Return an engine's grids of a workload for the target `model`. Raises ValueError also if they are another's."""
    path = locate_timing_grid(engine, workload)
    grids = ServingCosts.read_json(path, name_costs_stage(engine, workload), COST_DEFINITIONS).grids
    for grid in grids:
        _check_owner(path, grid.stage, "drafts of the target", grid.target[0] if grid.target else None, model)
    return grids


def read_timing_grid(checkpoint: str, model: str) -> TimingGrid:
    """Return the torch engine's grid of a draft for the target `model`. Raises ValueError also if it is of others."""
    path, stage = locate_timing_grid(TORCH.name, checkpoint), f"time_trees@{checkpoint}"
    found = TimingGrid.read_json(path, stage, COST_DEFINITIONS)
    _check_owner(path, stage, "the draft of checkpoint", found.checkpoint, checkpoint)
    _check_owner(path, stage, "drafts of the target", found.target[0] if found.target else None, model)
    return found


def _check_owner(path: Path, stage: str, what: str, found: str | None, expected: str) -> None:
    if found != expected:
        problem = f"{path} has timed {what} {found}, expected {expected}: its costs are another's"
        raise atomic.BrokenArtifactError(problem, atomic.format_rerun_hint(stage))


def list_hardware_differences(first: Hardware, second: Hardware) -> list[str]:
    """Return the keys in which two machines differ, with both values; Python's version is ignored."""
    keys = (key for key in dict.fromkeys([*first, *second]) if key != "python")
    return [f"{key} ({first.get(key)} against {second.get(key)})" for key in keys if first.get(key) != second.get(key)]
