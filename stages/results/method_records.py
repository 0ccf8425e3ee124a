"""The cell of a row of the table of methods (benchmark_methods -> report): a method beside plain decoding of the same prompts.

It lies in results/cells/ with the cells of the other benchmark stages, since the report depends on the folder.
"""

from pathlib import Path
from typing import Any

from stages.results import torch_records
from stages.results.record import Record
from stages.runtime import atomic


class MethodMetrics(Record):
    """As `CellMetrics` without node_accept_rate: lookahead's window tokens are not there to be accepted."""

    tau: float
    tau_low: float | None
    tau_high: float | None
    accept_rate: float
    prefill_latency_s: float
    e2e_latency_s: float
    output_tok_s: float
    baseline_output_tok_s: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    identical_share: float | None


class MethodPromptRow(Record):
    """An answer, as `PromptRow`; methods decode each prompt once, and are not graded."""

    id: str
    prompt_tokens: int
    output_tokens: int
    cycles: int
    accepted: int
    identical: bool
    finish_reason: str
    prefill_latency_s: float
    e2e_latency_s: float
    baseline_output_tokens: int
    baseline_prefill_latency_s: float
    baseline_e2e_latency_s: float


class MethodMemory(Record):
    """Bytes beside the target's own."""

    weights: int
    state: int  # kept between cycles


class MethodCell(Record):
    """A cell of `benchmark_methods`."""

    row: str
    method: str
    checkpoint: str | None
    settings: dict[str, Any]
    workload: str
    engine: str
    definitions: str
    temperature: float
    top_p: float
    top_k: int | None
    metrics: MethodMetrics
    histogram: list[int]
    prompts: list[MethodPromptRow]
    memory: MethodMemory
    parameters: int  # trained
    mixture: bool  # the target is a mixture of experts
    model: str
    hardware: dict[str, Any]
    versions: dict[str, str]
    seconds: float
    seed: int
    gpus: list[str]
    joules: float | None


METHOD_CELL_KEYS, METHOD_METRICS = MethodCell.list_keys(), MethodMetrics.list_keys()
METHOD_PROMPT_COLUMNS = MethodPromptRow.list_keys()


def locate_method_cell(row: str) -> Path:
    return torch_records.CELLS_FOLDER / f"method-{row}.json"


def write_method_cell(found: dict[str, Any]) -> Path:
    """Write a cell and return its path."""
    MethodCell.check(found)
    place = locate_method_cell(found["row"])
    atomic.write_json(place, found)
    return place


def read_method_cell(row: str, stage: str) -> dict[str, Any]:
    """Return the cell of a row.

    Raises:
        ValueError: naming the file and the command to run, if it is missing, incomplete or another row's.
    """
    place = locate_method_cell(row)
    found: dict[str, Any] = atomic.read_json(place, made_by=stage)
    again = f"run: dvc repro -f -s {stage}"
    if missing := set(METHOD_CELL_KEYS) - set(found):
        raise ValueError(f"{place} lacks {sorted(missing)}; it was cut or written by another version; {again}")
    if found["row"] != row:
        raise ValueError(f"{place} holds the row {found['row']}; {again}")
    torch_records.check_definitions(place, found["definitions"], stage)
    return found
