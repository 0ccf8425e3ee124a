"""Validate TOON answers with a strict decoder and a schema, and repair them where only one repair is possible.

TOON has YAML-like keys above a CSV-like table that declares its row count: `days[3]{date,low}:`, then three rows.
Models write it with small defects, which non-strict decoders accept by losing data: rows vanish, columns shift. Here an
answer is accepted only if both `toon_format.loads` (spec 4.4, always strict) and the schema accept it. A repair rule may
change a table's spelling, never its data; where two readings are possible, the answer is dropped with a reason.
docs/data.md lists the rules.
"""

import datetime as dt
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import toon_format

_DATE_PATTERN = r"\d{4}-\d\d-\d\d"
_FIRST_CELL_PATTERNS = {
    "text": r".+",
    "int": r"[-−]?\d+",
    "date": _DATE_PATTERN,
}  # of a row, by the first column's kind
_TYPOGRAPHIC_CHARACTERS = set("“”−")  # a word processor's quotes and minus sign; no valid value contains them
_HORIZON_PATTERN = re.compile(r"\b(\d+) (?:more )?days?\b")


@dataclass(frozen=True, kw_only=True)
class ToonColumn:
    """One value of the document or one column of its table."""

    name: str
    kind: Literal["text", "int", "date"]  # date: ISO 8601, a day
    choices: tuple[str, ...] = ()  # of a text column; they also detect a last cell that was cut
    minimum: int | None = None
    maximum: int | None = None


@dataclass(frozen=True, kw_only=True)
class ToonSchema:
    """The required content of a document: single values, then one table."""

    keys: tuple[ToonColumn, ...]
    table: str
    columns: tuple[ToonColumn, ...]
    ordered_columns: tuple[str, str] | None = None  # in each row the first is at most the second
    date_column: str | None = None  # increases by one day per row


WEATHER_SCHEMA = ToonSchema(
    keys=(ToonColumn(name="place", kind="text"), ToonColumn(name="unit", kind="text", choices=("C", "F"))),
    table="days",
    columns=(
        ToonColumn(name="date", kind="date"),
        ToonColumn(name="low", kind="int"),
        ToonColumn(name="high", kind="int"),
        ToonColumn(name="rain", kind="int", minimum=0, maximum=100),
        ToonColumn(name="sky", kind="text", choices=("sunny", "cloudy", "fog", "rain", "storm", "snow")),
    ),
    ordered_columns=("low", "high"),
    date_column="date",
)


@dataclass(frozen=True)
class ExpectedDocument:
    """A schema, and the number of rows that a question asks for."""

    schema: ToonSchema
    num_rows: int | None  # None where unknown, and then a wrong count can't be repaired

    @cached_property
    def key_pattern(self) -> re.Pattern[str]:
        """Return the pattern of the start of a line that has a key of the schema, or the table's header."""
        names = "|".join(re.escape(column.name) for column in self.schema.keys)
        return re.compile(rf"\s*(?:(?:{names})\s*:|{re.escape(self.schema.table)}\s*[\[{{:])")

    @cached_property
    def header_pattern(self) -> re.Pattern[str]:
        """Return the pattern of the table's header line in its parts, with any spacing, with or without count and colon."""
        gap = r"[ \t]*"
        bracket, fields = rf"(?P<bracket>{gap}\[[^\]\n]*\])?", rf"(?P<fields>{gap}\{{[^}}\n]*\}})"
        name = rf"(?P<name>{gap}{re.escape(self.schema.table)})"
        return re.compile(rf"^{name}{bracket}{fields}(?P<colon>{gap}:?){gap}$", re.MULTILINE)

    def is_key(self, line: str) -> bool:
        return self.key_pattern.match(line) is not None

    def is_row(self, line: str) -> bool:
        """Return whether a line starts like a row: a cell of the first column's kind, then a comma."""
        first, comma, _ = line.strip().partition(",")
        pattern = _FIRST_CELL_PATTERNS[self.schema.columns[0].kind]
        return comma == "," and re.fullmatch(pattern, first) is not None and not self.is_key(line)


@dataclass(frozen=True)
class ToonRepair:
    """A judged answer."""

    text: str  # the answer to train on; the original where it is dropped
    verdict: str  # "clean", "repaired:rule,rule" or "dropped:reason"


def parse_horizon(question: str) -> int | None:
    """Return how many days a question asks for; None where it names no number of days, or several that differ."""
    numbers = {int(days) for days in _HORIZON_PATTERN.findall(question)}
    return numbers.pop() if len(numbers) == 1 else None


def repair_toon(
    text: str, expected_rows: int | None, surrounding: Literal["strip", "keep"], schema: ToonSchema = WEATHER_SCHEMA
) -> ToonRepair:
    """Return an answer as clean, repaired or dropped. A clean or repaired text is clean when judged again.

    Args:
        expected_rows: rows that the question asks for; None where unknown.
        surrounding: whether to strip fences and prose around the table. With "keep" they are part of the answer and no
            defect.
    """
    expected = ExpectedDocument(schema, expected_rows)
    if _find_problem(text, expected) is None:
        return ToonRepair(text, "clean")
    before, table, after = _split_document(text, expected)
    # A line after the table that starts with a number or indentation may be a row cut short, and is not prose.
    if any(re.match(r"\s*[-−]?\d|\s+[^\s`]", line) for line in after):
        return ToonRepair(text, f"dropped:{'broken_row' if expected.header_pattern.search(table) else 'no_table'}")

    applied = _name_surroundings(before + after) if surrounding == "strip" else []
    problem = _find_problem(table, expected)
    for name, rule in REPAIR_RULES.items():
        if problem is None:
            break
        changed = rule(table, expected)
        if changed != table:
            table, problem = changed, _find_problem(changed, expected)
            applied.append(name)

    if problem is not None:
        return ToonRepair(
            text, f"dropped:{_explain_undecodable(table, expected) if problem == 'not_toon' else problem}"
        )
    if surrounding == "keep":
        if "json" in applied:  # the content of the fence is TOON now
            before = [line.replace("```json", "```toon") for line in before]
        table = "\n".join([*before, table, *after])
    return ToonRepair(table, f"repaired:{','.join(applied)}" if applied else "clean")


def _find_problem(text: str, expected: ExpectedDocument) -> str | None:
    """Return why `text` is not accepted, in one word; None where the strict decoder and the schema accept it."""
    schema = expected.schema
    try:
        document = toon_format.loads(text)
    except toon_format.ToonDecodeError:
        return "not_toon"
    # Prose that ends in a colon decodes as one more key, so the keys must be exactly these.
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
    if schema.ordered_columns:
        low, high = schema.ordered_columns
        if any(row[low] > row[high] for row in rows):
            return "wrong_order"
    dates = [dt.date.fromisoformat(row[schema.date_column]) for row in rows] if schema.date_column else []
    if any((later - day).days != 1 for day, later in pairwise(dates)):
        return "dates_jump"
    if expected.num_rows not in (None, len(rows)):  # the decoder has compared the rows with their header
        return "row_count"
    # These decode too, but decoders before spec 4 differ on comments, and a draft should not learn carriage returns.
    return "untidy" if "\r" in text or re.search(r"^[ \t]*#", text, re.MULTILINE) else None


def _is_valid_value(column: ToonColumn, value: Any) -> bool:
    """Return whether `value` is of the column's kind and range. `type() is`, since True is an instance of int."""
    if column.kind == "int":
        low, high = column.minimum, column.maximum
        return type(value) is int and (low is None or value >= low) and (high is None or value <= high)
    if type(value) is not str or _TYPOGRAPHIC_CHARACTERS & set(value):
        return False
    if column.kind == "text":
        return value in column.choices if column.choices else value != ""
    try:
        dt.date.fromisoformat(value)
    except ValueError:
        return False
    return re.fullmatch(_DATE_PATTERN, value) is not None


# --- locate the table ------------------------------------------------------------------------------------------------


def _split_document(text: str, expected: ExpectedDocument) -> tuple[list[str], str, list[str]]:
    """Return (lines before the document, the document, lines after it).

    The document extends from the first to the last line that is a key of the schema, the table's header or a row. Other
    lines in between belong to it, so that they lead to a drop and not to a guess.
    """
    lines = text.split("\n")
    inside = [i for i, line in enumerate(lines) if expected.is_key(line) or expected.is_row(line)]
    if not inside:  # JSON instead of TOON: from the first opening brace to the last closing one
        opens = [i for i, line in enumerate(lines) if line.lstrip().startswith("{")]
        closes = [i for i, line in enumerate(lines) if line.rstrip().endswith("}")]
        inside = [opens[0], closes[-1]] if opens and closes and opens[0] <= closes[-1] else [0, len(lines) - 1]
    first, last = inside[0], inside[-1]
    return lines[:first], "\n".join(lines[first : last + 1]), lines[last + 1 :]


def _name_surroundings(around: list[str]) -> list[str]:
    """Return the names of the rules that removing these lines applies."""
    fence = any(line.strip().startswith("```") for line in around)
    prose = any(line.strip() and not line.strip().startswith("```") for line in around)
    blank = bool(around) and not fence and not prose
    return ["fence"] * fence + ["prose"] * prose + ["blank_line"] * blank


def _explain_undecodable(table: str, expected: ExpectedDocument) -> str:
    """Return why a table that no rule could repair does not decode; the most specific reason wins."""
    headers = len(expected.header_pattern.findall(table))
    rows = [line for line in table.split("\n") if expected.is_row(line)]
    if headers != 1 or not rows:
        return "repeated_table" if headers > 1 else "no_table"
    if any(line.count(",") + 1 != len(expected.schema.columns) for line in rows):
        return "row_width"
    if expected.num_rows is None:
        return "count_unsure"
    return "row_count" if len(rows) != expected.num_rows else "not_toon"


# --- repair rules: each returns the document with one kind of defect repaired, or unchanged --------------------------


def _convert_json(table: str) -> str:
    """Convert JSON with the same data to TOON; leave JSON with a duplicate key, which has two readings."""

    def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("duplicate key")
        return dict(pairs)

    if not table.lstrip().startswith("{"):
        return table
    try:
        return toon_format.dumps(json.loads(table, object_pairs_hook=refuse_duplicate_keys))
    except (ValueError, RecursionError):  # RecursionError: nested deeper than any valid document
        return table


def _keep_lines(table: str, is_kept: Callable[[str], object]) -> str:
    return "\n".join(line for line in table.split("\n") if is_kept(line))


def _remove_header_spaces(table: str, expected: ExpectedDocument) -> str:
    """Rewrite `days [3] {date,low} :` as `days[3]{date,low}:`."""
    return expected.header_pattern.sub(
        lambda m: m["name"] + (m["bracket"] or "").strip() + m["fields"].strip() + m["colon"].strip(), table
    )


def _convert_old_dialect(table: str, expected: ExpectedDocument) -> str:
    """Rewrite `[#3]` (before spec 2) and `[3,]` as `[3]`."""
    return expected.header_pattern.sub(
        lambda m: m["name"] + re.sub(r"\[[ #]*(\d+)[ ,]*\]", r"[\1]", m["bracket"] or "") + m["fields"] + m["colon"],
        table,
    )


def _add_header_colon(table: str, expected: ExpectedDocument) -> str:
    return expected.header_pattern.sub(lambda m: m[0].rstrip() + ("" if m["colon"] else ":"), table)


def _correct_indent(line: str, expected: ExpectedDocument) -> str:
    """Indent keys by nothing and rows by two spaces: with a single table, depth follows from the kind of line."""
    if expected.is_key(line):
        return line.strip()
    return "  " + line.strip() if expected.is_row(line) else line


def _remove_trailing_comma(line: str, expected: ExpectedDocument) -> str:
    """Remove an empty cell past the last column; anything else there might be data."""
    excess = expected.is_row(line) and line.count(",") == len(expected.schema.columns)
    return line.rstrip().removesuffix(",") if excess else line


def _replace_typography(table: str) -> str:
    """Replace the minus sign U+2212 by a hyphen, and remove curly quotes around a whole value."""
    unquoted = re.sub(r"(^|[:,])([ \t]*)“([^“”\n]*)”[ \t]*(?=,|$)", r"\1\2\3", table, flags=re.MULTILINE)
    return unquoted.replace("−", "-")


def _correct_row_count(table: str, expected: ExpectedDocument) -> str:
    """Correct a wrong, missing or literal `[N]`, only if the number of rows is as expected: otherwise either could be wrong."""
    rows = sum(map(expected.is_row, table.split("\n")))
    if rows != expected.num_rows:
        return table
    return expected.header_pattern.sub(lambda m: f"{m['name']}[{rows}]{m['fields']}{m['colon']}", table)


# Applied in this order until the table is accepted. `fence` and `prose` precede them: see `_name_surroundings`.
REPAIR_RULES: dict[str, Callable[[str, ExpectedDocument], str]] = {
    "json": lambda table, _: _convert_json(table),
    "line_ends": lambda table, _: table.replace("\r\n", "\n").removesuffix("\r"),
    # Comments are no data by the spec, and a broken key to older decoders.
    "comment": lambda table, _: _keep_lines(table, lambda line: not line.lstrip().startswith("#")),
    "blank_line": lambda table, _: _keep_lines(table, str.strip),
    "header_space": _remove_header_spaces,
    "old_dialect": _convert_old_dialect,
    "header_colon": _add_header_colon,
    "indent": lambda table, expected: "\n".join(_correct_indent(line, expected) for line in table.split("\n")),
    "trailing_comma": lambda table, expected: "\n".join(
        _remove_trailing_comma(line, expected) for line in table.split("\n")
    ),
    "typography": lambda table, _: _replace_typography(table),
    "count": _correct_row_count,
}
