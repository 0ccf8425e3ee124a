"""A run's own cells beside what was published of the same target and tree, and why the two needn't agree."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stages.literature.published import UNKNOWN, Publication, PublishedRow
from stages.results import served_table

# What hangs on the machine and the engine.
TIMED_METRICS = (
    "prefill_latency_s", "e2e_latency_s", "output_tok_s", "speedup", "throughput_ratio", "total_tok_s", "ttft_mean_ms",
    "ttft_p99_ms", "tpot_mean_ms", "tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms", "itl_mean_ms",
)  # fmt: skip
# What a point of a served cell is called in published/*.yaml: the column of results/served.csv, and how many of the unit it is.
SERVED_COLUMNS = {
    "tau": ("tau", 1), "accept_rate": ("accept_rate", 1), "speedup": ("speedup", 1), "throughput_ratio": ("speedup", 1),
    "output_tok_s": ("output_throughput", 1), "total_tok_s": ("total_throughput", 1), "ttft_mean_ms": ("ttft_mean_s", 1000),
    "ttft_p99_ms": ("ttft_p99_s", 1000), "tpot_mean_ms": ("tpot_mean_s", 1000), "tpot_p50_ms": ("tpot_p50_s", 1000),
    "tpot_p90_ms": ("tpot_p90_s", 1000), "tpot_p99_ms": ("tpot_p99_s", 1000), "itl_mean_ms": ("itl_mean_s", 1000),
}  # fmt: skip
LOAD_COLUMNS = {
    "output_tokens": "max_new_tokens",
    "concurrency": "concurrency",
    "batch": "concurrency",
}  # setting -> column


@dataclass(frozen=True)
class PublishedPair:
    published: PublishedRow
    theirs: float  # in our unit
    ours: float
    workload: str
    checkpoint: str | None  # None: plain decoding
    differs: tuple[str, ...]  # why the two needn't agree

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def normalise_model_name(model: str | None) -> str:
    """A model by its name alone: without its owner or folder, and whether or not it says that it takes instructions."""
    return (model or "").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-instruct")


def select_target_rows(publications: dict[str, Publication], model: str) -> dict[str, list[PublishedRow]]:
    """Publication -> its rows of this target, where it has any. A shape of a target is no result."""
    mine = {
        name: [
            row
            for row in publication.rows
            if row.setting.method and normalise_model_name(row.setting.target) == normalise_model_name(model)
        ]
        for name, publication in publications.items()
    }
    return {name: rows for name, rows in mine.items() if rows}


def pair_rows(rows: Iterable[PublishedRow], cells: list[dict[str, Any]]) -> Iterator[PublishedPair]:
    """Each published number beside every cell of its tree; `cells` as in results/torch_records.py, or as `convert_served_points` gives them.

    A cell's own baseline is no draft's doing; a served one is a cell, without a tree.
    """
    for row in rows:
        if row.metric == "baseline_output_tok_s":
            continue
        for ours in cells:
            if ours["tree"] == row.setting.tree and row.metric in ours["metrics"] and _has_stated_load(row, ours):
                theirs = row.value / 100 if row.unit == "%" else row.value
                value = float(ours["metrics"][row.metric])
                yield PublishedPair(
                    row, theirs, value, ours["workload"], ours["checkpoint"], tuple(_explain_differences(row, ours))
                )


def convert_served_points(found: Iterable[served_table.ServedTableLine]) -> Iterator[dict[str, Any]]:
    """Points of served cells in the shape that `pair_rows` takes, with the load they were measured at."""
    for line in found:
        if line.point:
            known = {
                name: line.row[column] * times
                for name, (column, times) in SERVED_COLUMNS.items()
                if line.row[column] is not None
            }
            at = {k: line.row[k] for k in LOAD_COLUMNS.values()}
            names = {k: line.cell[k] for k in ("workload", "checkpoint", "tree", "engine", "temperature", "hardware")}
            if line.row["decoding"] == served_table.PLAIN:  # in turns with a cell, too
                names |= {"checkpoint": None, "tree": None}
            yield names | {"metrics": known, "load": at}


def _explain_differences(row: PublishedRow, ours: dict[str, Any]) -> Iterator[str]:
    """Accept lengths hang on what is decoded and how it is counted; times on the machine and the engine too."""
    if row.definition == UNKNOWN:
        yield "its definition isn't stated"
    elif row.definition != row.metric:
        yield f"defined as {row.definition}"
    if row.setting.temperature == UNKNOWN:
        yield "its temperature isn't stated"
    elif row.setting.temperature != ours["temperature"]:
        yield f"temperature {row.setting.temperature} against {ours['temperature']}"
    if not _is_same_dataset(row.setting.dataset, ours["workload"]):
        yield f"data set {row.setting.dataset} against {ours['workload']}"
    if row.metric in TIMED_METRICS:
        if (row.setting.engine or "").lower() != ours["engine"]:
            yield f"engine {row.setting.engine} against {ours['engine']}"
        machine = ours["hardware"].get("gpu") or ours["hardware"].get("cpu")
        yield f"hardware {row.setting.hardware} against {machine}"


def _has_stated_load(row: PublishedRow, ours: dict[str, Any]) -> bool:
    """Where a published number says its load, only points of that very load stand beside it: a sweep has dozens."""
    stated = {key: value for key in LOAD_COLUMNS if isinstance(value := getattr(row.setting, key), int | float)}
    return all(ours["load"][LOAD_COLUMNS[key]] == value for key, value in stated.items()) if "load" in ours else True


def _is_same_dataset(dataset: str | None, workload: str) -> bool:
    """MT-bench and mt_bench are one."""
    return re.sub(r"\W|_", "", dataset or "").lower() == re.sub(r"\W|_", "", workload).lower()
