"""Atomic writes: a reader sees the old file or the new one, never half of one.

Each write goes to a temporary name beside its path, is fsynced, and is renamed over it. Renaming also keeps the
DVC cache whole: outputs are hard links into it, so writing *through* one would change the cached copy too.
A killed writer leaves its temporary, `.NAME.PID.part`, behind; the next write of the same path removes it.
"""

import csv
import ctypes
import glob
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from stages.runtime import guarded_files
from stages.runtime.guarded_files import BrokenArtifactError as BrokenArtifactError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def format_rerun_hint(made_by: str) -> str:
    """Return the remedy for a broken output. With -f, since DVC's cache may hold the same broken bytes by a hard link."""
    return f"run: dvc repro -f -s {made_by}"


@contextmanager
def write_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, which replaces `path` when the block ends without an error."""
    with _open_temporary(path) as temporary:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, path)
        _fsync(path.parent)


@contextmanager
def write_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which replaces `path` as a whole when the block ends without an error."""
    with _open_temporary(path) as temporary:
        temporary.mkdir()
        yield temporary
        replace_folder(temporary, path)


def replace_folder(made: Path, path: Path) -> None:
    """Let a whole folder take `path`'s place, on the same file system; the old one, if any, is then at `made`."""
    for inside in [*made.rglob("*"), made]:  # a folder's own fsync is what keeps the names in it
        _fsync(inside)
    if path.exists():
        _swap_folders(made, path)
    else:
        os.replace(made, path)
    _fsync(path.parent)


def write_text(path: Path, text: str) -> None:
    with write_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Indented JSON; NaN and infinity are refused, since half of the world's readers can't parse them."""
    try:
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path} not written: expected finite numbers, found NaN or infinity ({error})") from None
    write_text(path, text + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows under a header, keys that are no column left out. A float keeps every bit: csv writes it by repr."""
    with write_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read_json(path: Path, made_by: str, kind: type = dict) -> Any:
    """Return what the file holds, an object, or a list where `kind` says so.

    Raises:
        BrokenArtifactError: naming the file and the stage that makes it, where it is missing, broken or of another kind.
    """
    return guarded_files.read_json(path, format_rerun_hint(made_by), f"run: dvc repro {made_by}", kind, finite=True)


def guard_artifact(path: Path, kind: str, made_by: str) -> AbstractContextManager[None]:
    """Guard the parsing of an output of a stage (guarded_files.guard_parsing)."""
    return guarded_files.guard_parsing(path, kind, format_rerun_hint(made_by), f"run: dvc repro {made_by}")


@contextmanager
def _open_temporary(path: Path) -> Iterator[Path]:
    """Yield a free name beside `path`, after removing what killed writers of `path` left there.

    An error gets a note of what was being written, and what it takes at least: on a full disk no library says either.
    stages/telemetry/machine_errors.py reads it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        found = re.fullmatch(rf"\.{re.escape(path.name)}\.([1-9]\d*)\.(part|old)", left.name)
        if found and (int(found[1]) == os.getpid() or not psutil.pid_exists(int(found[1]))):
            _remove_path(left)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
    except Exception as error:
        # pyarrow removes what it could not finish
        files = [temporary, *temporary.rglob("*")] if temporary.exists() else []
        with suppress(OSError):  # the folder is gone
            needed = sum(file.stat().st_blocks * 512 for file in files) + shutil.disk_usage(path.parent).free
            error.add_note(f"writing {path}, which needs more than {needed} bytes")
        raise
    finally:
        _remove_path(temporary)  # after a swap this is the old folder


def _swap_folders(new: Path, path: Path) -> None:
    """Let two folders change places: a folder can't be renamed over a full one.

    One step on Linux, so that `path` is there at any moment. Elsewhere, and on file systems that can't, a kill in
    the midst leaves nothing at `path`: the work is made again, and never read half.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = os.fsencode(new), os.fsencode(path)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    aside = new.with_suffix(".old")
    os.replace(path, aside)
    os.replace(new, path)
    os.replace(aside, new)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
