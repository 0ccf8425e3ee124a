"""What a stage may open: what dvc.yaml declares for it, and its inputs."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

# What a parameter names: its bytes are in the stage's inputs.
NAMED = ("data/tables", "templates", "draft_configs", "data/prompt_sets")
GATE = "results/train/e000.overfit.json"
PART = re.compile(r"\.([^/]+)\.\d+\.part\b")  # what stages/runtime/atomic.py writes before it is in its place


def undeclared(opened: Iterable[str], stage: dict[str, Any], besides: Iterable[str] = ()) -> list[str]:
    """Return the opened files that are neither params.yaml nor in a dependency or output of `stage`, nor in `besides`.

    GATE is read by train_draft to refuse, never to compute: as a dependency, another draft's refusal would retrain all.

    `stage` is an entry of dvc.yaml, whose ${...} stand for any name, or of dvc.lock.
    """
    entries = [entry for kind in ("deps", "outs", "metrics") for entry in stage.get(kind, [])]
    paths = [entry if isinstance(entry, str) else entry.get("path") or next(iter(entry)) for entry in entries]
    patterns = [
        re.sub(r"\$\{[^}]*\}", "*", path)
        for path in [*paths, "params.yaml", "artifacts/inputs", GATE, *NAMED, *besides]
    ]
    return [file for file in opened if not any(_in(PART.sub(r"\1", file), pattern) for pattern in patterns)]


def _in(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern) or fnmatchcase(file, f"{pattern}/*")
