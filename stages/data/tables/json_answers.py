"""Find the JSON value in an answer, and repair it where there is one reading. docs/data.md lists the rules.

The text is read once from its first bracket. What is JSON is copied as it is written, numbers included; what is not is either
written otherwise (a comma too many, True for true) or refused. `json.loads` must accept the result, without a repeated key.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from stages.data.tables.json_repairs import BrokenJsonError, read_json, starts_json
from stages.data.tables.schema_check import (
    JudgedAnswer,
    SchemaMismatchError,
    conform_document,
    drop,
    find_fenced_blocks,
    judge,
    name_surroundings,
)
from stages.data.tables.table_schema import TableFile

LOOKED_AT = 200  # characters that show whether a bracket starts JSON


@dataclass(frozen=True)
class LocatedJson:
    """A JSON value in an answer, and the lines around it."""

    before: list[str]
    text: str  # after repair
    after: list[str]
    value: Any
    rules: list[str] = field(default_factory=list)
    lead: str = ""  # text before the value on its own line, and after it
    tail: str = ""


def repair_json(
    text: str, surrounding: Literal["strip", "keep"], schema: TableFile | None = None, question: str | None = None
) -> JudgedAnswer:
    """Return an answer as clean, repaired or dropped. Arguments as of toon.repair_toon."""
    changes: list[str] = []
    try:
        found = locate_json(text)
        if found is None:
            return drop(text, "no_json")
        value = found.value
        if schema is not None:
            value, changes = conform_document(value, schema, question)
    except (BrokenJsonError, SchemaMismatchError) as error:
        return drop(text, str(error))
    written = _write_like(value, found.text) if changes else found.text
    surroundings = [*found.before, *found.after, *(part for part in (found.lead, found.tail) if part.strip())]
    rules = [*(name_surroundings(surroundings) if surrounding == "strip" else []), *found.rules, *changes]
    rules = [rule for rule in rules if rule != "blank_line"]  # white space around JSON is JSON
    if surrounding == "keep":
        written = "\n".join([*found.before, found.lead + written + found.tail, *found.after])
    return judge(text, written, list(dict.fromkeys(rules)))


def locate_json(text: str) -> LocatedJson | None:
    """Return the only JSON object or array of an answer, repaired if need be; None where there is none.

    Raises:
        BrokenJsonError: with the reason, where it can't be read in one way.
    """
    lines = text.split("\n")
    blocks = [
        (start, end) for start, end in find_fenced_blocks(lines) if starts_json("\n".join(lines[start:end]).lstrip())
    ]
    if len(blocks) > 1:
        raise BrokenJsonError("several_values")
    first, last = blocks[0] if blocks else (0, len(lines))
    inner = "\n".join(lines[first:last])
    start = _find_start(inner)
    if start is None:
        return None
    is_ended = last < len(lines)  # by a closing fence
    made = read_json(inner, start, may_be_cut=not is_ended)
    rest = inner[made.end :]
    if _find_start(rest) is not None:
        raise BrokenJsonError("several_values")
    try:
        value = json.loads(made.text, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise BrokenJsonError("nested_too_deep") from None
    except ValueError as error:
        raise BrokenJsonError("repeated_key" if str(error) == "repeated_key" else "not_json") from None
    head, tail = inner[:start].split("\n"), rest.split("\n")
    return LocatedJson(
        [*lines[:first], *head[:-1]], made.text, [*tail[1:], *lines[last:]], value, made.rules, head[-1], tail[0]
    )


def _find_start(text: str) -> int | None:
    """Return where the first JSON object or array starts: an object anywhere, an array at the start of a line."""
    for found in re.finditer(r"\{|^[ \t]*(?P<list>\[)", text, re.MULTILINE):
        start = found.start("list") if found["list"] else found.start()
        if starts_json(text[start : start + LOOKED_AT]):
            return start
    return None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("repeated_key")
    return dict(pairs)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _write_like(value: Any, text: str) -> str:
    """Return JSON with the indentation of `text`."""
    lines = text.split("\n")
    indent = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 else None
    return json.dumps(value, indent=indent or None, ensure_ascii=False)
