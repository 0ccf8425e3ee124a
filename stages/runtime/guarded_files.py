"""One guard around every library that parses bytes of others: what it can't take is an error of one line that names the file.

A pipe or a device is never opened, since reading it may never end; a library's own exceptions, of whatever type, end here.
"""

import json
import math
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.runtime import foreign_paths

MOST_BYTES = 2**28  # of a JSON file: a cell of 100,000 requests has 60 MB, and parsed it takes ten times its size
MOST_LEVELS = 64  # of nesting: what compares or prints a value recurses, and 1000 levels end Python's stack
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BrokenArtifactError(ValueError):
    """A file that is missing, incomplete or of another kind than expected.

    The remedy says how to get it again: of an output of a stage, which stage makes it. A reader of the same format elsewhere
    (unfinished work, a user's import folder) raises its own remedy with `found`.
    """

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}; {remedy}")
        self.found = found


@contextmanager
def guard_parsing(path: Path, kind: str, remedy: str, if_missing: str = "", root: Path | None = None) -> Iterator[None]:
    """Check that `path` is a regular file, and raise BrokenArtifactError for anything that its parser raises in the block.

    `kind` is what the file must be, as JSON. No link may lead out of `root`, the folder of a foreign file. What the machine
    lacks, memory or permission, is raised as it is.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            found = "a folder" if path.is_dir() else "a pipe or a device"
            raise BrokenArtifactError(f"{path} is {found}, expected a file of {kind}", remedy)
        if root is not None:
            _check_links(path, root)
        yield
    except BrokenArtifactError:
        raise
    except FileNotFoundError:
        raise BrokenArtifactError(f"{path} not found", if_missing or remedy) from None
    except BaseException as error:
        if not is_parser_error(error):
            raise
        words = " ".join(str(error).split()) or type(error).__name__
        raise BrokenArtifactError(f"{path} is not valid {kind} ({words:.200})", remedy) from None


def is_parser_error(error: BaseException) -> bool:
    """Return whether a parser may raise this on bytes it can't take: anything but Ctrl-C, and what the machine lacks.

    Rust's panics are no Exception; torch's RuntimeError is how it is out of memory.
    """
    if isinstance(error, MemoryError | PermissionError) or "allocate memory" in str(error):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check_links(path: Path, root: Path) -> None:
    try:
        foreign_paths.resolve_file(path, [root])
    except foreign_paths.ForeignPathError as error:
        raise BrokenArtifactError(f"{path} {error}, expected no link to elsewhere", "copy the file there") from None


def read_json(
    path: Path, remedy: str, if_missing: str = "", kind: type = dict, root: Path | None = None, finite: bool = False
) -> Any:
    """Return what a JSON file holds, an object, or a list where `kind` says so. Raises BrokenArtifactError."""
    with guard_parsing(path, "JSON", remedy, if_missing, root):
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, expected at most {MOST_BYTES}")
        found = parse_json(path.read_bytes(), finite)
    if not isinstance(found, kind):
        raise BrokenArtifactError(f"{path}: expected a JSON {kind.__name__}, found {found!r:.60}", remedy)
    return found


def parse_json(data: bytes, finite: bool = False) -> Any:
    """Return the value of JSON in UTF-8. Raises ValueError also for deep nesting, and for halves of characters.

    `finite`: for NaN and infinity too, which a config may hold, and no file of ours.
    """
    parse_number = _parse_finite if finite else float
    found = json.loads(data.decode("utf-8"), parse_constant=parse_number, parse_float=parse_number)
    if SURROGATE.search(data):
        json.dumps(found, ensure_ascii=False).encode()
    level = [found]
    for _ in range(MOST_LEVELS):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return found
    raise ValueError(f"expected at most {MOST_LEVELS} levels of nesting, found more")


def _parse_finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"expected finite numbers, found {digits:.20}")
    return number


def list_indexed_files(index: Path, remedy: str) -> list[Path]:
    """Return the safetensors files that the index beside them names. Raises BrokenArtifactError, also for a file elsewhere."""
    names = read_json(index, remedy, root=index.parent).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise BrokenArtifactError(f"{index}: expected a file for each tensor, found {names!r:.60}", remedy)
    if elsewhere := [name for name in names.values() if not re.fullmatch(r"[^/\\\0]+\.safetensors", name)]:
        raise BrokenArtifactError(f"{index} names {elsewhere[0]!r:.60}, expected safetensors files beside it", remedy)
    return [index.parent / name for name in sorted(set(names.values()))]
