"""A run's own cells beside what was published of the same target and tree, and why the two needn't agree."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stages.formats import cell
from stages.formats.published import UNKNOWN, Publication, Row

# What hangs on the machine and the engine.
TIMES = ("prefill_latency_s", "e2e_latency_s", "output_tok_s", "speedup")


@dataclass(frozen=True)
class Line:
    published: Row
    theirs: float  # in our unit
    ours: float
    workload: str
    checkpoint: str
    differs: tuple[str, ...]  # why the two needn't agree

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def name_of(model: str | None) -> str:
    """A model by its name alone: without its owner or folder, and whether or not it says that it takes instructions."""
    return (model or "").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-instruct")


def of_target(publications: dict[str, Publication], model: str) -> dict[str, list[Row]]:
    """Publication -> its rows of this target, where it has any. A shape of a target is no result."""
    mine = {
        name: [row for row in publication.rows if row.setting.method and name_of(row.setting.target) == name_of(model)]
        for name, publication in publications.items()
    }
    return {name: rows for name, rows in mine.items() if rows}


def lines(rows: Iterable[Row], cells: list[dict[str, Any]]) -> Iterator[Line]:
    """Each published number beside every cell of its tree; `cells` as in formats/cell.py. Baselines are no draft's doing."""
    for row in rows:
        if row.metric not in cell.METRICS or row.metric == "baseline_output_tok_s":
            continue
        for ours in cells:
            if ours["tree"] == row.setting.tree:
                theirs = row.value / 100 if row.unit == "%" else row.value
                value = float(ours["metrics"][row.metric])
                yield Line(row, theirs, value, ours["workload"], ours["checkpoint"], tuple(_differs(row, ours)))


def _differs(row: Row, ours: dict[str, Any]) -> Iterator[str]:
    """Accept lengths hang on what is decoded and how it is counted; times on the machine and the engine too."""
    if row.definition == UNKNOWN:
        yield "its definition isn't stated"
    elif row.definition != row.metric:
        yield f"defined as {row.definition}"
    if row.setting.temperature == UNKNOWN:
        yield "its temperature isn't stated"
    elif row.setting.temperature != ours["temperature"]:
        yield f"temperature {row.setting.temperature} against {ours['temperature']}"
    if not _same(row.setting.dataset, ours["workload"]):
        yield f"data set {row.setting.dataset} against {ours['workload']}"
    if row.metric in TIMES:
        yield f"engine {row.setting.engine} against {ours['engine']}"
        machine = ours["hardware"].get("gpu") or ours["hardware"].get("cpu")
        yield f"hardware {row.setting.hardware} against {machine}"


def _same(dataset: str | None, workload: str) -> bool:
    """MT-bench and mt_bench are one."""
    return re.sub(r"\W|_", "", dataset or "").lower() == re.sub(r"\W|_", "", workload).lower()
