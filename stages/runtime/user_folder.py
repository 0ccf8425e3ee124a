"""The folder in which the processes of one user on this machine keep their locks."""

import os
import tempfile
from pathlib import Path


def open_user_folder(tmpdir: Path | None = None) -> Path:
    """Return the folder, in `tmpdir` or TMPDIR, and make it if need be; other users may not read it."""
    folder = (tmpdir or Path(tempfile.gettempdir())) / f"aerie-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
