"""The writer of `benchmark`'s cells: of prompts decoded one by one, of loads, and of trees that the draft can't grow.

All three share the keys of setup and cost. torch_records reads the first kind, served_records the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from stages.cells import served_records, torch_records
from stages.cells.record import name_draft_sampling
from stages.cells.served_records import LoadsMeasurement, ServerDescription, ServerMemory
from stages.cells.torch_records import Hardware, PromptRow, StageCost, TorchMeasurement, TorchQuality
from stages.grading import grade
from stages.params.tree_shape import parse_shape


class SampledWorkload(Protocol):
    """The sampling of a workload of params.yaml (stages/params/benchmark_sections.py)."""

    temperature: float
    top_p: float
    top_k: int | None
    seed: int


@dataclass(frozen=True)
class TorchCellSetup:
    """The names, sampling and hardware of a cell, known before anything is measured."""

    workload_name: str
    checkpoint: str
    tree: str
    workload: SampledWorkload
    hardware: Hardware


def write_measured(
    setup: TorchCellSetup, measured: TorchMeasurement | LoadsMeasurement, took: StageCost, samples_drafts: bool
) -> Path:
    """Write the cell of a measurement, prompt by prompt or in loads, and return its path."""
    workload, shape = setup.workload, parse_shape(setup.tree)
    cell = {
        "workload": setup.workload_name,
        "checkpoint": setup.checkpoint,
        "tree": setup.tree,
        **{key: getattr(shape, key) for key in ("num_steps", "topk", "num_draft_tokens")},
        "draft_sampling": name_draft_sampling(samples_drafts),
        "engine": served_records.TORCH_ENGINE,
        "definitions": torch_records.DEFINITIONS,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "top_k": workload.top_k,
        **measured.model_dump(),
        "hardware": setup.hardware,
        "versions": torch_records.list_versions("torch", "transformers"),
        "seed": workload.seed,
        **asdict(took),
    }
    if isinstance(measured, TorchMeasurement):
        return torch_records.write_torch_cell(cell)
    return served_records.write_served_cell(cell)


def write_unsupported(setup: TorchCellSetup, reason: str) -> Path:
    """Write the cell of a tree that the draft can't grow, and return its path.

    It is a ServedCell even if the workload is decoded prompt by prompt, since a TorchCell has no status and no reason. Nothing
    was measured: it has no points, and its memory is unknown.
    """
    measured = LoadsMeasurement(
        status=served_records.UNSUPPORTED,
        reason=reason,
        fingerprint={},
        server=ServerDescription(command=[], info={}),
        memory=ServerMemory(**dict.fromkeys(ServerMemory.list_keys())),
        points=[],
        baseline_points=[],
    )
    return write_measured(setup, measured, StageCost(0.0, [], None), samples_drafts=False)


def grade_rows(
    rows: Sequence[PromptRow],
    outputs: Sequence[Mapping[str, list[int]]],
    references: Mapping[str, str],
    decode_text: Callable[[list[int]], str],
    allow_unsandboxed_code: bool,
) -> TorchQuality:
    """Fill in `correct` and `baseline_correct` of first turns, and return the cell's `quality`.

    Args:
        rows: the cell's rows, at least one of a first turn.
        outputs: token ids of each row's answers, by kind of decoding.
        references: by prompt id.
    """

    def grade_output(row: PromptRow, ids: list[int]) -> bool:
        return grade.grade_answer(references[row.id], decode_text(ids), allow_unsandboxed_code)

    graded, plain, speculative = [], [], []
    for row, output in zip(rows, outputs, strict=True):
        if row.turn == 0:
            row.baseline_correct = grade_output(row, output["plain"])
            row.correct = grade_output(row, output["speculative"])
            graded.append(references[row.id])
            plain.append(row.baseline_correct)
            speculative.append(row.correct)
    return TorchQuality(
        plain=grade.summarise_grades(graded, plain), speculative=grade.summarise_grades(graded, speculative)
    )
