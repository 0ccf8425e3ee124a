"""Tell from the file system alone that nothing has changed since DVC last found every stage up to date.

DVC loads dvc.lock and then, once for each stage, params.yaml: with 200 cells 6 CPU-seconds or more to find nothing to do
(docs/dvc.md says on what). Sizes, times and inodes of the same files, which DVC's own state goes by, take a tenth of one. After
any difference DVC is asked. Of DVC this module knows the version alone: pipeline/dvc_graph.py lists the files.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

KNOWN_STATE_FILE = Path(".scratch/fresh.json")

Upstream = dict[str, list[str]]


def read_fresh_stages() -> Upstream | None:
    """Return the stages with those they depend on if nothing has changed since all were up to date, else None."""
    known = read_known(KNOWN_STATE_FILE)
    return known["stages"] if known and digest_paths(known["paths"]) == known["look"] else None


def remember_fresh(paths: Iterable[str], digest: str, upstream: Upstream) -> None:
    """Record that DVC found every stage up to date. `digest` is that of the paths *before* DVC was asked."""
    write_known(KNOWN_STATE_FILE, {"look": digest, "paths": sorted(set(paths)), "stages": upstream})


def read_known(file: Path) -> dict[str, Any] | None:
    """Return what `write_known` has written, None if there is nothing or it is broken."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "look" in found else None


def write_known(file: Path, known: dict[str, Any]) -> None:
    """Write what is known of the files that the digest `look` covers; nothing where the disk is full or read-only.

    The next command then takes longer.
    """
    from stages.runtime import atomic  # psutil, which a look alone needs not

    with suppress(OSError):
        atomic.write_json(file, known)


def digest_paths(paths: Iterable[str]) -> str:
    """Return a digest of whether the files and folders exist, and of each file's size, time and inode."""
    total = hashlib.sha256(version("dvc").encode())  # another DVC may judge otherwise
    for path in sorted(set(paths)):
        for entry in _list_entries(Path(path)):
            total.update(f"{entry}\n".encode())
    return total.hexdigest()


def _list_entries(path: Path) -> Iterator[str]:
    try:
        if path.is_dir():
            for below in sorted(path.iterdir()):
                if below.name != "__pycache__":  # as in .dvcignore: any import writes byte code
                    yield from _list_entries(below)
        else:
            found = path.stat()
            yield f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ino}"
    except OSError:
        yield f"{path} gone"
