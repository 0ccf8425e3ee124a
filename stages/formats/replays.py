"""What replay found, on disk: `results/replay/<checkpoint>.csv`, one row a tree, and `<checkpoint>.inside.csv`, of some trees
what happens in their cycles, one row a bucket; docs/metrics.md defines the columns.
"""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.formats import atomic

RESULTS = Path("results/replay")
COLUMNS = (
    "checkpoint", "steps", "topk", "tokens", "tau", "tau_low", "tau_high", "accept_rate", "cycles", "accepted", "mean_depth",
    "acceptance", "tau_oracle", "tau_adaptive",
)  # fmt: skip
INSIDE = ("checkpoint", "tree", "by", "bucket", "cycles", "nodes", "promised", "accepted")


def path(checkpoint: str) -> Path:
    return RESULTS / f"{checkpoint}.csv"


def write(place: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic.write_csv(place, COLUMNS, rows)


def read(checkpoint: str) -> list[dict[str, Any]]:
    """Every replayed tree of a checkpoint. Raises ValueError naming the file, where it is missing or not whole."""
    place, again = path(checkpoint), f"run: dvc repro -f -s replay_trees@{checkpoint}"
    if not place.exists():
        raise ValueError(f"{place} not found; run: dvc repro replay_trees@{checkpoint}")
    with place.open(newline="", encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    if not rows or (missing := set(COLUMNS) - set(rows[0])):
        raise ValueError(f"{place} {f'lacks the columns {sorted(missing)}' if rows else 'holds no trees'}; {again}")
    for row in rows:
        try:  # what is computed with gets its type; the rest goes through as it was written
            row |= {k: int(row[k]) for k in ("steps", "topk", "tokens")} | {"tau": float(row["tau"])}
        except (TypeError, ValueError):
            raise ValueError(f"{place} has a line that is no tree: {row}; {again}") from None
    return rows


def inside_path(checkpoint: str) -> Path:
    return RESULTS / f"{checkpoint}.inside.csv"


def write_inside(checkpoint: str, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic.write_csv(inside_path(checkpoint), INSIDE, ({"checkpoint": checkpoint} | dict(row) for row in rows))


def read_inside(checkpoint: str) -> list[dict[str, Any]]:
    """Every bucket, its counts as numbers and None where it has none. No rows where no tree was looked into.

    Raises:
        ValueError: naming the file and what to run, where it is missing or not whole.
    """
    place, again = inside_path(checkpoint), f"run: dvc repro -f -s replay_trees@{checkpoint}"
    if not place.exists():
        raise ValueError(f"{place} not found; {again}")
    with place.open(newline="", encoding="utf-8") as lines:
        found = csv.DictReader(lines)
        if missing := set(INSIDE) - set(found.fieldnames or ()):
            raise ValueError(f"{place} lacks the columns {sorted(missing)}; {again}")
        rows: list[dict[str, Any]] = list(found)
    for row in rows:
        try:
            row |= {k: float(row[k]) if row[k] != "" else None for k in INSIDE[4:]}
        except (TypeError, ValueError):
            raise ValueError(f"{place} has a line that is no bucket: {row}; {again}") from None
    return rows
