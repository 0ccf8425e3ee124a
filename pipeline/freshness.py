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

KNOWN_STATE_FILE = Path(".scratch/fresh.json")

Needs = dict[str, list[str]]


def read_fresh_stages() -> Needs | None:
    """The graph's stages with those they depend on, where nothing has changed since all were up to date; else None."""
    try:
        known = json.loads(KNOWN_STATE_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known["stages"] if digest_paths(known["paths"]) == known["look"] else None


def remember_fresh(paths: Iterable[str], looked: str, needs: Needs) -> None:
    """DVC found all up to date, and `looked` is how the files were *before* it was asked."""
    KNOWN_STATE_FILE.parent.mkdir(exist_ok=True)
    beside = KNOWN_STATE_FILE.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"look": looked, "paths": sorted(set(paths)), "stages": needs}), encoding="utf-8")
    os.replace(beside, KNOWN_STATE_FILE)


def digest_paths(paths: Iterable[str]) -> str:
    """A digest of how the files and folders are: there or not, each file's size, time and inode."""
    total = hashlib.sha256(version("dvc").encode())  # another DVC may want other things
    for path in sorted(set(paths)):
        for entry in _list_entries(Path(path)):
            total.update(f"{entry}\n".encode())
    return total.hexdigest()


def _list_entries(path: Path) -> Iterator[str]:
    try:
        if path.is_dir():
            for below in sorted(path.iterdir()):
                if below.name != "__pycache__":  # as in .dvcignore: byte code is written by whoever imports
                    yield from _list_entries(below)
        else:
            found = path.stat()
            yield f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    except OSError:
        yield f"{path} gone"
