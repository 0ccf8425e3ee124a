"""Records of results/train/NAME.json that the report shows: a checkpoint's training, or its import."""

from pathlib import Path

from pydantic import Field

from stages.cells.record import Record
from stages.runtime import atomic


class TrainingEpoch(Record, extra="ignore"):
    loss: float
    step_accuracy: list[float]
    tokens: int
    seconds: float


class DraftReport(Record, extra="ignore"):
    weights: str  # digest of the draft's


class ImportReport(DraftReport, extra="ignore"):
    method: str = "eagle3"  # as train_draft's segments have it
    num_drafts: int | None = None  # of a block; None for EAGLE-3


class TrainingReport(DraftReport, extra="ignore"):
    from_: str = Field(alias="from")  # the checkpoint that it continues
    epochs: list[TrainingEpoch]
    seconds: float


def read_import(checkpoint: str) -> ImportReport:
    return ImportReport.read_json(Path(f"results/train/{checkpoint}.json"), f"import_draft@{checkpoint}")


def read_training(checkpoint: str, parent: str) -> TrainingReport:
    """Return the report of a checkpoint trained from `parent`. Raises ValueError naming the file and the stage to run."""
    path, stage = Path(f"results/train/{checkpoint}.json"), f"train_draft@{checkpoint}"
    found = TrainingReport.read_json(path, stage)
    if found.from_ != parent:
        raise atomic.BrokenArtifactError(
            f"{path} starts from {found.from_}, expected {parent}", f"run: dvc repro {stage}"
        )
    return found
