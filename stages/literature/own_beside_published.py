"""Pairs of published numbers and a run's own, of the same target and tree, with the reasons why the two need not agree."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stages.literature.published import UNKNOWN, Publication, PublishedRow
from stages.results.served_table import PLAIN, ServedRow, ServedTableLine
from stages.results.torch_records import TorchCell, TreeCell

# Metrics that depend on the machine and the engine.
TIMED_METRICS = (
    "prefill_latency_s", "e2e_latency_s", "output_tok_s", "speedup", "throughput_ratio", "total_tok_s", "ttft_mean_ms",
    "ttft_p99_ms", "tpot_mean_ms", "tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms", "itl_mean_ms",
)  # fmt: skip
# Metric of published/*.yaml -> its column of results/served.csv, and the factor from the column's unit to the metric's.
SERVED_COLUMNS = {
    "tau": ("tau", 1), "accept_rate": ("accept_rate", 1), "speedup": ("speedup", 1), "throughput_ratio": ("speedup", 1),
    "output_tok_s": ("output_throughput", 1), "total_tok_s": ("total_throughput", 1), "ttft_mean_ms": ("ttft_mean_s", 1000),
    "ttft_p99_ms": ("ttft_p99_s", 1000), "tpot_mean_ms": ("tpot_mean_s", 1000), "tpot_p50_ms": ("tpot_p50_s", 1000),
    "tpot_p90_ms": ("tpot_p90_s", 1000), "tpot_p99_ms": ("tpot_p99_s", 1000), "itl_mean_ms": ("itl_mean_s", 1000),
}  # fmt: skip
# Setting of published/*.yaml -> column of results/served.csv.
LOAD_COLUMNS = {"output_tokens": "max_new_tokens", "concurrency": "concurrency", "batch": "concurrency"}


@dataclass(frozen=True)
class OwnPoint:
    """The metrics of a torch cell, or of a point of a served one."""

    cell: TreeCell
    checkpoint: str | None  # None for plain decoding, as `tree`
    tree: str | None
    metrics: dict[str, float]  # in the units of published/*.yaml
    load: ServedRow | None  # the line whose load was measured; None for a torch cell


@dataclass(frozen=True)
class PublishedPair:
    """A published number and the same metric of one own cell."""

    published: PublishedRow
    published_value: float  # in the unit of own_value
    own_value: float
    own_low: float | None  # the ends of its interval; None where it has none
    own_high: float | None
    workload: str
    checkpoint: str | None  # None for plain decoding
    differences: tuple[str, ...]  # why the two need not agree

    @property
    def ratio(self) -> float:
        return self.own_value / self.published_value


def normalise_model_name(model: str | None) -> str:
    """Return a model's name in lower case without its owner or folder, and without the suffix "-instruct"."""
    return (model or "").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-instruct")


def select_target_rows(publications: dict[str, Publication], model: str) -> dict[str, list[PublishedRow]]:
    """Return each publication's rows of this target, where it has any. Rows without a method are no results."""
    name = normalise_model_name(model)
    found = {
        publication.name: [
            row for row in publication.rows if row.setting.method and normalise_model_name(row.setting.target) == name
        ]
        for publication in publications.values()
    }
    return {publication: rows for publication, rows in found.items() if rows}


def pair_rows(rows: Iterable[PublishedRow], points: list[OwnPoint]) -> Iterator[PublishedPair]:
    """Yield each published number with every own point of its tree."""
    for row in rows:
        if row.metric == "baseline_output_tok_s":
            continue
        for point in points:
            if point.tree == row.setting.tree and row.metric in point.metrics and _has_stated_load(row, point):
                yield PublishedPair(
                    row,
                    published_value=row.value / 100 if row.unit == "%" else row.value,
                    own_value=point.metrics[row.metric],
                    own_low=point.metrics.get(f"{row.metric}_low"),
                    own_high=point.metrics.get(f"{row.metric}_high"),
                    workload=point.cell.workload,
                    checkpoint=point.checkpoint,
                    differences=tuple(_explain_differences(row, point.cell)),
                )


def convert_torch_cells(cells: Iterable[TorchCell]) -> Iterator[OwnPoint]:
    for cell in cells:
        metrics = {name: value for name, value in cell.metrics if value is not None}
        yield OwnPoint(cell, cell.checkpoint, cell.tree, metrics, None)


def convert_served_points(lines: Iterable[ServedTableLine]) -> Iterator[OwnPoint]:
    """Yield the points of served cells. One of plain decoding has no tree, also where it was measured in turns with a cell."""
    for line in lines:
        if line.point:
            metrics = {
                name: line.row[column] * factor
                for name, (column, factor) in SERVED_COLUMNS.items()
                if line.row[column] is not None
            }
            metrics |= {
                f"{name}_{end}": line.row[f"{column}_{end}"]
                for name, (column, _) in SERVED_COLUMNS.items()
                for end in ("low", "high")
                if column in ("tau", "speedup") and line.row[f"{column}_{end}"] is not None
            }
            named = line.row.decoding != PLAIN
            yield OwnPoint(
                line.cell, line.cell.checkpoint if named else None, line.cell.tree if named else None, metrics, line.row
            )


def _explain_differences(row: PublishedRow, cell: TreeCell) -> Iterator[str]:
    """Yield what differs. Accept lengths depend on what is decoded and how it is counted, times also on machine and engine."""
    if row.definition == UNKNOWN:
        yield "its definition isn't stated"
    elif row.definition != row.metric:
        yield f"defined as {row.definition}"
    if row.setting.temperature == UNKNOWN:
        yield "its temperature isn't stated"
    elif row.setting.temperature != cell.temperature:
        yield f"temperature {row.setting.temperature} against {cell.temperature}"
    if not _is_same_dataset(row.setting.dataset, cell.workload):
        yield f"data set {row.setting.dataset} against {cell.workload}"
    if row.metric in TIMED_METRICS:
        if (row.setting.engine or "").lower() != cell.engine:
            yield f"engine {row.setting.engine} against {cell.engine}"
        machine = cell.hardware.get("gpu") or cell.hardware.get("cpu")
        yield f"hardware {row.setting.hardware} against {machine}"


def _has_stated_load(row: PublishedRow, point: OwnPoint) -> bool:
    """Return whether the point was measured at the load that the published number states; True where either has none."""
    stated = [(column, getattr(row.setting, key)) for key, column in LOAD_COLUMNS.items()]
    return point.load is None or all(
        point.load[column] == value for column, value in stated if isinstance(value, float)
    )


def _is_same_dataset(dataset: str | None, workload: str) -> bool:
    """Compare letters and digits alone: MT-bench and mt_bench are the same."""
    return re.sub(r"\W|_", "", dataset or "").lower() == re.sub(r"\W|_", "", workload).lower()
