"""A benchmark cell on disk: one JSON file with every number, its definition's name, and what it was measured on.

Cells are lists in params.yaml, never a glob: removed cells stay on disk (research/dvc_prefect.md, 1).
"""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.runtime import atomic

CELLS_FOLDER = Path("results/cells")
DEFINITIONS = "docs/metrics.md, version 3"

# Every metric a cell must carry; docs/metrics.md defines each. Seconds are the means over prompts; `identical_share` is null
# above temperature 0, and the ends of intervals are null where one conversation was asked.
METRICS = (
    "tau", "tau_low", "tau_high", "accept_rate", "node_accept_rate", "prefill_latency_s", "e2e_latency_s",
    "output_tok_s", "baseline_output_tok_s", "speedup", "speedup_low", "speedup_high", "identical_share",
)  # fmt: skip
# One row per answer, of each prompt, turn and repeat (both from 0): counts are integers, `accepted` the drafts accepted in
# it, `cycles` its verify passes, `identical` null above temperature 0, `divergence_margin` the gap between the target's two
# best logits where the two answers part, null where they don't, `correct` null where nothing is graded.
PROMPT_COLUMNS = (
    "id", "repeat", "turn", "prompt_tokens", "output_tokens", "cycles", "accepted", "identical", "divergence_margin",
    "finish_reason", "correct", "prefill_latency_s", "e2e_latency_s",
    "baseline_output_tokens", "baseline_prefill_latency_s", "baseline_e2e_latency_s", "baseline_correct",
)  # fmt: skip
CELL_KEYS = (
    "workload", "checkpoint", "tree", "num_steps", "topk", "num_draft_tokens", "engine", "definitions", "temperature", "top_p",
    "top_k",  # null: all
    "metrics", "histogram", "prompts", "hardware", "versions", "seconds", "seed",
    "gpus", "joules",  # of the cell's GPUs: their names, and what they took meanwhile; null where they don't count it
    "repeats",  # of each the speeds and the speedup, by the names of METRICS
    "quality",  # {plain, speculative: {graded, correct, accuracy, how}}; null where nothing is graded
)  # fmt: skip


def locate_torch_cell(workload: str, checkpoint: str, tree: str) -> Path:
    return CELLS_FOLDER / f"{workload}-{checkpoint}-{tree}.json"


def write_torch_cell(cell: dict[str, Any]) -> Path:
    """`histogram[i]` counts the verify cycles that accepted i drafts; returns where the cell lies."""
    assert set(cell) == set(CELL_KEYS), f"cell keys {sorted(cell)} are not {sorted(CELL_KEYS)}"
    assert set(cell["metrics"]) == set(METRICS), sorted(cell["metrics"])
    assert all(set(row) == set(PROMPT_COLUMNS) for row in cell["prompts"])
    place = locate_torch_cell(cell["workload"], cell["checkpoint"], cell["tree"])
    atomic.write_json(place, cell)
    return place


def read_torch_cell(workload: str, checkpoint: str, tree: str) -> dict[str, Any]:
    """Raises ValueError naming the file and what to run, where the cell is missing, not whole or of another definition."""
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
    """Raises ValueError where a file of results was measured by the definitions of another version."""
    if found != DEFINITIONS:
        raise ValueError(f"{place} is measured by {found}, expected {DEFINITIONS}; run: dvc repro -f -s {stage}")


def describe_hardware(device: str, num_threads: int) -> dict[str, Any]:
    """The machine, in words that compare: processor, cores, threads used, GPU. Never a host name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{names[0]}, {len(names)} cores" if names else model
    words = {"cpu": model, "threads": num_threads, "system": platform.system(), "python": platform.python_version()}
    if device.startswith("cuda"):
        import torch  # only where there is a GPU to name: reports read cells without torch

        words["gpu"] = torch.cuda.get_device_name(device)
    return words


def list_versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}
