"""Explain a full disk in one line, whichever library raised it: the file, bytes needed, bytes free, what is kept."""

import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from stages.params.byte_size import format_bytes

ERRORS = (errno.ENOSPC, errno.EDQUOT)
# safetensors, polars and the Hub's client raise their own errors, with Rust's messages for these error numbers.
WORDS = re.compile(r"No space left on device|Disk quota exceeded|\(os error (?:28|122)\)")
# The note that stages/runtime/atomic.py adds.
WRITING = re.compile(r"writing (?P<path>.+), which needs more than (?P<needed>\d+) bytes")


KEPT = "What earlier stages made is kept, and what this one had finished; its partial file is removed. "


def explain_full_disk(error: BaseException, kept: str = KEPT) -> str | None:
    """Return one line about the full disk or used quota that caused `error`; None for other errors. `kept` is a part of it."""
    causes = list(_list_causes(error))
    full = next(
        (cause for cause in causes if getattr(cause, "errno", None) in ERRORS or WORDS.search(str(cause))), None
    )
    if full is None:
        return None
    notes = [note for cause in causes for note in getattr(cause, "__notes__", ())]
    noted = next(filter(None, map(WRITING.fullmatch, notes)), None)
    path = Path(noted["path"] if noted else getattr(full, "filename", None) or ".")
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    what = f"{path} could not be written" if path != Path() else "a file could not be written"
    needed = f"; it needs more than {format_bytes(int(noted['needed']))}" if noted else ""
    free = format_bytes(shutil.disk_usage(folder).free)
    return (
        f"the disk is full, or its quota used: {what}{needed}, and {free} are free in {folder} "
        f"({full}). {kept}Free space there and run the same command again"
    )


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors it was raised from or during, even if `from None` hides them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
