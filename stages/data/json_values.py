"""Judge and describe values of parsed rows, which may be of any type that JSON or Parquet has."""

from typing import Any

from stages.data import json_lines

JSON_TYPES: dict[type, str] = {
    str: "a text", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number",
}  # fmt: skip


def is_text(value: Any) -> bool:
    """Return whether `value` is a string that UTF-8 can encode: exports that cut inside an emoji leave half a surrogate pair."""
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:
        return False


def describe_value(value: Any) -> str:
    """Return the JSON type of a value, and its beginning, both without characters that can't be printed."""
    kind = JSON_TYPES.get(type(value), f"of the type {type(value).__name__}")
    return "null" if value is None else f"{kind}, {json_lines.abbreviate_row(value)}"
