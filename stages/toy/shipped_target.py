"""The embedded target whose weights are part of the repository, so that every machine decodes the same one.

The folder holds what `save_pretrained` writes, and training.json: prepare_target makes it again by these settings, one thread
and prepare_target.weights: train, in a minute or two; on another kind of CPU with other weights of the same loss, since sums
round otherwise there.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from stages.params.target_sections import TARGETS_FOLDER, PrepareTarget
from stages.target import manifest

NAME = "weather-tiny"
RECORD_NAME = "training.json"


@dataclass(frozen=True)
class TrainingRecord:
    """Settings, loss and digests of the shipped weights."""

    settings: dict[str, float]  # the keys of prepare_target in params.yaml that decide what is trained
    loss: float  # mean of the last 20 steps
    weights_digest: str  # sha256, as in target.json
    corpus_digest: str  # sha256 of the training texts


def read_record() -> TrainingRecord:
    return TrainingRecord(**json.loads((TARGETS_FOLDER / NAME / RECORD_NAME).read_text(encoding="utf-8")))


def copy_files(name: str, wanted: PrepareTarget, folder: Path) -> None:
    """Copy the shipped target of this name into `folder`. Raises ValueError for another target, settings or weights."""
    if name != NAME:
        raise ValueError(
            f"params.yaml: prepare_target.weights is shipped, expected builtin/{NAME}, found builtin/{name}; set train"
        )
    record = read_record()
    for key, shipped in record.settings.items():
        if getattr(wanted, key) != shipped:
            raise ValueError(
                f"params.yaml: prepare_target.{key} is {getattr(wanted, key)}, expected that of the shipped weights, {shipped}; "
                "correct it, or set prepare_target.weights: train"
            )
    source = TARGETS_FOLDER / name
    if manifest.digest_files(source, manifest.WEIGHTS) != record.weights_digest:
        raise ValueError(f"{source} does not hold the weights of its {RECORD_NAME}; restore it (git checkout {source})")
    for file in source.iterdir():
        if file.name != RECORD_NAME:
            shutil.copyfile(file, folder / file.name)
