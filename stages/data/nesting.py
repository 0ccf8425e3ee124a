"""Limit how deep JSON may be nested: chat templates, JSON encoders and our own walks recurse once per level."""

import re
from itertools import accumulate
from typing import Any

MAX_LEVELS = 100  # real tool schemas have about ten; Python's recursion limit is reached at about 500
STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
BRACKET_PATTERN = re.compile(r"[\[\]{}]")


def is_too_deep(value: Any) -> bool:
    """Return whether lists and dicts are nested more than MAX_LEVELS deep. Iterative, so that any depth can be checked."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        if depth > MAX_LEVELS:
            return True
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return False


def is_text_too_deep(text: str) -> bool:
    """Return the same for a text that may be JSON, by its brackets outside strings."""
    if text.count("[") + text.count("{") <= MAX_LEVELS:
        return False
    brackets = BRACKET_PATTERN.findall(STRING_PATTERN.sub("", text))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > MAX_LEVELS
