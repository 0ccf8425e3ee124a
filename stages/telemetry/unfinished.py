"""Notes of how far an unfinished stage has come: .scratch/unfinished/STAGE, a text such as "after epoch 4".

The stage that resumes reads its own files (stages/runtime/scratch.py), never these: they are for the line that Ctrl-C ends with.
"""

import os
from contextlib import suppress
from pathlib import Path

NOTES_FOLDER = Path(".scratch/unfinished")

_stage: str | None = None


def begin_stage(stage: str) -> None:
    """Begin the note of this stage of dvc.yaml. Without it, as in tests of a stage's `main`, none are written."""
    global _stage
    _stage = stage if os.environ.get("RANK", "0") == "0" else None
    note_progress("")


def end_stage() -> None:
    """Remove the stage's note, since its result is whole."""
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
