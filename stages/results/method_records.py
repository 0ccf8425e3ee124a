"""A row of the table of methods on disk: what one method did with a workload, beside plain decoding of the same prompts.

In results/cells/, beside benchmark's and benchmark_served's, since the report depends on the folder.
"""

from pathlib import Path
from typing import Any

from stages.results import torch_records
from stages.runtime import atomic

METHOD_CELL_KEYS = (
    "row", "method", "checkpoint", "settings", "workload", "engine", "definitions", "temperature", "top_p", "top_k", "metrics",
    "histogram", "prompts", "memory", "parameters", "mixture", "model", "hardware", "versions", "seconds", "seed",
    "gpus", "joules",
)  # fmt: skip
# As cell.METRICS, but for a share of nodes: what a window's nodes are for isn't to be accepted.
METHOD_METRICS = tuple(name for name in torch_records.METRICS if name != "node_accept_rate")
METHOD_PROMPT_COLUMNS = (
    "id", "prompt_tokens", "output_tokens", "cycles", "accepted", "identical", "finish_reason", "prefill_latency_s",
    "e2e_latency_s", "baseline_output_tokens", "baseline_prefill_latency_s", "baseline_e2e_latency_s",
)  # fmt: skip


def locate_method_cell(row: str) -> Path:
    return torch_records.CELLS_FOLDER / f"method-{row}.json"


def write_method_cell(found: dict[str, Any]) -> Path:
    """`memory` has the bytes of weights and state; `parameters` are trained, `mixture` says whether the target has experts."""
    assert set(found) == set(METHOD_CELL_KEYS), sorted(set(found) ^ set(METHOD_CELL_KEYS))
    assert set(found["metrics"]) == set(METHOD_METRICS) and set(found["memory"]) == {"weights", "state"}
    assert all(set(row) == set(METHOD_PROMPT_COLUMNS) for row in found["prompts"])
    place = locate_method_cell(found["row"])
    atomic.write_json(place, found)
    return place


def read_method_cell(row: str, stage: str) -> dict[str, Any]:
    """Raises ValueError naming the file and what to run, where the row is missing, cut or another's."""
    place = locate_method_cell(row)
    found: dict[str, Any] = atomic.read_json(place, made_by=stage)
    again = f"run: dvc repro -f -s {stage}"
    if missing := set(METHOD_CELL_KEYS) - set(found):
        raise ValueError(f"{place} lacks {sorted(missing)}; it was cut or written by another version; {again}")
    if found["row"] != row:
        raise ValueError(f"{place} holds the row {found['row']}; {again}")
    torch_records.check_definitions(place, found["definitions"], stage)
    return found
