"""Unfinished work, kept until it is done: `.scratch/<stage>-<digest>` of everything the result depends on.

DVC deletes a stage's outputs before it reruns it, so a killed run resumes from here. The digest covers the parameters,
the inputs and the code, so stale work is never taken up. One process at a time works at a stage (`lock_stage`): one whose DVC
was killed may still be at work when the next run begins. Notes in .scratch/unfinished say how far a stage has come, for the line
that Ctrl-C ends with alone.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stages.runtime import atomic
from stages.runtime.digests import KeptDigests, digest_path
from stages.runtime.stage_code import digest_stage

SCRATCH_FOLDER = Path(".scratch")
NOTES_FOLDER = SCRATCH_FOLDER / "unfinished"  # of STAGE, a text such as "after epoch 4"
HELD = "AERIE_HELD_STAGE"  # environment variable of a process that holds the lock of its stage, and of those it starts
CODE_ROOT = Path(__file__).parents[2]  # the folder that holds the package `stages`

_stage: str | None = None  # of the note


def locate_scratch(stage: str, *depends_on: Any, modules: Collection[str] = ()) -> Path:
    """Return the folder of one piece of work of `stage`, as train_draft-e003.

    Its name is a digest of `depends_on`, which is anything that JSON can write, and of the stage's code, with the `modules` that
    it imports by name: an edit of code that the stage does not import, or of a comment, leaves its unfinished work in place.
    """
    code = digest_stage(stage.partition("-")[0], KeptDigests.read(), modules, root=CODE_ROOT)
    return SCRATCH_FOLDER / f"{stage}-{digest_values(depends_on, code)[:16]}"


def digest_values(*values: Any) -> str:
    """Return the sha256 of anything that JSON can write."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def lock_stage(stage: str) -> Iterator[None]:
    """Lock a stage for this process and those it starts; of several ranks without a parent, the first locks it for all.

    The lock is the kernel's, on a file in .scratch, and free as soon as its holder has ended, killed or not.

    Raises:
        ValueError: where another process works at the stage.
    """
    if HELD in os.environ or os.environ.get("RANK", "0") != "0":
        yield
        return
    SCRATCH_FOLDER.mkdir(exist_ok=True)
    with (SCRATCH_FOLDER / f"{stage.replace('/', '_')}.lock").open("a+") as file:
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{stage} is at work already, in process {file.read(32).strip()}, perhaps for a run that was killed; "
                "wait for its end, or end that process, then run again"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # a file system that has no locks
                raise
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        os.environ[HELD] = stage
        try:
            yield
        finally:
            os.environ.pop(HELD, None)


@contextmanager
def check_unfinished(folder: Path) -> Iterator[None]:
    """Raise ValueError that names `folder` if a file of the unfinished work in it is broken: no stage makes that again."""
    try:
        yield
    except atomic.BrokenArtifactError as error:
        raise ValueError(
            f"unfinished work is broken: {error.found}; remove the folder {folder}, which holds nothing else, and run again: "
            "only what is in it is made again"
        ) from None


def remove_scratch(folder: Path) -> None:
    """Remove the unfinished work of a stage whose result is in its place, and that of its earlier versions.

    Other stages may be at work beside it, whose names begin with the same words: train_draft-e0 and train_draft-e0-long.
    """
    stage, digest = folder.name.rsplit("-", 1)
    name = f"{stage}-{'[0-9a-f]' * len(digest)}"
    for pattern in (name, f".{name}*"):  # with a dot: what a writer killed midway left (runtime/atomic.py)
        for old in SCRATCH_FOLDER.glob(pattern):
            if old.is_dir():
                shutil.rmtree(_put_aside(old), ignore_errors=True)


def _put_aside(folder: Path) -> Path:
    """Rename a folder that is to be removed, so that a kill in between leaves no half of it to go on with."""
    if folder.name.startswith("."):
        return folder
    aside = folder.with_name(f".{folder.name}.removed")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
    except OSError:
        return folder
    return aside


def digest_folder(folder: Path) -> str:
    """Return a digest of the names and bytes of a folder's files."""
    return digest_path(folder, KeptDigests.read())


# Notes


@contextmanager
def keep_note(stage: str) -> Iterator[None]:
    """Keep a note of this stage of dvc.yaml until the block ends without an error. Outside, as in tests, none are written."""
    global _stage
    _stage = stage if os.environ.get("RANK", "0") == "0" else None
    note_progress("")
    yield
    if _stage is not None:
        with suppress(OSError):
            _locate_note(_stage).unlink()


def note_progress(where: str) -> None:
    """Write where the next run goes on, as "after epoch 4"; "" if at the beginning. A note that cannot be written is left out."""
    if _stage is None:
        return
    with suppress(OSError):
        NOTES_FOLDER.mkdir(parents=True, exist_ok=True)
        _locate_note(_stage).write_text(where, encoding="utf-8")


def list_notes(since: float) -> dict[str, str]:
    """Return the notes written after `since`, a `time.time()`, by their unfinished stages; the oldest first."""
    found = []
    for path in NOTES_FOLDER.glob("*"):
        with suppress(OSError):
            if (written := path.stat().st_mtime) >= since:
                found.append((written, path.name, path.read_text(encoding="utf-8")))
    return {stage: where for _, stage, where in sorted(found)}


def _locate_note(stage: str) -> Path:
    return NOTES_FOLDER / stage.replace("/", "_")
