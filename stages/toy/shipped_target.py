"""The embedded target whose weights are part of the repository, so that every machine decodes the same one.

    python -m stages.toy.shipped_target     # trains it again by the settings of training.json, a minute or two

The folder holds what `save_pretrained` writes, and training.json. Training on another kind of CPU gives other weights of the
same loss, since sums round otherwise there.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stages.params.target_sections import TARGETS_FOLDER, PrepareTarget
from stages.target import manifest
from stages.toy import text_targets

NAME = "weather-tiny"
RECORD_NAME = "training.json"
LAST_STEPS = 20  # of the recorded loss


@dataclass(frozen=True)
class TrainingRecord:
    """Settings, loss and digests of the shipped weights."""

    settings: dict[str, float]  # the keys of prepare_target in params.yaml that decide what is trained
    loss: float  # mean of the last LAST_STEPS steps
    weights_digest: str  # sha256, as in target.json
    corpus_digest: str  # sha256 of the training texts


def read_record() -> TrainingRecord:
    return TrainingRecord(**json.loads((TARGETS_FOLDER / NAME / RECORD_NAME).read_text(encoding="utf-8")))


def copy_files(name: str, wanted: PrepareTarget, folder: Path) -> None:
    """Copy the shipped target of this name into `folder`. Raises ValueError for another target, settings or weights."""
    if name != NAME:
        raise ValueError(
            f"params.yaml: prepare_target.weights is shipped, expected target builtin/{NAME}, found builtin/{name}, which is not "
            "shipped; set prepare_target.weights: train"
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
        raise ValueError(
            f"{source} does not hold the weights of its {RECORD_NAME}; restore it (git checkout {source}), or set "
            "prepare_target.weights: train"
        )
    for file in source.iterdir():
        if file.name != RECORD_NAME:
            shutil.copyfile(file, folder / file.name)


def digest_corpus(seed: int) -> str:
    texts = text_targets.render_conversations(text_targets.make_corpus(seed))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def train_anew(settings: dict[str, Any], folder: Path) -> TrainingRecord:
    """Train and save the target in `folder` -> the record of it, which is written there too."""
    torch.set_num_threads(1)
    model, tokenizer, training = text_targets.start_training(NAME, **settings)
    losses = [loss for _, loss in tqdm(training, "train the target", settings["steps"])]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loss = sum(losses[-LAST_STEPS:]) / LAST_STEPS
    weights = manifest.digest_files(folder, manifest.WEIGHTS)
    record = TrainingRecord(settings, loss, weights, digest_corpus(settings["seed"]))
    (folder / RECORD_NAME).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    print(train_anew(read_record().settings, TARGETS_FOLDER / NAME))
