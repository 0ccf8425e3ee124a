"""Suggest the known name that a misspelt one is nearest to."""

import difflib
import re
from collections.abc import Iterable


def suggest_name(found: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" for the nearest known name, "" where none is near."""
    nearest = find_nearest(found, known)
    return f" (did you mean {nearest}?)" if nearest else ""


def find_nearest(found: str, known: Iterable[str]) -> str | None:
    """Return the nearest known name with the same numbers, None where none is near.

    A name with another number, as e010 beside e009, means another thing and is no misspelling.
    """
    alike = [name for name in known if _list_numbers(name) == _list_numbers(found)]
    return next(iter(difflib.get_close_matches(found, alike, n=1)), None)


def _list_numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]
