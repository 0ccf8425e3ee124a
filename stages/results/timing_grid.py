"""A timing grid on disk: what plain steps and cycles cost on one engine (time_trees -> report), `results/cost/torch-*.json`.

A grid belongs to an engine on a machine, a target, and the shapes of a draft, whose weights change no time. For a serving
engine the report derives the same record from served cells (results/cost_served.py) and keeps it in results/launch.json.
"""

from pathlib import Path
from typing import Any

from stages.results.record import Record
from stages.runtime import atomic

Row = dict[str, Any]

COSTS_FOLDER = Path("results/cost")
COST_DEFINITIONS = "docs/cost.md, version 1"


class PlainStepTime(Record):
    """A step of plain decoding."""

    batch: int
    step_s: float
    error: float | None  # standard error as a share; null with one repeat
    samples: int


class CycleTime(Record):
    """A cycle: drafting, verifying and all between."""

    steps: int
    topk: int
    tokens: int
    batch: int
    cycle_s: float
    error: float | None
    samples: int


class TimingGrid(Record):
    """The times of one engine with one draft."""

    definitions: str
    engine: str
    workload: str | None  # of a serving engine, whose load was timed; null for the torch engine
    max_new_tokens: int | None
    checkpoint: str  # of the timed draft
    draft: dict[str, Any] | None  # its config.json; null if only served cells are known
    target: list[str | None] | None  # model, revision, digest of its config
    settings: dict[
        str, Any
    ]  # what else changes times: dtype, semantics, context (tokens before the first cycle), repeats
    plain: list[PlainStepTime]
    grid: list[CycleTime]
    fit: dict[str, Any]  # cost_model.CostModel
    hardware: dict[str, Any]
    versions: dict[str, str]
    seconds: float


COST_KEYS, PLAIN_COLUMNS, GRID_COLUMNS = TimingGrid.list_keys(), PlainStepTime.list_keys(), CycleTime.list_keys()


def locate_timing_grid(engine: str, checkpoint: str) -> Path:
    return COSTS_FOLDER / f"{engine}-{checkpoint}.json"


def check_timing_grid(cost: Row) -> Row:
    """Return `cost`, which must be a TimingGrid."""
    TimingGrid.check(cost)
    return cost


def write_timing_grid(cost: Row) -> Path:
    """Write a grid and return its path."""
    place = locate_timing_grid(cost["engine"], cost["checkpoint"])
    atomic.write_json(place, check_timing_grid(cost))
    return place


def read_timing_grid(checkpoint: str, model: str) -> Row:
    """Return the torch engine's grid of a draft for the target `model`.

    Raises:
        ValueError: naming the file and the command to run, if it is missing, incomplete, or of another draft or target.
    """
    place, stage = locate_timing_grid("torch", checkpoint), f"time_trees@{checkpoint}"
    found: Row = atomic.read_json(place, made_by=stage)
    again = f"run: dvc repro -f -s {stage}"
    if missing := set(COST_KEYS) - set(found):
        raise ValueError(f"{place} lacks {sorted(missing)}; it was cut or written by another version; {again}")
    for name, columns in (("plain", PLAIN_COLUMNS), ("grid", GRID_COLUMNS)):
        if not found[name] or any(set(columns) - set(row) for row in found[name]):
            raise ValueError(f"{place}: {name} is empty or lacks some of {', '.join(columns)}; {again}")
    if found["definitions"] != COST_DEFINITIONS:
        raise ValueError(f"{place} is measured by {found['definitions']}, expected {COST_DEFINITIONS}; {again}")
    for what, has, wanted in (
        ("the draft of checkpoint", found["checkpoint"], checkpoint),
        ("drafts of the target", found["target"][0], model),
    ):
        if has != wanted:
            raise ValueError(f"{place} has timed {what} {has}, expected {wanted}: its costs are another's; {again}")
    return found


def list_hardware_differences(one: Row, other: Row) -> list[str]:
    """Return the keys in which two machines differ, with both values; Python's version is ignored."""
    keys = (key for key in dict.fromkeys([*one, *other]) if key != "python")
    return [f"{key} ({one.get(key)} against {other.get(key)})" for key in keys if one.get(key) != other.get(key)]
