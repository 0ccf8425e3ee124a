"""Whose hidden states these are: `origin.json` beside them names their split, and the target that they are of.

Two targets of one shape, say the same one trained from another seed, would otherwise pass for each other, and a draft be
measured against answers that its target never gave.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from stages.runtime import atomic
from stages.target import manifest
from stages.target.manifest import TargetManifest

ORIGIN_FILE, EXTRACTING_STAGE = "origin.json", "extract_hiddens"
SAMPLED_END_BYTES = (
    1 << 20
)  # bytes of each file of weights, at its beginning and its end, that tell it from others of its size


def write_origin(folder: Path, split: str, made: TargetManifest) -> None:
    atomic.write_json(folder / ORIGIN_FILE, {"split": split, "model": made.model, "target": digest_target(made)})


def check_origin(folder: Path, split: str, made: TargetManifest) -> None:
    """Raises ValueError where a folder's hidden states are another split's or another target's."""
    found = atomic.read_json(folder / ORIGIN_FILE, EXTRACTING_STAGE)
    again = f"run: dvc repro -f -s {EXTRACTING_STAGE}"
    if found.get("split") != split:
        raise ValueError(f"{folder} holds the split {found.get('split')}, expected {split}; {again}")
    if found.get("target") != digest_target(made):
        raise ValueError(
            f"{folder} holds hidden states of another target, {found.get('model')} ({found.get('target')!s:.12}), expected "
            f"those of {made.model} as it is in {manifest.TARGET_FOLDER} now ({digest_target(made):.12}); {again}"
        )


def digest_target(made: TargetManifest) -> str:
    """A name of the target: of its manifest, and of its weights the files' names, sizes and ends. A whole digest of a large
    target would take as long as loading it."""
    total = hashlib.sha256(json.dumps(asdict(made), sort_keys=True).encode())
    for path in sorted(manifest.resolve_weights_folder(made).glob("*.safetensors")):
        size = path.stat().st_size
        total.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            total.update(file.read(SAMPLED_END_BYTES))
            file.seek(max(0, size - SAMPLED_END_BYTES))
            total.update(file.read(SAMPLED_END_BYTES))
    return total.hexdigest()
