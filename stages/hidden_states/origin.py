"""Record in `origin.json` which split and which target hidden states belong to.

Without it two targets of one shape, say one trained from two seeds, would look alike, and a draft could be measured
against answers that its target never gave.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from stages.runtime import atomic
from stages.target import manifest
from stages.target.manifest import TargetManifest

ORIGIN_FILE, EXTRACTING_STAGE = "origin.json", "extract_hiddens"
SAMPLED_END_BYTES = 1 << 20  # digested at the start and at the end of each weight file


def write_origin(folder: Path, split: str, target: TargetManifest) -> None:
    atomic.write_json(folder / ORIGIN_FILE, {"split": split, "model": target.model, "target": digest_target(target)})


def check_origin(folder: Path, split: str, target: TargetManifest) -> None:
    """Raise ValueError where a folder's hidden states are another split's or another target's."""
    found = atomic.read_json(folder / ORIGIN_FILE, EXTRACTING_STAGE)
    again = f"run: dvc repro -f -s {EXTRACTING_STAGE}"
    if found.get("split") != split:
        raise ValueError(f"{folder} holds the split {found.get('split')}, expected {split}; {again}")
    if found.get("target") != digest_target(target):
        raise ValueError(
            f"{folder} holds hidden states of another target, {found.get('model')} ({found.get('target')!s:.12}), expected "
            f"those of {target.model} as it is in {manifest.TARGET_FOLDER} now ({digest_target(target):.12}); {again}"
        )


def digest_target(target: TargetManifest) -> str:
    """Return a digest of the target's manifest and of its weight files' names, sizes and ends.

    A digest of all weights would take as long as loading a large target. Hidden states don't depend on the scale of logits.
    """
    known = {name: value for name, value in asdict(target).items() if name != "logits_scale"}
    total = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for path in sorted(manifest.resolve_weights_folder(target).glob("*.safetensors")):
        size = path.stat().st_size
        total.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            total.update(file.read(SAMPLED_END_BYTES))
            file.seek(max(0, size - SAMPLED_END_BYTES))
            total.update(file.read(SAMPLED_END_BYTES))
    return total.hexdigest()
