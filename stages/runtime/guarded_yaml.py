"""YAML that a user or another person wrote, read by the parser that DVC uses, so that both read the same values."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

MOST_LEVELS = 32  # params.yaml has four, a published table six


def read_yaml(path: Path) -> Any:
    """Return the content of a file.

    Raises:
        ValueError: in one line that names the file, for invalid bytes, dates and YAML, duplicate keys and too deep nesting.
        OSError: the file can't be read.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not valid YAML: {_explain(error)}") from None


def parse_yaml(text: str) -> Any:
    """Parse YAML. Raises ValueError for too deep nesting: the parser recurses in C, and 100,000 levels crash Python."""
    depth = 0
    for event in YAML(typ="safe").parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > MOST_LEVELS:
            line = event.start_mark.line + 1
            raise ValueError(f"line {line}: expected at most {MOST_LEVELS} levels of nesting, found more")
    return YAML(typ="safe").load(text)


def _explain(error: Exception) -> str:
    """Return a parser's error in one line, with the line number."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    # In brackets the parser takes a colon for that of a key.
    is_colon = problem == "found unexpected ':'"
    advice = 'put text with a colon in quotes, as ["http://gpu1:8000"]' if is_colon else "correct it"
    return (
        f"line {mark.line + 1}: {problem}; {advice}"
        if mark and problem
        else f"{' '.join(str(error).split())}; {advice}"
    )
