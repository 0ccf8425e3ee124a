"""Whether anything has changed since DVC last found all up to date, asked of the file system alone.

DVC loads dvc.lock and then, once for each stage, params.yaml: with 200 cells 6 CPU-seconds to say that there is nothing to do.
Sizes, times and inodes of the very same files, which is what DVC's own state goes by, take a tenth of one. Any difference
at all, and DVC is asked. Knows no DVC: pipeline/dvc_graph.py says which files, and writes this down.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

KNOWN = Path(".scratch/fresh.json")

Needs = dict[str, list[str]]


def stages() -> Needs | None:
    """The graph's stages with those they depend on, where nothing has changed since all were up to date; else None."""
    try:
        known = json.loads(KNOWN.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known["stages"] if look(known["paths"]) == known["look"] else None


def remember(paths: Iterable[str], looked: str, needs: Needs) -> None:
    """DVC found all up to date, and `looked` is how the files were *before* it was asked."""
    KNOWN.parent.mkdir(exist_ok=True)
    beside = KNOWN.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"look": looked, "paths": sorted(set(paths)), "stages": needs}), encoding="utf-8")
    os.replace(beside, KNOWN)


def look(paths: Iterable[str]) -> str:
    """A digest of how the files and folders are: there or not, each file's size, time and inode."""
    total = hashlib.sha256(version("dvc").encode())  # another DVC may want other things
    for path in sorted(set(paths)):
        for entry in _entries(Path(path)):
            total.update(f"{entry}\n".encode())
    return total.hexdigest()


def _entries(path: Path) -> Iterator[str]:
    try:
        if path.is_dir():
            for below in sorted(path.iterdir()):
                if below.name != "__pycache__":  # as in .dvcignore: byte code is written by whoever imports
                    yield from _entries(below)
        else:
            found = path.stat()
            yield f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    except OSError:
        yield f"{path} gone"
