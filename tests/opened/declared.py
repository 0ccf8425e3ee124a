"""What a stage may open: what dvc.yaml declares for it, and its inputs."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

# What a parameter names: its bytes are in the stage's inputs.
NAMED = ("data/tables", "templates", "draft_configs", "data/prompt_sets")
GATE, SCORED = "results/train/e000.overfit.json", "data/hiddens/eval"
PART = re.compile(r"\.([^/]+)\.\d+\.part\b")  # what stages/runtime/atomic.py writes before it is in its place


def undeclared(opened: Iterable[str], stage: dict[str, Any], besides: Iterable[str] = ()) -> list[str]:
    """Return the opened files that are neither params.yaml nor in a dependency or output of `stage`, nor in `besides`.

    Train_draft reads GATE to refuse, and SCORED to say how well its epochs do, never to compute: as a dependency, another draft's
    refusal or another eval set would retrain all. `inputs` always runs, so it may read the graph.

    `stage` is an entry of dvc.yaml, whose ${...} stand for any name, or of dvc.lock.
    """
    entries = [entry for kind in ("deps", "outs", "metrics") for entry in stage.get(kind, [])]
    paths = [entry if isinstance(entry, str) else entry.get("path") or next(iter(entry)) for entry in entries]
    own = {"stages.train_draft": SCORED, "stages.inputs": "dvc.yaml"}
    always = ["params.yaml", "artifacts/inputs", GATE, *(path for name, path in own.items() if name in stage["cmd"])]
    patterns = [re.sub(r"\$\{[^}]*\}", "*", path) for path in [*paths, *always, *NAMED, *besides]]
    return [file for file in opened if not any(_in(PART.sub(r"\1", file), pattern) for pattern in patterns)]


def _in(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern) or fnmatchcase(file, f"{pattern}/*")
