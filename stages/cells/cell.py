"""The record of a cell, one JSON file in results/cells: an engine, a workload, and a draft and its shape, or neither of them.

A cell has a point for each answer length and concurrency of its workload. Without a draft it is a baseline, which the report
joins with the cells of the same fingerprint. The torch engine's cells have a baseline of their own, measured in turns with them,
as served ones do with `interleave`. Readers list the cells by params.yaml, not by what lies in the folder: cells that were
removed from params.yaml stay on disk.
"""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

from pydantic import Field

from stages.cells.record import GREEDY, DraftSampling, Record
from stages.cells.request_record import LoadSummary
from stages.params.engines import is_in_process
from stages.params.tree_shape import Load, TreeShape, parse_shape
from stages.runtime import atomic

CELLS_FOLDER = Path("results/cells")
DEFINITIONS = "docs/metrics.md, version 3"
PLAIN, SPECULATIVE = "plain", "speculative"  # the kinds of decoding
RAN, UNSUPPORTED, SKIPPED = "ran", "unsupported", "skipped"
SAMPLING_KEYS = {"temperature", "top_p", "top_k", "seed"}  # of a workload, which a cell has too


class NotMeasuredError(ValueError):
    """A cell can't be measured, or is not worth it; its status and why become its record."""

    def __init__(self, status: str, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.status, self.reason = status, reason


Hardware = dict[str, str | int]  # cpu, threads, system, python, gpu, num_gpus_total; what is not known is left out


class StoppingRecord(Record):
    """How many repeats a measurement took, and why no more."""

    repeats: int
    rule: Literal["repeats", "half_width", "most_seconds"]  # the key of the workload that ended it
    half_width: float | None  # of the speedup's interval, as a share of the speedup; null without an interval


class DraftSize(Record):
    """The memory and the parameters of a draft in the torch engine, beside the target's."""

    weights_bytes: int
    state_bytes: int  # kept between cycles
    draft_parameters: int


class Memory(Record):
    """GiB, null if unknown; `kv_tokens` is a count."""

    weights: float | None = None
    draft: float | None = None
    kv_cache: float | None = None
    kv_tokens: int | None = None
    gpu_before: float | None = None
    gpu_serving: float | None = None
    gpu_after: float | None = None
    gpu_total: float | None = None

    @property
    def gpu_used(self) -> float | None:
        """Return the GPU memory that the server took."""
        return None if self.gpu_serving is None or self.gpu_before is None else self.gpu_serving - self.gpu_before


class Acceptance(Record):
    """Accepted draft tokens of a point, without those beyond the ends of answers."""

    tau: float
    tau_low: float | None  # ends of intervals are null with one conversation, and without conversations
    tau_high: float | None
    accept_rate: float
    node_accept_rate: float
    cycles: int
    accepted: int
    histogram: list[int]  # verify cycles that accepted i draft tokens; a server's own counts those beyond the end too
    engine: dict[str, Any]  # the engine's own figures, by its names


class RequestRow(Record):
    """A request, or an answer of the torch engine."""

    repeat: int  # from 0, as `turn`
    id: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    cycles: int | None  # verify passes; null of plain decoding, and where the engine's figures don't add up
    accepted: int | None  # draft tokens
    finish_reason: str | None
    failed: str | None  # the reason
    ttft_s: float | None  # of the torch engine prompt by prompt: the prefill
    tpot_s: float | None
    e2e_s: float | None
    wait_s: float
    answer: str | None  # a digest of the answer's ids, or of its text
    correct: bool | None  # null if not graded
    divergence_margin: float | None = None  # between the target's two best logits where it parts from plain decoding's

    @property
    def decoding_s(self) -> float:
        """Return the seconds from the first token to the last of an answered request."""
        assert self.e2e_s is not None and self.ttft_s is not None, "an answered request has times"
        return self.e2e_s - self.ttft_s


class Speedup(Record):
    """A speedup and its 95% interval; null without one: with one prompt, or one repeat of a load."""

    speedup: float
    speedup_low: float | None
    speedup_high: float | None

    @property
    def half_width(self) -> float | None:
        """Return half of the interval as a share of the speedup; None without one."""
        if self.speedup_low is None or self.speedup_high is None:
            return None
        return (self.speedup_high - self.speedup_low) / 2 / self.speedup


class GradeSummary(Record):
    """How many of one or more answers were graded and are right."""

    graded: int
    correct: int
    accuracy: float  # the share of right ones
    how: str  # the method

    @classmethod
    def of_marks(cls, marks: list[bool], how: str) -> Self:
        return cls(graded=len(marks), correct=sum(marks), accuracy=sum(marks) / len(marks), how=how)


class LoadPoint(Record):
    """One load of an engine, repeated."""

    max_new_tokens: int
    concurrency: int | None
    request_rate: float | str | None  # requests/s, or "inf"
    loads: list[LoadSummary]  # of each repeat
    acceptance: Acceptance | None  # null without a draft
    quality: GradeSummary | None  # null if not graded
    requests: list[RequestRow]  # of all repeats
    warnings: list[str]  # sentences
    in_turns: Speedup | None = None  # of answers decoded both ways in turns; null of a load
    # CPU time of the torch engine's process / wall time; null on a GPU and of a server
    process_share: float | None = None
    stopping: StoppingRecord | None = None  # of a speedup over the cell's own baseline; null without one

    @property
    def load(self) -> Load:
        return Load(self.max_new_tokens, self.concurrency)

    @property
    def mean_throughput(self) -> float:
        """Return the output tokens/s over repeats."""
        return fmean(load.output_throughput for load in self.loads)

    def share_identical(self, other: "LoadPoint") -> float | None:
        """Return the share of identical answers among the requests that both have answered."""
        answers, others = (
            {(r.repeat, r.id, r.turn): r.answer for r in point.requests if not r.failed} for point in (self, other)
        )
        matches = [answers[key] == others[key] for key in answers.keys() & others.keys()]
        return fmean(matches) if matches else None


class ServerDescription(Record):
    """The server of a cell."""

    command: list[str] = Field(default_factory=list)  # empty for the torch engine, and for a server that was running
    info: dict[str, Any] = Field(default_factory=dict)  # what it reports of itself


class CellSetting(Record):
    """Where a cell was measured."""

    hardware: Hardware
    versions: dict[str, str]
    # what two cells must share: engine, version, flags but the draft's, prompts, GPU
    fingerprint: dict[str, Any] = Field(default_factory=dict)
    draft_sampling: DraftSampling = GREEDY
    server: ServerDescription = ServerDescription()
    memory: Memory = Memory()
    draft: DraftSize | None = None  # null but where the torch engine decodes prompt by prompt


class Cell(CellSetting):
    """A measured cell, or one that the engine can't run."""

    workload: str
    checkpoint: str | None  # null of a baseline, as the tree
    tree: str | None
    engine: str
    status: str
    reason: str | None = None  # why the engine can't run it, or it is not worth a measurement; there are then no points
    definitions: str = DEFINITIONS
    temperature: float
    top_p: float
    top_k: int | None  # null: all tokens
    seed: int
    points: list[LoadPoint] = Field(default_factory=list)
    # of plain decoding, where the cell measured its own in turns
    baseline_points: list[LoadPoint] = Field(default_factory=list)
    seconds: float
    gpus: list[str]
    joules: float | None  # null if the GPUs don't count their energy

    @property
    def shape(self) -> TreeShape:
        assert self.tree, "a baseline has no tree"
        return parse_shape(self.tree)

    @property
    def name(self) -> str:
        """Return the name of the cell among its engine's: eval-e009-t8_2_16, eval-baseline."""
        return name_cell(self.workload, self.checkpoint, self.tree)

    @property
    def full_name(self) -> str:
        """Return the name of the cell among those of all engines: sglang-eval-e009-t8_2_16, of the torch engine as `name`."""
        return f"{self.engine}-{self.name}" if self.is_served else self.name

    @property
    def stage(self) -> str:
        """Return the DVC stage that makes the cell."""
        return name_stage(self.engine, self.workload, self.checkpoint, self.tree)

    @property
    def is_served(self) -> bool:
        return not is_in_process(self.engine)

    @property
    def in_turns(self) -> bool:
        """Return whether the torch engine decoded each prompt both ways, one at a time."""
        return bool(self.points and self.points[0].in_turns)

    @property
    def memory_sum(self) -> float | None:
        """Return the GiB of weights, draft and KV cache; None if one of them is unknown."""
        memory = self.memory
        parts = [memory.weights, memory.kv_cache, *([memory.draft] if self.checkpoint else [])]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def write(self) -> Path:
        """Write the cell and return its path."""
        path = locate_cell(self.engine, self.workload, self.checkpoint, self.tree)
        atomic.write_json(path, self.model_dump())
        return path

    @classmethod
    def read(cls, engine: str, workload: str, checkpoint: str | None = None, tree: str | None = None) -> Self:
        """Read the cell of these names.

        Raises:
            ValueError: naming the file and the stage to run, if it is missing, incomplete, of other definitions or another cell.
        """
        names = workload, checkpoint, tree
        path, stage = locate_cell(engine, *names), name_stage(engine, *names)
        cell = cls.read_json(path, stage, DEFINITIONS)
        if (cell.engine, cell.workload, cell.checkpoint, cell.tree) != (engine, *names):
            raise atomic.BrokenArtifactError(f"{path} holds the cell {cell.name}", atomic.format_rerun_hint(stage))
        return cell


def name_configuration(checkpoint: str | None, tree: str | None) -> str:
    """Return the name of a server configuration, as in base_urls of its engine's servers."""
    return f"{checkpoint}-{tree}" if checkpoint else "baseline"


def name_cell(workload: str, checkpoint: str | None, tree: str | None) -> str:
    return f"{workload}-{name_configuration(checkpoint, tree)}"


def name_stage(engine: str, workload: str, checkpoint: str | None, tree: str | None) -> str:
    """Return the DVC stage that makes a cell."""
    if is_in_process(engine):
        return f"benchmark@{name_cell(workload, checkpoint, tree)}"
    if checkpoint is None:
        return f"benchmark_served_baseline@{engine}-{workload}"
    return f"benchmark_served@{engine}-{name_cell(workload, checkpoint, tree)}"


def locate_cell(engine: str, workload: str, checkpoint: str | None, tree: str | None) -> Path:
    return CELLS_FOLDER / engine / f"{name_cell(workload, checkpoint, tree)}.json"


def describe_hardware(device: str, num_threads: int, num_gpus_total: int = 1) -> Hardware:
    """Return the machine in comparable words: processor, cores, threads used, GPU, how many if several; never a host name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = f"{names[0]}, {len(names)} cores" if names else model
    found: Hardware = {
        "cpu": model, "threads": num_threads, "system": platform.system(), "python": platform.python_version(),
    }  # fmt: skip
    if device.startswith("cuda"):
        import torch  # only here, since reports read cells without torch

        found["gpu"] = torch.cuda.get_device_name(device)
    if num_gpus_total > 1:
        found["num_gpus_total"] = num_gpus_total
    return found


def list_versions(*packages: str) -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
