"""The cell of a workload that the torch engine decodes prompt by prompt (benchmark -> report): one JSON file.

A cell holds every metric, the name of its definitions, and what it was measured on. Readers list the cells by params.yaml,
not by what lies in the folder: cells that were removed from params.yaml stay on disk.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from stages.params.tree_shape import TreeShape
from stages.results.record import Record
from stages.runtime import atomic

CELLS_FOLDER = Path("results/cells")
DEFINITIONS = "docs/metrics.md, version 3"


class Cell(Record):
    """The keys that cells of all benchmark stages have: names, sampling, machine and cost."""

    workload: str
    checkpoint: str | None
    engine: str
    definitions: str
    temperature: float
    top_p: float
    top_k: int | None  # null: all tokens
    hardware: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    seed: int
    gpus: list[str]
    joules: float | None  # null if the GPUs don't count their energy

    @classmethod
    def read_cell(cls, place: Path, stage: str, **names: str | None) -> Self:
        """Read the cell of these names.

        Raises:
            ValueError: naming the file and the stage to run, if it is missing, incomplete, of other definitions or another cell.
        """
        cell = cls.read_json(place, stage, DEFINITIONS)
        if any(cell[key] != name for key, name in names.items()):
            held = "-".join(cell[key] or "baseline" for key in names)
            raise atomic.Broken(f"{place} holds the cell {held}", atomic.rerun(stage))
        return cell


class TreeCell(Cell):
    """A cell of one tree; without one it is a baseline."""

    tree: str | None
    num_steps: int | None
    topk: int | None
    num_draft_tokens: int | None

    @property
    def shape(self) -> TreeShape:
        assert self.num_steps and self.topk and self.num_draft_tokens, "a baseline has no tree"
        return TreeShape(self.num_steps, self.topk, self.num_draft_tokens)


class MethodMetrics(Record):
    """The metrics of a method, as docs/metrics.md defines them; latencies are means over answers."""

    tau: float
    tau_low: float | None  # ends of intervals are null with one conversation
    tau_high: float | None
    accept_rate: float
    prefill_latency_s: float
    e2e_latency_s: float
    output_tok_s: float
    baseline_output_tok_s: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    identical_share: float | None  # null above temperature 0


class CellMetrics(MethodMetrics):
    """The metrics of a tree. A method's drafts need not be nodes: lookahead's window tokens are not there to be accepted."""

    node_accept_rate: float


class MethodPromptRow(Record):
    """An answer; methods decode each prompt once, and are not graded."""

    id: str
    prompt_tokens: int
    output_tokens: int
    cycles: int  # verify passes
    accepted: int  # draft tokens
    identical: bool | None  # null above temperature 0
    finish_reason: str
    prefill_latency_s: float
    e2e_latency_s: float
    baseline_output_tokens: int
    baseline_prefill_latency_s: float
    baseline_e2e_latency_s: float


class PromptRow(MethodPromptRow):
    """An answer of a cell of `benchmark`."""

    repeat: int  # from 0, as `turn`
    turn: int
    divergence_margin: float | None  # between the target's two best logits where the answers part; null if they don't
    correct: bool | None  # null if not graded
    baseline_correct: bool | None


class TorchCell(TreeCell):
    """A cell of `benchmark`."""

    checkpoint: str
    tree: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    metrics: CellMetrics
    histogram: list[int]  # verify cycles that accepted i draft tokens
    prompts: list[PromptRow]
    repeats: list[dict[str, float]]  # speeds and speedup of each repeat, named as in CellMetrics
    quality: dict[str, Any] | None  # {plain, speculative: {graded, correct, accuracy, how}}; null if not graded


METRICS, PROMPT_COLUMNS, CELL_KEYS = CellMetrics.list_keys(), PromptRow.list_keys(), TorchCell.list_keys()


def locate_torch_cell(workload: str, checkpoint: str, tree: str) -> Path:
    return CELLS_FOLDER / f"{workload}-{checkpoint}-{tree}.json"


def write_torch_cell(cell: Mapping[str, Any]) -> Path:
    """Write a cell, which must be a TorchCell, and return its path."""
    TorchCell.check(cell)
    place = locate_torch_cell(cell["workload"], cell["checkpoint"], cell["tree"])
    atomic.write_json(place, cell)
    return place


def read_torch_cell(workload: str, checkpoint: str, tree: str) -> TorchCell:
    """Read a cell. Raises ValueError as `Cell.read_cell`."""
    names = {"workload": workload, "checkpoint": checkpoint, "tree": tree}
    stage = f"benchmark@{workload}-{checkpoint}-{tree}"
    return TorchCell.read_cell(locate_torch_cell(workload, checkpoint, tree), stage, **names)


def describe_hardware(device: str, num_threads: int) -> dict[str, Any]:
    """Return the machine in comparable words: processor, cores, threads used, GPU; never a host name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{names[0]}, {len(names)} cores" if names else model
    hardware = {"cpu": model, "threads": num_threads, "system": platform.system(), "python": platform.python_version()}
    if device.startswith("cuda"):
        import torch  # only here, since reports read cells without torch

        hardware["gpu"] = torch.cuda.get_device_name(device)
    return hardware


def list_versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}
