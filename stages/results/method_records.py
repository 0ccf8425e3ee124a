"""The cell of a row of the table of methods (benchmark_methods -> report): a method beside plain decoding of the same prompts.

It lies in results/cells/ with the cells of the other benchmark stages, since the report depends on the folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from stages.results import torch_records
from stages.results.record import Record
from stages.results.torch_records import Cell, MethodMetrics, MethodPromptRow, RepeatSpeeds, StoppingRecord
from stages.runtime import atomic


class MethodMemory(Record):
    """Bytes beside the target's own."""

    weights: int
    state: int  # kept between cycles


class MethodCell(Cell):
    """A cell of `benchmark_methods`."""

    row: str
    method: str
    settings: dict[str, Any]
    num_steps: int  # the most drafts that a cycle accepts
    metrics: MethodMetrics
    histogram: list[int]
    repeats: list[RepeatSpeeds] = Field(default_factory=list)  # empty in cells measured before methods were repeated
    prompts: list[MethodPromptRow]
    stopping: StoppingRecord | None = None  # null in the same
    memory: MethodMemory
    parameters: int  # trained
    mixture: bool  # the target is a mixture of experts
    model: str

    @property
    def process_share(self) -> float | None:
        """Return the CPU time of the process as a share of the wall time of all answers; None on a GPU."""
        return torch_records.compute_process_share(self.prompts)


METHOD_METRICS, METHOD_PROMPT_COLUMNS = MethodMetrics.list_keys(), MethodPromptRow.list_keys()


def name_method_stage(row: str, checkpoint: str | None) -> str:
    """Return the DVC stage that makes a cell."""
    return f"benchmark_methods{'' if checkpoint else '_baseline'}@{row}"


def locate_method_cell(row: str) -> Path:
    return torch_records.CELLS_FOLDER / f"method-{row}.json"


def write_method_cell(cell: Mapping[str, Any]) -> None:
    """Write a cell, which must be a MethodCell."""
    MethodCell.check(cell)
    atomic.write_json(locate_method_cell(cell["row"]), cell)


def read_method_cell(row: str, stage: str) -> MethodCell:
    """Read the cell of a row. Raises ValueError as `Cell.read_cell`."""
    return MethodCell.read_cell(locate_method_cell(row), stage, row=row)
