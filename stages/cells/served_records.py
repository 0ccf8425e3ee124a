"""The cell of a workload measured in loads: one server configuration (benchmark_served -> report), or the torch engine.

A workload that is a sweep has a point for each answer length and concurrency. A baseline cell is the same server without a
draft; the report joins a cell and its baseline only if their fingerprints agree.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.cells import torch_records
from stages.cells.record import Record
from stages.cells.torch_records import StoppingRecord, TreeAcceptanceRates, TreeCell
from stages.grading.grade_summary import GradeSummary
from stages.params.tree_shape import Load
from stages.runtime import atomic
from stages.serving.latency import LoadSummary

RAN, UNSUPPORTED = "ran", "unsupported"
# The engine whose loads are cells of `benchmark`: without a server, plain decoding alternating with each load.
TORCH_ENGINE = "torch"


class ServerMemory(Record):
    """GiB, null if unknown; `kv_tokens` is a count."""

    weights: float | None
    draft: float | None
    kv_cache: float | None
    kv_tokens: int | None
    gpu_before: float | None
    gpu_serving: float | None
    gpu_after: float | None
    gpu_total: float | None

    @property
    def gpu_used(self) -> float | None:
        """Return the GPU memory that the server took."""
        return None if self.gpu_serving is None or self.gpu_before is None else self.gpu_serving - self.gpu_before


class PointAcceptance(TreeAcceptanceRates):
    """Accepted draft tokens of a point. If the engine counts over all requests, tau has no interval."""

    cycles: int
    accepted: int
    histogram: list[int]  # the engine's: cycles that accepted i draft tokens, those beyond the answer's end too
    clipped: bool  # whether `accepted` leaves out what lies beyond an answer's end (docs/metrics.md)
    engine: dict[str, Any]  # the engine's own figures, by its names


class RequestRow(Record):
    """A request."""

    repeat: int
    id: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    cycles: int | None
    accepted: int | None
    finish_reason: str | None
    failed: str | None  # the reason
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    wait_s: float
    answer: str | None  # a digest of the answer's ids, or of its text
    correct: bool | None  # null if not graded

    @property
    def decoding_s(self) -> float:
        """Return the seconds from the first token to the last of an answered request."""
        assert self.e2e_s is not None and self.ttft_s is not None, "an answered request has times"
        return self.e2e_s - self.ttft_s


class LoadPoint(Record):
    """One load of a server, repeated."""

    max_new_tokens: int
    concurrency: int | None
    request_rate: float | str | None  # requests/s, or "inf"
    loads: list[LoadSummary]  # of each repeat
    acceptance: PointAcceptance | None  # null without a draft
    quality: GradeSummary | None  # null if not graded
    requests: list[RequestRow]  # of all repeats
    warnings: list[str]  # sentences
    # CPU time of the torch engine's process / wall time; null on a GPU and of a server
    process_share: float | None = None
    stopping: StoppingRecord | None = None  # of a speedup over the cell's own baseline; null without `until`

    @property
    def load(self) -> Load:
        return Load(self.max_new_tokens, self.concurrency)


class ServerDescription(Record):
    """The server of a cell."""

    command: list[str]  # empty for the torch engine, and for a server that was already running
    info: dict[str, Any]  # what it reports of itself


class LoadsMeasurement(Record):
    """The measured part of a cell: a workload in loads."""

    status: str
    reason: str | None  # why the engine can't run the configuration; there are then no points
    fingerprint: dict[str, Any]  # what two cells must share: engine, version, flags but the draft's, prompts, GPU
    server: ServerDescription
    memory: ServerMemory
    points: list[LoadPoint]
    baseline_points: list[LoadPoint]  # if the cell measured its own baseline in alternation (interleave), else empty


class ServedCell(LoadsMeasurement, TreeCell):
    """A cell of `benchmark_served`, or of `benchmark` for a workload of loads. A baseline's draft is null."""

    @property
    def memory_sum(self) -> float | None:
        """Return the GiB of weights, draft and KV cache; None if one of them is unknown."""
        memory = self.memory
        parts = [memory.weights, memory.kv_cache, *([memory.draft] if self.checkpoint else [])]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None


def locate_served_cell(workload: str, checkpoint: str | None, tree: str | None, engine: str | None = None) -> Path:
    """Return a cell's path. A baseline has neither checkpoint nor tree; cells of the torch engine's loads lie with its others."""
    if engine == TORCH_ENGINE:
        return torch_records.locate_torch_cell(workload, str(checkpoint), str(tree))
    return torch_records.CELLS_FOLDER / f"served-{name_served_cell(workload, checkpoint, tree)}.json"


def name_served_cell(workload: str, checkpoint: str | None, tree: str | None) -> str:
    return f"{workload}-{name_server_config(checkpoint, tree)}"


def name_server_config(checkpoint: str | None, tree: str | None) -> str:
    """Return the name of a server configuration in benchmark_served.server.base_urls."""
    return f"{checkpoint}-{tree}" if checkpoint else "baseline"


def name_served_stage(workload: str, checkpoint: str | None, tree: str | None, engine: str | None = None) -> str:
    """Return the DVC stage that makes a cell."""
    if engine == TORCH_ENGINE:
        return torch_records.name_torch_stage(workload, str(checkpoint), str(tree))
    return f"benchmark_served@{workload}-{checkpoint}-{tree}" if checkpoint else f"benchmark_served_baseline@{workload}"


def is_unsupported_torch_cell(workload: str, checkpoint: str, tree: str) -> bool:
    """Return whether the torch engine's cell says that the draft can't grow the tree, of a workload in loads or prompt by prompt.

    False where the cell is missing or broken, which reading it names.
    """
    names = workload, checkpoint, tree
    try:
        found = atomic.read_json(torch_records.locate_torch_cell(*names), torch_records.name_torch_stage(*names))
    except atomic.BrokenArtifactError:
        return False
    return bool(found.get("status") == UNSUPPORTED)


def write_served_cell(cell: Mapping[str, Any]) -> Path:
    """Write a cell, which must be a ServedCell, and return its path."""
    ServedCell.check(cell)
    path = locate_served_cell(cell["workload"], cell["checkpoint"], cell["tree"], cell["engine"])
    atomic.write_json(path, cell)
    return path


def read_served_cell(workload: str, checkpoint: str | None, tree: str | None, engine: str | None = None) -> ServedCell:
    """Read a cell. Raises ValueError as `Cell.read_cell`."""
    names, config = {"workload": workload, "checkpoint": checkpoint, "tree": tree}, (workload, checkpoint, tree, engine)
    return ServedCell.read_cell(locate_served_cell(*config), name_served_stage(*config), **names)
