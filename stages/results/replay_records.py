"""Results of replay on disk; docs/metrics.md defines the columns.

`results/replay/<checkpoint>.csv`: a row for each tree on the target's answers at temperature 0, then a row for each tree on
answers sampled above it. `<checkpoint>.inside.csv`: statistics of the cycles of some trees at temperature 0, a row a bucket.
"""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.runtime import atomic

REPLAY_FOLDER = Path("results/replay")
REPLAY_COLUMNS = (
    "checkpoint", "steps", "topk", "tokens", "tau", "tau_low", "tau_high", "accept_rate", "cycles", "accepted", "mean_depth",
    "acceptance", "tau_oracle", "tau_adaptive",
    "temperature", "top_p",  # of the answers; top_p empty at temperature 0
)  # fmt: skip
TREE_STATISTICS_COLUMNS = ("checkpoint", "tree", "by", "bucket", "cycles", "nodes", "promised", "accepted")


def locate_replay(checkpoint: str) -> Path:
    return REPLAY_FOLDER / f"{checkpoint}.csv"


def write_replay(place: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic.write_csv(place, REPLAY_COLUMNS, rows)


def read_replay(checkpoint: str) -> list[dict[str, Any]]:
    """Every replayed tree of a checkpoint, at each temperature. Raises ValueError naming the file, where it isn't whole."""
    place, again = locate_replay(checkpoint), f"run: dvc repro -f -s replay_trees@{checkpoint}"
    if not place.exists():
        raise ValueError(f"{place} not found; run: dvc repro replay_trees@{checkpoint}")
    try:
        with place.open(newline="", encoding="utf-8") as lines:
            rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{place} can't be read as CSV ({error}); {again}") from None
    if not rows or (missing := set(REPLAY_COLUMNS) - set(rows[0])):
        raise ValueError(f"{place} {f'lacks the columns {sorted(missing)}' if rows else 'holds no trees'}; {again}")
    for row in rows:
        try:  # only columns that are computed with are converted
            row |= {k: int(row[k]) for k in ("steps", "topk", "tokens")}
            row |= {k: float(row[k]) for k in ("tau", "temperature")}
            row |= {"top_p": float(row["top_p"]) if row["top_p"] else None}
        except (TypeError, ValueError):
            raise ValueError(f"{place} has a line that is no tree: {row}; {again}") from None
    return rows


def select_greedy(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows on the target's answers at temperature 0."""
    return [row for row in rows if row["temperature"] == 0]


def find_replayed_tau(rows: Iterable[Mapping[str, Any]], cell: Mapping[str, Any]) -> float | None:
    """Return the replayed tau of a cell's tree on answers sampled as the cell samples; None if there is none."""
    shape = cell["num_steps"], cell["topk"], cell["num_draft_tokens"]
    mine = (row for row in rows if (row["steps"], row["topk"], row["tokens"]) == shape)
    return next((row["tau"] for row in mine if _has_same_sampling(row, cell)), None)


def _has_same_sampling(row: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    """Return whether a replayed row's answers were sampled as the cell's: without top-k, or both at temperature 0."""
    if row["temperature"] != cell["temperature"]:
        return False
    return cell["temperature"] == 0 or (row["top_p"] == cell["top_p"] and cell["top_k"] is None)


def locate_tree_statistics(checkpoint: str) -> Path:
    return REPLAY_FOLDER / f"{checkpoint}.inside.csv"


def write_tree_statistics(checkpoint: str, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic.write_csv(
        locate_tree_statistics(checkpoint),
        TREE_STATISTICS_COLUMNS,
        ({"checkpoint": checkpoint} | dict(row) for row in rows),
    )


def read_tree_statistics(checkpoint: str) -> list[dict[str, Any]]:
    """Return every bucket, with None for missing counts; no rows if no tree was traced.

    Raises:
        ValueError: naming the file and the command to run, if it is missing or incomplete.
    """
    place, again = locate_tree_statistics(checkpoint), f"run: dvc repro -f -s replay_trees@{checkpoint}"
    if not place.exists():
        raise ValueError(f"{place} not found; {again}")
    try:
        with place.open(newline="", encoding="utf-8") as lines:
            found = csv.DictReader(lines)
            columns = set(found.fieldnames or ())
            rows: list[dict[str, Any]] = list(found)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{place} can't be read as CSV ({error}); {again}") from None
    if missing := set(TREE_STATISTICS_COLUMNS) - columns:
        raise ValueError(f"{place} lacks the columns {sorted(missing)}; {again}")
    for row in rows:
        try:
            row |= {k: float(row[k]) if row[k] != "" else None for k in TREE_STATISTICS_COLUMNS[4:]}
        except (TypeError, ValueError):
            raise ValueError(f"{place} has a line that is no bucket: {row}; {again}") from None
    return rows
