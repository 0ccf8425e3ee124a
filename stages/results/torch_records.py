"""The cell of a workload that the torch engine decodes prompt by prompt (benchmark -> report): one JSON file.

A cell holds every metric, the name of its definitions, and what it was measured on. Readers list the cells by params.yaml,
not by what lies in the folder: cells that were removed from params.yaml stay on disk.
"""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.results.record import Record
from stages.runtime import atomic

CELLS_FOLDER = Path("results/cells")
DEFINITIONS = "docs/metrics.md, version 3"


class CellMetrics(Record):
    """The metrics of a cell, as docs/metrics.md defines them; latencies are means over answers."""

    tau: float
    tau_low: float | None  # ends of intervals are null with one conversation
    tau_high: float | None
    accept_rate: float
    node_accept_rate: float
    prefill_latency_s: float
    e2e_latency_s: float
    output_tok_s: float
    baseline_output_tok_s: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    identical_share: float | None  # null above temperature 0


class PromptRow(Record):
    """An answer."""

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
    correct: bool | None  # null if not graded
    prefill_latency_s: float
    e2e_latency_s: float
    baseline_output_tokens: int
    baseline_prefill_latency_s: float
    baseline_e2e_latency_s: float
    baseline_correct: bool | None


class TorchCell(Record):
    """A cell of `benchmark`."""

    workload: str
    checkpoint: str
    tree: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    engine: str
    definitions: str
    temperature: float
    top_p: float
    top_k: int | None  # null: all tokens
    metrics: CellMetrics
    histogram: list[int]  # verify cycles that accepted i draft tokens
    prompts: list[PromptRow]
    hardware: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    seed: int
    gpus: list[str]
    joules: float | None  # null if the GPUs don't count their energy
    repeats: list[dict[str, float]]  # speeds and speedup of each repeat, named as in CellMetrics
    quality: dict[str, Any] | None  # {plain, speculative: {graded, correct, accuracy, how}}; null if not graded


METRICS, PROMPT_COLUMNS, CELL_KEYS = CellMetrics.list_keys(), PromptRow.list_keys(), TorchCell.list_keys()


def locate_torch_cell(workload: str, checkpoint: str, tree: str) -> Path:
    return CELLS_FOLDER / f"{workload}-{checkpoint}-{tree}.json"


def write_torch_cell(cell: dict[str, Any]) -> Path:
    """Write a cell and return its path."""
    TorchCell.check(cell)
    place = locate_torch_cell(cell["workload"], cell["checkpoint"], cell["tree"])
    atomic.write_json(place, cell)
    return place


def read_torch_cell(workload: str, checkpoint: str, tree: str) -> dict[str, Any]:
    """Return a cell.

    Raises:
        ValueError: naming the file and the command to run, if it is missing, incomplete or of other definitions.
    """
    place = locate_torch_cell(workload, checkpoint, tree)
    stage = f"benchmark@{workload}-{checkpoint}-{tree}"
    cell = atomic.read_json(place, made_by=stage)
    if missing := set(CELL_KEYS) - set(cell):
        raise ValueError(
            f"{place} lacks {sorted(missing)}; it was cut or written by another version: dvc repro -f -s {stage}"
        )
    check_definitions(place, cell["definitions"], stage)
    return cell


def check_definitions(place: Path, found: str, stage: str) -> None:
    """Raises ValueError if a file of results was measured by other definitions."""
    if found != DEFINITIONS:
        raise ValueError(f"{place} is measured by {found}, expected {DEFINITIONS}; run: dvc repro -f -s {stage}")


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
