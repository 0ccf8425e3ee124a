"""Records of results/train/NAME.json that the report shows: a checkpoint's training, or its import."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from stages.cells.record import Record
from stages.runtime import atomic

OVERFITS = 0.99  # of the best accept length: a later epoch below it is worse by more than chance moves one draft


class HeldOutScores(Record, extra="ignore"):
    """On eval answers, which are not learned (families/held_out.py)."""

    loss: float
    accuracy: float
    accept_length: float | None
    answers: int


class TrainingEpoch(Record, extra="ignore"):
    loss: float
    step_accuracy: list[float]
    tokens: int
    seconds: float
    held_out: HeldOutScores | None = None


class DraftReport(Record, extra="ignore"):
    weights: str  # digest of the draft's


class ImportReport(DraftReport, extra="ignore"):
    method: str = "eagle3"  # as train_draft's segments have it
    num_drafts: int | None = None  # of a block; None for EAGLE-3


class TrainingReport(DraftReport, extra="ignore"):
    from_: str = Field(alias="from")  # the checkpoint that it continues
    epochs: list[TrainingEpoch]
    seconds: float
    few_steps: str | None = None  # that it took too few, and the key to change


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


class HeldOutCurve(NamedTuple):
    """The accept length after each epoch from the start of a chain of checkpoints to one of them."""

    name: str
    epochs: list[int]
    accept_lengths: list[float]
    answers: int

    def describe(self) -> str:
        """Return which epoch is best, by how much, and from which on the draft overfits."""
        best = max(range(len(self.epochs)), key=lambda i: self.accept_lengths[i])
        found = f"{self.name}: best after epoch {self.epochs[best]}, {self.accept_lengths[best]:.2f} tokens a cycle"
        if best < len(self.epochs) - 1:
            found += f"; {self.accept_lengths[-1]:.2f} after its last, {self.epochs[-1]}"
            if max(self.accept_lengths[best + 1 :]) < OVERFITS * self.accept_lengths[best]:
                found += f": it overfits from epoch {self.epochs[best + 1]} on"
        return found


def list_held_out(trained: Mapping[str, TrainingReport]) -> Iterator[HeldOutCurve]:
    """Yield the curve of each checkpoint that no other continues, if its epochs were scored."""
    for name in trained.keys() - {report.from_ for report in trained.values()}:
        chain = [name]
        while (parent := trained[chain[0]].from_) in trained:
            chain.insert(0, parent)
        epochs = [epoch for link in chain for epoch in trained[link].epochs]
        scored = [(n, x.held_out) for n, x in enumerate(epochs, 1) if x.held_out and x.held_out.accept_length]
        if scored:
            lengths = [x.accept_length or 0.0 for _, x in scored]
            yield HeldOutCurve(name, [n for n, _ in scored], lengths, scored[-1][1].answers)
