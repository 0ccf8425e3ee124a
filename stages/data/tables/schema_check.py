"""Check a decoded document against a schema (table_schema.py), and make of it what the schema asks for.

Renamed columns, casts and converted units are what the schema's author asked for; nothing else changes a value.
"""

import datetime as dt
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from stages.data.tables.table_schema import (
    AnyValue,
    ListValue,
    NumberValue,
    PlainValue,
    RowsRule,
    TableFile,
    TableValue,
    TextValue,
    UnitConversion,
    Value,
    list_parts,
)
from stages.data.tables.toon_lines import FENCE


@dataclass(frozen=True)
class JudgedAnswer:
    """A judged answer."""

    text: str  # the answer to train on; the original where it is dropped
    verdict: str  # "clean", "repaired:rule,rule" or "dropped:reason"


def judge(original: str, text: str, rules: list[str]) -> JudgedAnswer:
    """Return the verdict on an answer that became `text` by `rules`; without a rule it is clean, its text unchanged."""
    return JudgedAnswer(text, f"repaired:{','.join(rules)}") if rules else JudgedAnswer(original, "clean")


def drop(text: str, reason: str) -> JudgedAnswer:
    return JudgedAnswer(text, f"dropped:{reason}")


def name_surroundings(surroundings: list[str]) -> list[str]:
    """Return the names of the rules that removing these lines applies."""
    fence = any(is_fence(line) for line in surroundings)
    prose = any(line.strip() and not is_fence(line) for line in surroundings)
    blank = bool(surroundings) and not fence and not prose
    return ["fence"] * fence + ["prose"] * prose + ["blank_line"] * blank


def is_fence(line: str) -> bool:
    return FENCE.match(line) is not None


def find_fenced_blocks(lines: list[str]) -> list[tuple[int, int]]:
    """Return (first index, index after the last) of the lines inside each pair of fences; the last may be open."""
    fences = [index for index, line in enumerate(lines) if is_fence(line)]
    ends = [*fences[1:], len(lines)]
    return [(fence + 1, end) for fence, end in list(zip(fences, ends, strict=False))[::2]]


NUMBER_PATTERN = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"
DATE_PATTERN = r"\d{4}-\d\d-\d\d"
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}
MAX_NUMBER_DIGITS = 400  # int() of more than 4300 digits raises


class SchemaMismatchError(Exception):
    """A document is not of the schema; the argument is the reason in one word."""


@dataclass
class _Conforming:
    """Inputs of a document's check, and the changes that it makes."""

    units: dict[str, UnitConversion]
    question: str | None
    rules: dict[str, None] = field(default_factory=dict)  # what was changed: columns, cast, unit, typography; in order


def conform_document(document: Any, schema: TableFile, question: str | None) -> tuple[Any, list[str]]:
    """Return (the document as the schema has it, what was changed for that).

    Args:
        question: text that `rows.asked` is looked for in; None where there is no question.

    Raises:
        SchemaMismatchError: with the reason.
    """
    work = _Conforming(schema.units, question)
    return _conform(document, schema.document, work), list(work.rules)


def find_asked_rows(rule: RowsRule, question: str | None) -> int | None:
    """Return how many rows a question asks for; None where it names no number, or several that differ."""
    if rule.asked is None or question is None:
        return None
    found = {match for match in re.findall(rule.asked, question) if re.fullmatch(r"\d{1,9}", match)}
    numbers = {int(match) for match in found}
    return numbers.pop() if len(numbers) == 1 else None


def _conform(value: Any, schema: AnyValue, work: _Conforming) -> Any:
    if schema.missing and isinstance(value, str) and value in schema.missing:
        work.rules["missing"] = None
        value = None
    if value is None and schema.optional:
        return None
    match schema.type:  # a chain of isinstance takes longer than the checks
        case "text":
            return _conform_text(value, schema, work)
        case "integer" | "number":
            return _conform_number(value, schema, work)
        case "object":
            return _conform_object(value, schema, work, "wrong_keys", schema.other_keys == "keep")
        case "table":
            return _conform_table(value, schema, work)
        case "list":
            return _conform_list(value, schema, work)
        case _:
            return _conform_plain(value, schema, work)


def _conform_object(value: Any, schema: Value, work: _Conforming, reason: str, keeps_others: bool) -> dict[str, Any]:
    """Return the object with the schema's names, in the schema's order, then the others."""
    if not isinstance(value, dict):
        raise SchemaMismatchError(reason)
    parts = list_parts(schema)
    found, others = _collect(value, parts, reason, work)
    if (others and not keeps_others) or any(key not in found and not part.optional for key, part in parts.items()):
        raise SchemaMismatchError(reason)
    made = {key: _conform(found[key], part, work) for key, part in parts.items() if key in found} | others
    if list(made) != list(value):
        work.rules["columns"] = None
    return made


def _collect(
    value: dict[str, Any], parts: Mapping[str, Value], reason: str, work: _Conforming
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (values by the schema's names, in its units; values that it has no name for)."""
    if value.keys() == parts.keys():
        return value, {}
    names = {other: (key, unit) for key, part in parts.items() for other, unit in part.names.items()}
    found: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, inner in value.items():
        key, unit = (name, None) if name in parts else names.get(name, (name, None))
        if key not in parts:
            others[name] = inner
            continue
        if key in found:  # under two of its names
            raise SchemaMismatchError(reason)
        found[key] = _convert_unit(inner, parts[key], unit, work) if unit else inner
    return found, others


def _conform_list(value: Any, schema: ListValue, work: _Conforming) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaMismatchError("wrong_value")
    if len(value) < schema.minimum or (schema.maximum is not None and len(value) > schema.maximum):
        raise SchemaMismatchError("row_count")
    return [_conform(item, schema.items, work) for item in value]


def _conform_table(value: Any, schema: TableValue, work: _Conforming) -> list[dict[str, Any]]:
    if not isinstance(value, list) or (not value and schema.rows.minimum > 0):
        raise SchemaMismatchError("no_table")
    rows = [_conform_object(row, schema, work, "wrong_columns", schema.other_columns == "keep") for row in value]
    for row in rows:
        numbers = [row[name] for name in schema.ordered if row.get(name) is not None]
        if any(first > second for first, second in pairwise(numbers)):
            raise SchemaMismatchError("wrong_order")
    if schema.consecutive:
        _check_consecutive([row.get(schema.consecutive) for row in rows])
    for name in schema.unique:
        values = [repr(row[name]) for row in rows if name in row]
        if len(set(values)) != len(values):
            raise SchemaMismatchError("repeated_value")
    asked = find_asked_rows(schema.rows, work.question)
    most = schema.rows.maximum
    if asked not in (None, len(rows)) or len(rows) < schema.rows.minimum or (most is not None and len(rows) > most):
        raise SchemaMismatchError("row_count")
    return rows


def _check_consecutive(values: list[Any]) -> None:
    days = [dt.date.fromisoformat(value).toordinal() if isinstance(value, str) else value for value in values]
    if any(later is None or day is None or later - day != 1 for day, later in pairwise(days)):
        raise SchemaMismatchError("dates_jump" if isinstance(values[0], str) else "numbers_jump")


def _conform_text(value: Any, schema: TextValue, work: _Conforming) -> str:
    if schema.cast and isinstance(value, bool | int | float):
        work.rules["cast"] = None
        value = str(value).lower() if isinstance(value, bool) else str(value)
    if not isinstance(value, str):
        raise SchemaMismatchError("wrong_value")
    if (
        value[:1] == "“"
        and re.fullmatch(r"“[^“”]*”", value)
        and ("“" in schema.forbid or value[1:-1] in schema.choices)
    ):
        work.rules["typography"] = None
        value = value[1:-1]
    is_chosen = value in schema.choices if schema.choices else value != ""
    if not is_chosen or set(schema.forbid) & set(value):
        raise SchemaMismatchError("wrong_value")
    if schema.pattern is not None and not re.fullmatch(schema.pattern, value):
        raise SchemaMismatchError("wrong_value")
    return value


def _conform_number(value: Any, schema: NumberValue, work: _Conforming) -> int | float:
    """Return a number in range. `type() is`, since True is an instance of int."""
    if isinstance(value, str):
        if re.fullmatch("\N{MINUS SIGN}" + NUMBER_PATTERN.removeprefix("-?"), value):
            work.rules["typography"] = None
            value = _parse_number("-" + value[1:])
        elif schema.cast and re.fullmatch(NUMBER_PATTERN, value) and len(value) < MAX_NUMBER_DIGITS:
            work.rules["cast"] = None
            value = _parse_number(value)
    if schema.type == "integer" and schema.cast and type(value) is float and value.is_integer():
        work.rules["cast"] = None
        value = int(value)
    if type(value) is not int and not (schema.type == "number" and type(value) is float):
        raise SchemaMismatchError("wrong_value")
    if (schema.minimum is not None and value < schema.minimum) or (
        schema.maximum is not None and value > schema.maximum
    ):
        raise SchemaMismatchError("wrong_value")
    return value


def _parse_number(text: str) -> int | float:
    return float(text) if re.search(r"[.eE]", text) else int(text)


def _convert_unit(value: Any, schema: Value, unit: str, work: _Conforming) -> Any:
    """Return a number in the schema's unit, computed exactly and rounded once."""
    if not isinstance(schema, NumberValue) or unit == schema.unit:
        return value
    if type(value) not in (int, float):  # the check after this one says what is wrong
        return value
    conversion = work.units[unit]
    exact = Fraction(str(value)) * Fraction(str(conversion.scale)) + Fraction(str(conversion.offset))
    work.rules["unit"] = None
    if schema.type == "integer":
        return round(exact)
    return float(exact if schema.decimals is None else round(exact, schema.decimals))


def _conform_plain(value: Any, schema: PlainValue, work: _Conforming) -> Any:
    if schema.type == "any":
        return value
    if schema.type == "boolean":
        if schema.cast and isinstance(value, str) and value.lower() in BOOLEANS:
            work.rules["cast"] = None
            value = BOOLEANS[value.lower()]
        is_right = isinstance(value, bool)
    else:
        is_right = isinstance(value, str) and _is_time(value, schema.type)
    if not is_right:
        raise SchemaMismatchError("wrong_value")
    return value


def _is_time(value: str, kind: str) -> bool:
    """Return whether `value` is a day, as 2026-01-31, or an ISO 8601 date and time."""
    try:
        dt.date.fromisoformat(value) if kind == "date" else dt.datetime.fromisoformat(value)
    except ValueError:
        return False
    return re.fullmatch(DATE_PATTERN if kind == "date" else DATE_PATTERN + r"[T ].+", value) is not None
