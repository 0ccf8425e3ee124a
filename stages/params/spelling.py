"""Suggest the known name that a misspelt one is nearest to."""

import difflib
import re
from collections.abc import Iterable


def suggest_name(found: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" for the nearest known name with the same numbers, "" where none is near.

    A name with another number, as e010 beside e009, means another thing and is no misspelling.
    """
    alike = [name for name in known if _list_numbers(name) == _list_numbers(found)]
    nearest = difflib.get_close_matches(found, alike, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _list_numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]
