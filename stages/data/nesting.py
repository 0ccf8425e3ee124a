"""How deep JSON may be nested: chat templates, encoders and our own walks over it recurse, a level at a time."""

import re
from typing import Any

MOST = 100  # levels; schemas of tools that people write have some ten, and Python's recursion ends at about 500 of them
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
BRACKET = re.compile(r"[\[\]{}]")


def is_too_deep(value: Any) -> bool:
    """Whether lists and dicts are nested more than MOST levels; level by level, so that no depth is too much to ask about."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        if depth > MOST:
            return True
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return False


def is_text_too_deep(text: str) -> bool:
    """The same of a text that may be JSON, by its brackets outside strings."""
    if text.count("[") + text.count("{") <= MOST:
        return False
    depth = 0
    for bracket in BRACKET.findall(STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST:
            return True
    return False
