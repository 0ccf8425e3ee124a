"""The rule for paths that come with foreign files: rows that name images, links among data files, an index of weights.

What such a path names is copied into the run, its cache and its remote, and may be sent to a server. So, with all links followed,
it must be a regular file in a folder that the user named. Links into DVC's cache and the Hub client's are followed too: files
there are named by a digest of their content, as no private file is.
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

STORED = re.compile(
    r"/(files/md5/[0-9a-f]{2}/[0-9a-f]{30}|blobs/([0-9a-f]{40}|[0-9a-f]{64}))$"
)  # of DVC; of the Hub's client


class ForeignPathError(ValueError):
    """A path that may not be read. The message says why, without anything of the file's content: "is no file here"."""

    def __init__(self, found: str, is_outside: bool = False) -> None:
        super().__init__(found)
        self.is_outside = is_outside


def resolve_file(path: Path, roots: Sequence[Path]) -> Path:
    """Return the real path of a regular file in one of the folders `roots`. Raises ForeignPathError for any other path."""
    try:
        str(path).encode()
        real = path.resolve(strict=True)
        if not is_inside(real, roots) and not STORED.search(real.as_posix()):
            raise ForeignPathError("is outside of its folder", is_outside=True)
        if not stat.S_ISREG(real.stat().st_mode):
            raise ForeignPathError("is no file here")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ForeignPathError("is no file here") from None
    except UnicodeEncodeError:  # tables and reports hold names in UTF-8
        raise ForeignPathError("has a name that is no UTF-8") from None
    except (OSError, RuntimeError) as error:  # no permission, a disk error, too long a name, a circle of links
        raise ForeignPathError(f"can't be read ({getattr(error, 'strerror', None) or error})") from None
    return real


def is_inside(path: Path, roots: Sequence[Path]) -> bool:
    """Return whether a file or folder, links followed, is in one of the folders `roots`, or one of these."""
    return any(path.resolve().is_relative_to(root.resolve()) for root in roots)


def open_file(path: Path, roots: Sequence[Path]) -> BinaryIO:
    """Open the file of `resolve_file`, also where it is replaced in between. Raises ForeignPathError as that does."""
    real = resolve_file(path, roots)
    try:
        opened = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for its writer
    except OSError as error:
        raise ForeignPathError(f"can't be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise ForeignPathError("is no file here")
    return os.fdopen(opened, "rb")
