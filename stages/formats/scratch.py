"""Unfinished work, kept until it is done: `.scratch/<stage>-<digest>` of everything the result depends on.

DVC deletes a stage's outputs before it reruns it, so a killed run resumes from here. The digest covers the parameters,
the inputs and the code, so stale work is never taken up.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.formats import atomic

SCRATCH = Path(".scratch")


def place(stage: str, *depends_on: Any) -> Path:
    """The folder of this very piece of work; `depends_on` is anything JSON can write, besides the stages' own code."""
    total = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode())
    for path in sorted(_code()):
        total.update(path.read_bytes())
    return SCRATCH / f"{stage}-{total.hexdigest()[:16]}"


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Name `folder`, which holds unfinished work and nothing else, where a file in it is broken: no stage makes that again.

    Raises:
        ValueError: with what was found.
    """
    try:
        yield
    except atomic.Broken as error:
        raise ValueError(
            f"unfinished work is broken: {error.found}; remove the folder {folder}, which holds nothing else, and run again: "
            "only what is in it is made anew"
        ) from None


def done(folder: Path) -> None:
    """The result is in its place: forget the unfinished work, and that of earlier versions of the same stage."""
    stage = folder.name.rsplit("-", 1)[0]
    for pattern in (f"{stage}-*", f".{stage}-*"):  # with a dot: what a writer killed midway left (formats/atomic.py)
        for old in SCRATCH.glob(pattern):
            shutil.rmtree(old, ignore_errors=True)


def digest(folder: Path) -> str:
    """sha256 over the names and bytes of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(f for f in folder.rglob("*") if f.is_file()):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _code() -> set[Path]:
    files = {getattr(m, "__file__", None) for name, m in sys.modules.items() if name.startswith("stages.")}
    main = getattr(sys.modules["__main__"], "__file__", None)
    code = {Path(f) for f in {*files, main} if f and f.endswith(".py")}
    return {f for f in code if f.stem != "params" and f.parent.name != "sections"}  # they hold no values
