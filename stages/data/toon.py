"""TOON answers: judged by a strict decoder and a schema, and repaired where the repair can be only one thing.

TOON is YAML-like keys above a CSV-like table that declares its row count: `days[3]{date,low}:`, then three rows.
Models write it with small defects, and a non-strict decoder accepts those by losing data: rows vanish, columns
shift. Here nothing is accepted before `toon_format.loads` (spec 4.4, always strict) and the schema both agree.
A rule may change how a table is written, never what it says; where two readings are possible, the answer is
dropped with a reason. Defects and what decoders make of them: research/users.md, 4.4.
"""

import datetime as dt
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import toon_format

_DATE_PATTERN = r"\d{4}-\d\d-\d\d"
_FIRST_CELL_PATTERNS = {
    "text": r".+",
    "int": r"[-−]?\d+",
    "date": _DATE_PATTERN,
}  # the first cell of a row, by the first column's kind
_TYPOGRAPHIC_CHARACTERS = set("“”−")  # a word processor's quotes and minus sign; in no value of ours
_HORIZON_PATTERN = re.compile(r"\b(\d+) (?:more )?days?\b")


@dataclass(frozen=True, kw_only=True)
class ToonColumn:
    """One value of the document or one column of its table."""

    name: str
    kind: Literal["text", "int", "date"]  # date: ISO 8601, a day
    choices: tuple[str, ...] = ()  # of a text; they also show a last cell that was cut short
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class ToonSchema:
    """What a document must hold: single values, then one table. Another kind of answer is another Schema."""

    keys: tuple[ToonColumn, ...]
    table: str
    columns: tuple[ToonColumn, ...]
    ordered: tuple[str, str] | None = None  # in each row the first column is never above the second
    daily: str | None = None  # this date column counts up by one day per row


WEATHER_SCHEMA = ToonSchema(
    keys=(ToonColumn(name="place", kind="text"), ToonColumn(name="unit", kind="text", choices=("C", "F"))),
    table="days",
    columns=(
        ToonColumn(name="date", kind="date"),
        ToonColumn(name="low", kind="int"),
        ToonColumn(name="high", kind="int"),
        ToonColumn(name="rain", kind="int", least=0, most=100),
        ToonColumn(name="sky", kind="text", choices=("sunny", "cloudy", "fog", "rain", "storm", "snow")),
    ),
    ordered=("low", "high"),
    daily="date",
)


@dataclass(frozen=True)
class ToonRepair:
    text: str  # the answer to train on; the original where it is dropped
    verdict: str  # "clean", "repaired:rule,rule" or "dropped:reason"


def parse_horizon(question: str) -> int | None:
    """How many days a question asks for; None where it names no number of days, or several that differ."""
    asked = {int(days) for days in _HORIZON_PATTERN.findall(question)}
    return asked.pop() if len(asked) == 1 else None


def repair_toon(
    text: str, horizon: int | None, surrounding: Literal["strip", "keep"], schema: ToonSchema = WEATHER_SCHEMA
) -> ToonRepair:
    """An answer as clean, repaired or dropped. What is not dropped comes back clean when given again.

    Args:
        horizon: rows the question asked for; None where unknown, and then a wrong count can't be mended.
        surrounding: what to do with fences and prose around the table. With "keep" they are part of the answer, so
            they stay and are no defect.
    """
    if find_toon_problem(text, horizon, schema) is None:
        return ToonRepair(text, "clean")
    before, table, after = _split_document(text, schema)
    if any(map(_is_broken_row, after)):
        return ToonRepair(
            text, f"dropped:{'broken_row' if _build_header_pattern(schema).search(table) else 'no_table'}"
        )

    applied = _name_surroundings(before + after) if surrounding == "strip" else []
    trouble = find_toon_problem(table, horizon, schema)
    for name, rule in REPAIR_RULES.items():
        if trouble is None:
            break
        changed = rule(table, horizon, schema)
        if changed != table:
            table, trouble = changed, find_toon_problem(changed, horizon, schema)
            applied.append(name)

    if trouble is not None:
        return ToonRepair(
            text, f"dropped:{_explain_undecodable(table, horizon, schema) if trouble == 'not_toon' else trouble}"
        )
    if surrounding == "keep":
        if "json" in applied:  # the fence must not call a TOON table JSON
            before = [line.replace("```json", "```toon") for line in before]
        table = "\n".join([*before, table, *after])
    return ToonRepair(table, f"repaired:{','.join(applied)}" if applied else "clean")


def find_toon_problem(text: str, horizon: int | None, schema: ToonSchema) -> str | None:
    """Why `text` can't stand as it is, in one word; None where a strict decoder and the schema both accept it."""
    try:
        document = toon_format.loads(text)
    except toon_format.ToonDecodeError:
        return "not_toon"
    # Prose that ends in a colon decodes as one more key, so the keys must be these and no others.
    if not isinstance(document, dict) or set(document) != {*(column.name for column in schema.keys), schema.table}:
        return "wrong_keys"
    if not all(_is_valid_value(column, document[column.name]) for column in schema.keys):
        return "wrong_value"
    rows = document[schema.table]
    if not isinstance(rows, list) or not rows:
        return "no_table"
    if any(not isinstance(row, dict) or list(row) != [column.name for column in schema.columns] for row in rows):
        return "wrong_columns"
    if not all(_is_valid_value(column, row[column.name]) for row in rows for column in schema.columns):
        return "wrong_value"
    if schema.ordered and any(row[schema.ordered[0]] > row[schema.ordered[1]] for row in rows):
        return "wrong_order"
    if schema.daily and not _has_consecutive_days([dt.date.fromisoformat(row[schema.daily]) for row in rows]):
        return "dates_jump"
    if horizon is not None and len(rows) != horizon:  # the decoder has already compared the rows with their header
        return "row_count"
    # Both decode, but decoders before spec 4 differ on comments, and a carriage return is a token to learn.
    if "\r" in text or re.search(r"^[ \t]*#", text, re.MULTILINE):
        return "untidy"
    return None


def _is_valid_value(column: ToonColumn, value: Any) -> bool:
    """Whether `value` is of the column's kind and range. `type() is`, since True is an instance of int."""
    if column.kind == "int":
        least, most = column.least, column.most
        return type(value) is int and (least is None or value >= least) and (most is None or value <= most)
    if type(value) is not str or _TYPOGRAPHIC_CHARACTERS & set(value):
        return False
    if column.kind == "date":
        return re.fullmatch(_DATE_PATTERN, value) is not None and _is_date(value)
    return value in column.choices if column.choices else value != ""


def _is_date(value: str) -> bool:
    try:
        dt.date.fromisoformat(value)
    except ValueError:
        return False
    return True


def _has_consecutive_days(dates: list[dt.date]) -> bool:
    return all((later - day).days == 1 for day, later in pairwise(dates))


# --- where the table is ---------------------------------------------------------------------------------------------


def _split_document(text: str, schema: ToonSchema) -> tuple[list[str], str, list[str]]:
    """Lines before the document, the document, lines after: it reaches from its first line to its last.

    A line that belongs is a key of the schema, the table's header, or a row. Lines between two such are inside,
    whatever they are, so that doubt about them ends in a drop and not in a guess.
    """
    lines = text.split("\n")
    inside = [i for i, line in enumerate(lines) if _is_key(line, schema) or _is_row(line, schema)]
    if not inside:  # JSON instead of TOON: from the line that opens it to the one that closes it
        opens = [i for i, line in enumerate(lines) if line.lstrip().startswith("{")]
        closes = [i for i, line in enumerate(lines) if line.rstrip().endswith("}")]
        inside = [opens[0], closes[-1]] if opens and closes and opens[0] <= closes[-1] else [0, len(lines) - 1]
    first, last = inside[0], inside[-1]
    return lines[:first], "\n".join(lines[first : last + 1]), lines[last + 1 :]


def _is_key(line: str, schema: ToonSchema) -> bool:
    names = "|".join(re.escape(column.name) for column in schema.keys)
    return re.match(rf"\s*(?:(?:{names})\s*:|{re.escape(schema.table)}\s*[\[{{:])", line) is not None


def _is_row(line: str, schema: ToonSchema) -> bool:
    """Whether a line starts as a row does: a first cell of the first column's kind, and then a comma."""
    first, comma, _ = line.strip().partition(",")
    begins = _FIRST_CELL_PATTERNS[schema.columns[0].kind]
    return comma == "," and re.fullmatch(begins, first) is not None and not _is_key(line, schema)


def _is_broken_row(line: str) -> bool:
    """After the table, a line that starts with a number or is indented may be a row cut short: no prose then."""
    return re.match(r"\s*[-−]?\d|\s+[^\s`]", line) is not None


def _name_surroundings(around: list[str]) -> list[str]:
    """The rules that taking these lines away amounts to."""
    fence = any(line.strip().startswith("```") for line in around)
    prose = any(line.strip() and not line.strip().startswith("```") for line in around)
    blank = bool(around) and not fence and not prose
    return ["fence"] * fence + ["prose"] * prose + ["blank_line"] * blank


def _explain_undecodable(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """Why a table that no rule could mend does not decode: the most telling reason first."""
    headers = len(_build_header_pattern(schema).findall(table))
    rows = [line for line in table.split("\n") if _is_row(line, schema)]
    if headers != 1 or not rows:
        return "repeated_table" if headers > 1 else "no_table"
    if any(line.count(",") + 1 != len(schema.columns) for line in rows):
        return "row_width"
    if horizon is None:
        return "count_unsure"
    return "row_count" if len(rows) != horizon else "not_toon"


# --- the rules: a document goes in and comes back, mended in one respect or as it was -------------------------------


def _convert_json(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """JSON holds the same data; a key given twice is two readings, so it is left alone."""

    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key is given twice")
        return dict(pairs)

    if not table.lstrip().startswith("{"):
        return table
    try:
        return toon_format.dumps(json.loads(table, object_pairs_hook=refuse_twins))
    except (ValueError, RecursionError):  # no table of the schema is nested so deep that either recurses too far
        return table


def _unify_line_ends(table: str, horizon: int | None, schema: ToonSchema) -> str:
    return table.replace("\r\n", "\n").removesuffix("\r")


def _remove_comments(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """A comment is no data, by the spec; older decoders take it for a broken key."""
    return "\n".join(line for line in table.split("\n") if not line.lstrip().startswith("#"))


def _remove_blank_lines(table: str, horizon: int | None, schema: ToonSchema) -> str:
    return "\n".join(line for line in table.split("\n") if line.strip())


def _remove_header_spaces(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """`days [3] {date,low} :` -> `days[3]{date,low}:`"""
    return _build_header_pattern(schema).sub(
        lambda m: m["name"] + (m["bracket"] or "").strip() + m["fields"].strip() + m["colon"].strip(), table
    )


def _convert_old_dialect(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """`[#3]` (before spec 2) and `[3,]` say three, as `[3]` does."""
    return _build_header_pattern(schema).sub(
        lambda m: m["name"] + re.sub(r"\[[ #]*(\d+)[ ,]*\]", r"[\1]", m["bracket"] or "") + m["fields"] + m["colon"],
        table,
    )


def _add_header_colon(table: str, horizon: int | None, schema: ToonSchema) -> str:
    return _build_header_pattern(schema).sub(lambda m: m[0].rstrip() if m["colon"] else m[0].rstrip() + ":", table)


def _correct_indent(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """Keys at the margin, rows two spaces in: the schema has one table, so depth follows from what a line is."""

    def placed(line: str) -> str:
        if _is_key(line, schema):
            return line.strip()
        return "  " + line.strip() if _is_row(line, schema) else line

    return "\n".join(map(placed, table.split("\n")))


def _remove_trailing_commas(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """An empty cell past the last column is a comma too many; anything else past it might be data."""

    def cut(line: str) -> str:
        excess = _is_row(line, schema) and line.count(",") == len(schema.columns)
        return line.rstrip().removesuffix(",") if excess else line

    return "\n".join(map(cut, table.split("\n")))


def _replace_typography(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """The true minus sign is a hyphen here; curly quotes around a whole value are no part of it."""
    unquoted = re.sub(r"(^|[:,])([ \t]*)“([^“”\n]*)”[ \t]*(?=,|$)", r"\1\2\3", table, flags=re.MULTILINE)
    return unquoted.replace("−", "-")


def _correct_row_count(table: str, horizon: int | None, schema: ToonSchema) -> str:
    """A wrong, missing or literal `[N]` is mended only if the rows are as many as asked: else which is true?"""
    rows = sum(_is_row(line, schema) for line in table.split("\n"))
    if horizon is None or rows != horizon:
        return table
    return _build_header_pattern(schema).sub(lambda m: f"{m['name']}[{rows}]{m['fields']}{m['colon']}", table)


def _build_header_pattern(schema: ToonSchema) -> re.Pattern[str]:
    """The table's header line in its parts, however spaced, with or without its count and colon."""
    gap, name = r"[ \t]*", re.escape(schema.table)
    return re.compile(
        rf"^(?P<name>{gap}{name})(?P<bracket>{gap}\[[^\]\n]*\])?(?P<fields>{gap}\{{[^}}\n]*\}})(?P<colon>{gap}:?){gap}$",
        re.MULTILINE,
    )


# Applied in this order until the table stands. `fence` and `prose` come before them all: see `_name_surroundings`.
REPAIR_RULES: dict[str, Callable[[str, int | None, ToonSchema], str]] = {
    "json": _convert_json,
    "line_ends": _unify_line_ends,
    "comment": _remove_comments,
    "blank_line": _remove_blank_lines,
    "header_space": _remove_header_spaces,
    "old_dialect": _convert_old_dialect,
    "header_colon": _add_header_colon,
    "indent": _correct_indent,
    "trailing_comma": _remove_trailing_commas,
    "typography": _replace_typography,
    "count": _correct_row_count,
}
