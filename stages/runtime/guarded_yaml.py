"""YAML that a user or another person wrote, read by the parser that DVC uses, so that both read the same values."""

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

from stages.runtime import guarded_files

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_LEVELS = 32  # params.yaml has four, a published table six
INTEGER = re.compile(r"[+-]?(\d[\d_]*|0[xo][\da-fA-F_]+)")
MOST_DIGITS = 20  # products of longer ones are too large for a float
MOST_VALUES = 10**6  # with what aliases repeat; nine aliases of ten each are a billion


def read_yaml(path: Path, root: Path | None = None) -> Any:
    """Return the content of a file, of others where its folder `root` is given, out of which no link may lead.

    Raises:
        ValueError: in one line that names the file, for invalid bytes, dates and YAML, duplicate keys and too deep nesting.
        FileNotFoundError: there is no such file.
    """
    if not (path.exists() or path.is_symlink()):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with guarded_files.guard_parsing(path, "YAML", "correct it", root=root):
        return parse_yaml(path.read_bytes().decode("utf-8"))


def parse_yaml(text: str) -> Any:
    """Parse YAML. Raises ValueError, in one line, for anything else."""
    try:
        _check_sizes(text)
        return YAML(typ="safe").load(text)
    except Exception as error:
        if not guarded_files.is_parser_error(error):
            raise
        raise ValueError(_explain(error)) from None


def explain_schema_errors(error: "ValidationError", where: str, advice: str = "correct it") -> str:
    """Return in one line what the schema of a file refuses: each key below `where`, what was expected and what was found."""
    lines = dict[str, None]()  # a set in order
    for found in error.errors(include_url=False):
        key = ".".join(map(str, found["loc"]))
        if found["type"] == "value_error":  # of a validator of ours: already complete
            text = str(found["ctx"]["error"])
        elif found["type"] == "extra_forbidden":
            text = f"unknown key; {advice}"
        else:
            text = f"{found['msg']}, found {found['input']!r:.200}; {advice}"
        lines[f"{key}: {text}" if key else text] = None
    return f"{where}: {'; '.join(lines)}"


def _check_sizes(text: str) -> None:
    """Raise ValueError for long numbers, deep nesting, by which the parser crashes in C, and aliases that repeat too much."""
    sizes: dict[str, int] = {}  # of the values with anchors
    levels: list[tuple[str | None, int]] = [(None, 0)]  # the anchor and the values so far of each open collection
    for event in YAML(typ="safe").parse(text):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, CollectionStartEvent):
            levels.append((anchor, 1))
            _check_limit(event, "levels of nesting", len(levels) - 1, MOST_LEVELS)
            continue
        if isinstance(event, CollectionEndEvent):
            anchor, size = levels.pop()
        elif isinstance(event, AliasEvent):
            anchor, size = None, sizes.get(str(anchor), MOST_VALUES)
        elif not isinstance(event, ScalarEvent):
            continue
        elif not event.style and INTEGER.fullmatch(event.value):
            _check_limit(event, "digits of a number", len(event.value), MOST_DIGITS)
        if anchor:
            sizes[anchor] = size
        levels[-1] = levels[-1][0], levels[-1][1] + size
        _check_limit(event, "values with those that aliases repeat", levels[-1][1], MOST_VALUES)


def _check_limit(event: Any, what: str, found: int, most: int) -> None:
    if found > most:
        raise ValueError(f"line {event.start_mark.line + 1}: expected at most {most} {what}, found more")


def _explain(error: Exception) -> str:
    """Return a parser's error in one line, with the line number."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if problem == "found unexpected ':'":  # in brackets the parser takes a colon for that of a key
        problem += ', put text with a colon in quotes, as ["http://gpu1:8000"]'
    return f"line {mark.line + 1}: {problem}" if mark and problem else " ".join(str(error).split())
