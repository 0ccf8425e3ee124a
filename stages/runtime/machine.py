"""The folder for the locks of a user's processes on this machine, and the GPUs that they may use."""

import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO


def open_user_folder(tmpdir: Path | None = None) -> Path:
    """Return the folder, in `tmpdir` or TMPDIR, and make it if need be; other users may neither read nor have made it.

    Anybody may make a folder of that name in a shared TMPDIR first, or a link in its place: then the folder is one in the user's
    own cache. Raises ValueError where that is another's too.
    """
    shared = tmpdir or Path(tempfile.gettempdir())
    own = Path.home() / ".cache" / "aerie" / f"locks-{hashlib.sha256(str(shared).encode()).hexdigest()[:12]}"
    for folder in (shared / f"aerie-{os.getuid()}", own):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:  # a file or a link that leads nowhere
            continue
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            if stat.S_IMODE(found.st_mode) != 0o700:
                folder.chmod(0o700)
            return folder
    raise ValueError(f"{folder} belongs to another user or is no folder; set TMPDIR to a folder of yours")


def open_lock_file(folder: Path, name: str) -> TextIO:
    """Return a file of the folder, opened for a lock. Raises ValueError where it is no plain file of this user."""
    path = folder / name
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"{path} can't be opened as a lock ({error.strerror}); move it away") from None
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(opened)
        raise ValueError(f"{path} is no plain file of yours, expected a lock; move it away")
    return os.fdopen(opened, "r+")


def list_named_gpus() -> list[str] | None:
    """Return the indices or UUIDs in CUDA_VISIBLE_DEVICES, in its order; None where it is not set: all are visible."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [gpu.strip() for gpu in named.split(",") if gpu.strip()]
