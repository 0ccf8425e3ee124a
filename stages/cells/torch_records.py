"""The cell of a workload that the torch engine decodes prompt by prompt (benchmark -> report): one JSON file.

A cell holds every metric, the name of its definitions, and what it was measured on. Readers list the cells by params.yaml,
not by what lies in the folder: cells that were removed from params.yaml stay on disk.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

from stages.cells.record import GREEDY, DraftSampling, Record
from stages.grading.grade_summary import GradeSummary
from stages.params.tree_shape import TreeShape, parse_shape
from stages.runtime import atomic

CELLS_FOLDER = Path("results/cells")
DEFINITIONS = "docs/metrics.md, version 3"


Hardware = dict[str, str | int]  # cpu, threads, system, python, gpu, num_gpus_total; what is not known is left out


class Cell(Record):
    """The fields that cells of all benchmark stages share: what was measured, on which hardware and versions."""

    workload: str
    checkpoint: str | None
    engine: str
    definitions: str
    temperature: float
    top_p: float
    top_k: int | None  # null: all tokens
    hardware: Hardware
    versions: dict[str, str]
    seconds: float
    seed: int
    gpus: list[str]
    joules: float | None  # null if the GPUs don't count their energy

    @classmethod
    def read_cell(cls, path: Path, stage: str, **names: str | None) -> Self:
        """Read the cell of these names.

        Raises:
            ValueError: naming the file and the stage to run, if it is missing, incomplete, of other definitions or another cell.
        """
        cell = cls.read_json(path, stage, DEFINITIONS)
        if any(cell[key] != name for key, name in names.items()):
            held = "-".join(cell[key] or "baseline" for key in names)
            raise atomic.BrokenArtifactError(f"{path} holds the cell {held}", atomic.format_rerun_hint(stage))
        return cell


@dataclass(frozen=True)
class StageCost:
    """Time, GPUs and energy of a stage; the field names are keys of its cell."""

    seconds: float
    gpus: list[str]
    joules: float | None


class TreeCell(Cell):
    """A cell of one tree; without one it is a baseline."""

    tree: str | None
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None
    draft_sampling: DraftSampling = GREEDY  # cells measured before it was recorded have none; a baseline has no drafts

    @property
    def shape(self) -> TreeShape:
        assert self.tree, "a baseline has no tree"
        return parse_shape(self.tree)


class TreeAcceptanceRates(Record):
    """How many draft tokens the verify cycles accepted."""

    tau: float
    tau_low: float | None  # ends of intervals are null with one conversation, and without conversations
    tau_high: float | None
    accept_rate: float
    node_accept_rate: float


class CellMetrics(TreeAcceptanceRates):
    """Speculative decoding beside plain decoding of the same prompts; latencies are means over answers."""

    prefill_latency_s: float
    e2e_latency_s: float
    output_tok_s: float
    baseline_output_tok_s: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    identical_share: float | None  # null above temperature 0


class RepeatSpeeds(Record):
    """The speeds of one repeat."""

    output_tok_s: float
    baseline_output_tok_s: float
    speedup: float


class PromptRow(Record):
    """An answer of a cell of `benchmark`, decoded both ways."""

    id: str
    repeat: int  # from 0, as `turn`
    turn: int
    prompt_tokens: int
    output_tokens: int
    cycles: int  # verify passes
    accepted: int  # draft tokens
    identical: bool | None  # null above temperature 0
    divergence_margin: float | None  # between the target's two best logits where the answers part; null if they don't
    finish_reason: str
    prefill_latency_s: float
    e2e_latency_s: float
    correct: bool | None  # null if not graded
    baseline_output_tokens: int
    baseline_prefill_latency_s: float
    baseline_e2e_latency_s: float
    baseline_correct: bool | None
    process_s: float | None = None  # CPU time of this process meanwhile, of all threads; null on a GPU
    baseline_process_s: float | None = None


class TorchQuality(Record):
    """Grades of the first turns' answers."""

    plain: GradeSummary
    speculative: GradeSummary


class StoppingRecord(Record):
    """How many repeats a measurement took, and why no more."""

    repeats: int
    rule: Literal["repeats", "half_width", "most_repeats"]  # the key of the workload that ended it
    half_width: float | None  # of the speedup's interval, as a share of the speedup; null without an interval


class DraftSize(Record):
    """The memory and the parameters of a draft, beside the target's."""

    weights_bytes: int
    state_bytes: int  # kept between cycles
    draft_parameters: int


class TorchMeasurement(Record):
    """The measured part of a cell: prompts decoded one by one."""

    metrics: CellMetrics
    repeats: list[RepeatSpeeds]
    quality: TorchQuality | None  # null if not graded
    histogram: list[int]  # verify cycles that accepted i draft tokens
    prompts: list[PromptRow]
    stopping: StoppingRecord
    draft: DraftSize


class TorchCell(TorchMeasurement, TreeCell):
    """A cell of `benchmark`."""

    checkpoint: str
    tree: str
    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def process_share(self) -> float | None:
        """Return the CPU time of the process as a share of the wall time of all answers; None on a GPU."""
        return compute_process_share(self.prompts)

    @property
    def process_speedup(self) -> float | None:
        """Return the speedup by CPU time, which other processes on the machine hardly change; None on a GPU."""
        return compute_process_speedup(self.prompts)


METRICS, PROMPT_COLUMNS = CellMetrics.list_keys(), PromptRow.list_keys()


def name_torch_stage(workload: str, checkpoint: str, tree: str) -> str:
    """Return the DVC stage that makes a cell."""
    return f"benchmark@{workload}-{checkpoint}-{tree}"


def locate_torch_cell(workload: str, checkpoint: str, tree: str) -> Path:
    return CELLS_FOLDER / f"{workload}-{checkpoint}-{tree}.json"


def write_torch_cell(cell: Mapping[str, Any]) -> Path:
    """Write a cell, which must be a TorchCell, and return its path."""
    TorchCell.check(cell)
    path = locate_torch_cell(cell["workload"], cell["checkpoint"], cell["tree"])
    atomic.write_json(path, cell)
    return path


def read_torch_cell(workload: str, checkpoint: str, tree: str) -> TorchCell:
    """Read a cell. Raises ValueError as `Cell.read_cell`."""
    names = {"workload": workload, "checkpoint": checkpoint, "tree": tree}
    path = locate_torch_cell(workload, checkpoint, tree)
    return TorchCell.read_cell(path, name_torch_stage(workload, checkpoint, tree), **names)


def compute_process_share(rows: Sequence[PromptRow]) -> float | None:
    """Return CPU time / wall time of plain and other decoding together; None where an answer has no CPU time."""
    process_s = [row[name] for row in rows for name in ("process_s", "baseline_process_s")]
    wall_s = sum(row.e2e_latency_s + row.baseline_e2e_latency_s for row in rows)
    return None if None in process_s or not wall_s else sum(process_s) / wall_s


def compute_process_speedup(rows: Sequence[PromptRow]) -> float | None:
    """Return tokens per second of CPU time over those of plain decoding; None where an answer has no CPU time."""
    seconds = [row.process_s for row in rows if row.process_s]
    plain_seconds = [row.baseline_process_s for row in rows if row.baseline_process_s]
    if not len(seconds) == len(plain_seconds) == len(rows):
        return None
    tokens, plain_tokens = (sum(row[name] for row in rows) for name in ("output_tokens", "baseline_output_tokens"))
    return tokens / sum(seconds) / (plain_tokens / sum(plain_seconds))


def describe_hardware(device: str, num_threads: int, num_gpus_total: int = 1) -> Hardware:
    """Return the machine in comparable words: processor, cores, threads used, GPU, how many if several; never a host name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{names[0]}, {len(names)} cores" if names else model
    hardware: Hardware = {
        "cpu": model,
        "threads": num_threads,
        "system": platform.system(),
        "python": platform.python_version(),
    }
    if device.startswith("cuda"):
        import torch  # only here, since reports read cells without torch

        hardware["gpu"] = torch.cuda.get_device_name(device)
    if num_gpus_total > 1:
        hardware["num_gpus_total"] = num_gpus_total
    return hardware


def list_versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}
