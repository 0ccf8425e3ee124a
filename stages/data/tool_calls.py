"""Read tools and the calls of tools, as exports have them, in OpenAI's form."""

import json
from typing import Any

from stages.data import json_lines

ARGUMENT_KEYS = ("arguments", "parameters", "input", "args")
NO_ARGUMENTS = ("", "null", "none", "undefined")  # a call without arguments, as exports write it


class MalformedToolsError(ValueError):
    """Tools or calls of another shape; the message says what was found."""


def parse_calls(text: str, first: int = 0) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message; those without an id are numbered from `first`. Raises MalformedToolsError."""
    given = _load(text)
    return [
        _parse_call(call, number) for number, call in enumerate(given if isinstance(given, list) else [given], first)
    ]


def parse_tools(text: str | None) -> list[dict[str, Any]] | None:
    """Return tools, with keys in the order of servers: templates render them as JSON. Raises MalformedToolsError."""
    given = None if text is None else _load(text)
    found = []
    for tool in given if isinstance(given, list) else [] if given is None else [given]:
        function = _get_function(tool, "a tool")
        first: dict[str, Any] = {key: function[key] for key in ("name", "description", "parameters") if key in function}
        found.append({"type": "function", "function": {**first, **function}})
    return found or None


def _parse_call(given: Any, number: int) -> dict[str, Any]:
    function = _get_function(given, "a call")
    arguments = next((function[key] for key in ARGUMENT_KEYS if key in function), None)
    for _ in range(2):  # JSON in a text, and where an export encoded it twice
        if isinstance(arguments, str):
            arguments = _load(arguments) if arguments.strip().lower() not in NO_ARGUMENTS else None
    if arguments is None or arguments == []:  # PHP's empty object
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedToolsError(f"the arguments of {function['name']} are {json_lines.describe_value(arguments)}")
    if json_lines.is_too_deep(arguments):
        raise MalformedToolsError(f"the arguments of {function['name']} are nested too deep for templates")
    # Nine letters and digits: Mistral's template accepts no other id.
    return {
        "id": str(given.get("id") or f"call{number:05d}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _get_function(given: Any, what: str) -> dict[str, Any]:
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MalformedToolsError(f"{what} has no name: {json_lines.abbreviate_row(given)}")
    return function


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedToolsError(f"{json_lines.abbreviate_row(text)} is no JSON") from None
