"""What a cycle costs, on disk: a timing grid of one engine (time_trees -> report), `results/cost/torch-<checkpoint>.json`.

A cost is of an engine on a machine, of a target, and of the shapes of a draft: its weights move nothing that is timed. Of a
serving engine the report makes the same from served cells (results/cost_served.py), and keeps it in results/launch.json.
"""

from pathlib import Path
from typing import Any

from stages.runtime import atomic

Row = dict[str, Any]

COSTS_FOLDER = Path("results/cost")
COST_DEFINITIONS = "docs/cost.md, version 1"
COST_KEYS = (
    "definitions", "engine",
    "workload", "max_new_tokens",  # of a serving engine, whose load it was; null of the torch engine
    "checkpoint",  # whose draft was timed
    "draft",  # its config.json; null where only served cells are known
    "target",  # [model, revision, digest of its config]
    "settings",  # what else moves the clock: dtype, semantics, context (tokens before the first timed cycle), repeats, ...
    "plain", "grid",  # as PLAIN, GRID
    "fit",  # cost_model.Fit
    "hardware", "versions", "seconds",
)  # fmt: skip
PLAIN_COLUMNS = (
    "batch",
    "step_s",
    "error",
    "samples",
)  # a plain step; `error`: standard error as a share, null of one repeat
GRID_COLUMNS = (
    "steps",
    "topk",
    "tokens",
    "batch",
    "cycle_s",
    "error",
    "samples",
)  # a cycle: drafting, verifying, all between


def locate_timing_grid(engine: str, checkpoint: str) -> Path:
    return COSTS_FOLDER / f"{engine}-{checkpoint}.json"


def check_timing_grid(cost: Row) -> Row:
    """`cost`, with just the keys it must have."""
    assert set(cost) == set(COST_KEYS), f"cost keys {sorted(cost)} are not {sorted(COST_KEYS)}"
    assert all(set(row) == set(PLAIN_COLUMNS) for row in cost["plain"])
    assert all(set(row) == set(GRID_COLUMNS) for row in cost["grid"])
    return cost


def write_timing_grid(cost: Row) -> Path:
    """Returns where it lies."""
    place = locate_timing_grid(cost["engine"], cost["checkpoint"])
    atomic.write_json(place, check_timing_grid(cost))
    return place


def read_timing_grid(checkpoint: str, model: str) -> Row:
    """The torch engine's cost of a draft for the target `model`.

    Raises:
        ValueError: naming the file and what to run, where it is missing, not whole, or of another draft or target.
    """
    place, stage = locate_timing_grid("torch", checkpoint), f"time_trees@{checkpoint}"
    found: Row = atomic.read_json(place, made_by=stage)
    again = f"run: dvc repro -f -s {stage}"
    if not isinstance(found, dict) or (missing := set(COST_KEYS) - set(found)):
        lacks = f"lacks {sorted(missing)}" if isinstance(found, dict) else "is no cost"
        raise ValueError(f"{place} {lacks}; it was cut or written by another version; {again}")
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
    """What two machines differ in, with both values; Python's version moves nothing."""
    keys = (key for key in dict.fromkeys([*one, *other]) if key != "python")
    return [f"{key} ({one.get(key)} against {other.get(key)})" for key in keys if one.get(key) != other.get(key)]
