"""Repair the spelling of a TOON document: each rule repairs one kind of defect, or leaves the lines as they are.

A rule may change how a table is written, never a value. Where the text has two readings a rule raises AmbiguousTextError.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from stages.data.tables.schema_check import NUMBER_PATTERN, find_asked_rows
from stages.data.tables.table_schema import ListValue, TableFile, TableValue, Value, list_parts
from stages.data.tables.toon_lines import (
    QUOTED,
    READ_DELIMITERS,
    TOON_DELIMITERS,
    AmbiguousTextError,
    Header,
    Table,
    find_tables,
    has_open_quote,
    is_comment,
    is_item,
    measure_indent,
    read_header,
    split_cells,
    split_row,
    strip_row,
)

MINUS_NUMBER = re.compile("\N{MINUS SIGN}" + NUMBER_PATTERN.removeprefix("-?"))


@dataclass
class RepairContext:
    """The facts about a document, besides its lines, that the rules need."""

    schema: TableFile | None = None
    question: str | None = None
    is_ended: bool = True  # something follows the document, so it was not cut by a token limit
    was_cut: bool = False  # a row that was cut is removed: the declared number of rows is not the number left

    def find_table(self, header: Header) -> TableValue | None:
        """Return the schema of the table that a header opens."""
        return None if self.schema is None else _find_table(self.schema.document, header.key.strip('"'))


def _find_table(value: Value, name: str) -> TableValue | None:
    if isinstance(value, TableValue) and name == "":
        return value
    parts = list_parts(value.items) if isinstance(value, ListValue) else list_parts(value)
    for key, part in parts.items():
        if isinstance(part, TableValue) and (name == key or name in part.names):
            return part
        inner = _find_table(part, name) if name else None
        if inner is not None:
            return inner
    return None


def keep_lines(lines: list[str], is_kept: Callable[[str], object]) -> list[str]:
    return [line for line in lines if is_kept(line)]


def _change_headers(lines: list[str], change: Callable[[Header], Header]) -> list[str]:
    changed = []
    for line in lines:
        header = read_header(line)
        new = header if header is None else change(header)
        changed.append(line if new is None or new == header else new.write())
    return changed


def _remove_line_ends(lines: list[str], _: RepairContext) -> list[str]:
    return [line.removesuffix("\r") for line in lines]


def _remove_comments(lines: list[str], _: RepairContext) -> list[str]:
    """Remove comments, which are no data by the format; unless one has the cells of a row, as older encoders write them."""
    for table in find_tables(lines):
        after = table.rows[-1] + 1 if table.rows else table.start
        for line in lines[table.start + 1 : after + 1]:
            if (
                is_comment(line)
                and table.header.leaves > 1
                and len(split_row(line, table.header)) == table.header.leaves
            ):
                raise AmbiguousTextError("comment_or_row")
    return keep_lines(lines, lambda line: not is_comment(line))


def _remove_header_spaces(lines: list[str], _: RepairContext) -> list[str]:
    """Rewrite `days [3] {date,low} :` as `days[3]{date,low}:`."""
    return _change_headers(lines, lambda header: replace(header, gap="", space="", colon=header.colon.strip()))


def _convert_old_dialect(lines: list[str], _: RepairContext) -> list[str]:
    """Rewrite `[#3]` (before spec 2) and `[3,]` as `[3]`."""

    def change(header: Header) -> Header:
        bracket = header.bracket or ""
        return (
            replace(header, bracket=re.sub(r"\[[ #]*(\d+)[ ,]*(:?[|\t;]?)\]", r"[\1\2]", bracket))
            if bracket
            else header
        )

    return _change_headers(lines, change)


def _add_header_colon(lines: list[str], _: RepairContext) -> list[str]:
    return _change_headers(lines, lambda header: replace(header, colon=header.colon or ":"))


def _correct_indent(lines: list[str], _: RepairContext) -> list[str]:
    """Indent by two spaces a level. A row is one level deeper than its header; other lines keep their own level."""
    tables = find_tables(lines)
    row_levels = {row: table for table in tables for row in table.rows}
    others = [line for index, line in enumerate(lines) if index not in row_levels and line.strip()]
    base = min(map(measure_indent, others), default=0)
    unit = math.gcd(*[measure_indent(line) - base for line in others]) or 2
    if any("\t" in line[: len(line) - len(line.lstrip(" \t"))] for line in others):
        unit = 2  # measure_indent: a tab is two columns

    def level(line: str) -> int:
        return (measure_indent(line) - base) // unit

    changed = []
    for index, line in enumerate(lines):
        table = row_levels.get(index)
        deep = level(line) if table is None else level(lines[table.start]) + (2 if table.header.hyphen else 1)
        text = strip_row(line, "," if table is None else table.header.delimiter)
        changed.append("  " * deep + text if line.strip() else line)
    return changed


def _find_cut_row(table: Table, lines: list[str], work: RepairContext) -> int | None:
    """Return the index of the document's last row where that may be cut inside; None where it is not the last line."""
    is_last = bool(table.rows) and not work.is_ended and not any(line.strip() for line in lines[table.rows[-1] + 1 :])
    return table.rows[-1] if is_last else None


def _correct_delimiters(lines: list[str], work: RepairContext) -> list[str]:
    """Declare the delimiter that the rows are written with, where exactly one splits every row into the header's cells."""
    changed = [*lines]
    for table in find_tables(lines):
        header, cut = table.header, _find_cut_row(table, lines, work)
        whole = [row for row in table.rows if row != cut] or list(table.rows)
        if header.leaves < 2 or not whole:
            continue
        fitting = [
            mark
            for mark in READ_DELIMITERS
            if all(len(split_row(lines[row], header, mark)) == header.leaves for row in whole)
        ]
        is_declared = any(len(split_row(lines[row], header)) >= header.leaves for row in table.rows)
        if is_declared and header.field_delimiter == header.delimiter:
            continue  # other rows have another defect
        if len(fitting) > 1:
            raise AmbiguousTextError("two_readings")
        if not fitting:
            continue
        if any(cell.endswith(header.delimiter) for row in whole for cell in split_row(lines[row], header, fitting[0])):
            raise AmbiguousTextError("two_readings")
        texts = [re.sub(QUOTED, "", lines[row]) for row in whole]
        if all(text.count(f"{fitting[0]} ") == header.leaves - 1 for text in texts):
            raise AmbiguousTextError("two_readings")  # `Paris, France` may be one value of a row that lost another
        mark = fitting[0] if fitting[0] in TOON_DELIMITERS else ","
        fields = mark.join(split_cells(header.fields or "", header.field_delimiter))
        changed[table.start] = replace(header.declare(delimiter=mark), fields=fields).write()
        if mark != fitting[0]:
            for row in table.rows:
                changed[row] = _change_delimiter(lines[row], header, fitting[0], mark)
    return changed


def _change_delimiter(line: str, header: Header, old: str, new: str) -> str:
    text = line.lstrip(" \t")
    start = text[: len(text) - len(split_suffix)] if header.keyed and (split_suffix := text.partition(":")[2]) else ""
    cells = [quote(cell) if new in re.sub(QUOTED, "", cell) else cell for cell in split_row(line, header, old)]
    return line[: len(line) - len(text)] + start + (" " if start else "") + new.join(cells)


def quote(cell: str) -> str:
    return json.dumps(cell, ensure_ascii=False)


def _remove_trailing_delimiter(lines: list[str], _: RepairContext) -> list[str]:
    """Remove an empty cell past the last column; anything else there might be data."""
    changed = [*lines]
    for table in find_tables(lines):
        for row in table.rows:
            cells = split_row(lines[row], table.header)
            if len(cells) == table.header.leaves + 1 and not cells[-1]:
                changed[row] = strip_row(lines[row], table.header.delimiter).removesuffix(table.header.delimiter)
                changed[row] = lines[row][: len(lines[row]) - len(lines[row].lstrip(" \t"))] + changed[row]
    return changed


def _replace_typography(lines: list[str], work: RepairContext) -> list[str]:
    """Replace the minus sign U+2212 in a column whose other values are numbers. With a schema, its types decide."""
    if work.schema is not None or not any("\N{MINUS SIGN}" in line for line in lines):
        return lines
    changed = [*lines]
    for table in find_tables(lines):
        rows = [split_row(lines[row], table.header) for row in table.rows]
        for column in range(table.header.leaves):
            cells = [cells[column] for cells in rows if len(cells) == table.header.leaves]
            if not any(MINUS_NUMBER.fullmatch(cell) for cell in cells):
                continue
            numbers = [re.fullmatch(NUMBER_PATTERN, cell) is not None for cell in cells]
            if not any(numbers) or not all(
                known or MINUS_NUMBER.fullmatch(cell) for known, cell in zip(numbers, cells, strict=True)
            ):
                raise AmbiguousTextError("minus_or_text")
            for row, cells in zip(table.rows, rows, strict=True):
                if len(cells) == table.header.leaves and MINUS_NUMBER.fullmatch(cells[column]):
                    cells[column] = "-" + cells[column][1:]
                    line = changed[row]
                    start = line[: len(line) - len(line.lstrip(" \t"))]
                    changed[row] = start + table.header.delimiter.join(cells)
    return changed


def _remove_cut_row(lines: list[str], work: RepairContext) -> list[str]:
    """Remove the last row where a token limit cut it: it has fewer cells than the header, and nothing follows."""
    for table in find_tables(lines):
        row, header, schema = _find_cut_row(table, lines, work), table.header, work.find_table(table.header)
        if schema is not None and schema.rows.asked is not None:
            continue  # the number of rows is asked for
        if row is None or header.count is None or header.count < len(table.rows) or len(table.rows) < 2:
            continue
        text = lines[row]
        if len(split_row(text, header)) < header.leaves or has_open_quote(text):
            work.was_cut = True
            return lines[:row]
    return lines


def _correct_counts(lines: list[str], work: RepairContext) -> list[str]:
    """Correct a wrong, missing or literal `[N]`. With `rows.asked` of a schema only if the rows are as many as asked for."""
    changed = [*lines]
    for table in find_tables(lines):
        schema = work.find_table(table.header)
        header, found = table.header, len(table.rows)
        if schema is not None and schema.rows.asked is not None:
            if found == find_asked_rows(schema.rows, work.question):
                changed[table.start] = header.declare(found).write()
            continue
        if header.count == found or not found:
            continue
        if any(len(split_row(lines[row], header)) != header.leaves for row in table.rows):
            raise AmbiguousTextError("row_width")
        _check_count_is_wrong(lines, table, work)
        changed[table.start] = header.declare(found).write()
    return _correct_list_counts(changed, work)


def _check_count_is_wrong(lines: list[str], table: Table, work: RepairContext) -> None:
    """Raise AmbiguousTextError where the number of rows may be wrong rather than its declaration."""
    declared, texts = table.header.count, [lines[row].strip() for row in table.rows]
    if declared is None or work.was_cut:
        return
    if declared < len(texts) and any(texts[index] == texts[index - 1] for index in range(1, len(texts))):
        raise AmbiguousTextError("repeated_row")
    if declared > len(texts) and _find_cut_row(table, lines, work) is not None:
        columns = list(zip(*(split_row(lines[row], table.header) for row in table.rows), strict=True))
        if not _is_complete(columns[-1]):
            raise AmbiguousTextError("count_or_cut")


def _is_complete(cells: tuple[str, ...]) -> bool:
    """Return whether the last of a column's cells was not cut, by its form: a closing quote, or an alphabet of fixed length."""
    last = cells[-1]
    if re.fullmatch(QUOTED, last):
        return True
    if len(cells) < 2:
        return False
    fixed = (r"true|false|null", r"\d{4}-\d\d-\d\d")
    return any(all(re.fullmatch(form, cell) for cell in cells) for form in fixed)


def may_be_cut(lines: list[str]) -> bool:
    """Return whether the last value of a document may lack its end."""
    tables = find_tables(lines)
    if tables and tables[-1].end == len(lines):
        table = tables[-1]
        rows = [split_row(lines[row], table.header) for row in table.rows]
        return not rows or not _is_complete(tuple(cells[-1] for cells in rows))
    token = re.split(r"[:,|\t] *", re.sub(QUOTED, "true", lines[-1]))[-1].strip() if lines else ""
    return token not in ("true", "false", "null")


def _correct_list_counts(lines: list[str], work: RepairContext) -> list[str]:
    """Correct the `[N]` of lists without fields: of values on the header's line, or of items below it."""
    changed = [*lines]
    for index, line in enumerate(lines):
        header = read_header(line)
        if header is None or header.fields is not None:
            continue
        is_last = not work.is_ended and not any(later.strip() for later in lines[index + 1 :])
        if header.rest:
            values = split_cells(header.rest, header.delimiter)
            found = len(values)
            is_closed = re.fullmatch(QUOTED, values[-1]) is not None
            if found == header.count:
                continue
            if any(cell == "" for cell in values) or ", " in re.sub(QUOTED, "", header.rest):
                raise AmbiguousTextError("two_readings")  # a value may hold the delimiter
        else:
            found, end = _count_items(lines, index, header)
            is_last, is_closed = not work.is_ended and end == len(lines), False
            if found in (0, header.count):
                continue
        if is_last and not is_closed and header.count is not None and header.count > found:
            raise AmbiguousTextError("count_or_cut")
        changed[index] = header.declare(found).write()
    return changed


def _count_items(lines: list[str], start: int, header: Header) -> tuple[int, int]:
    """Return (number of items below a header, index after the last of them)."""
    base, items, depth = measure_indent(header.indent) + (2 if header.hyphen else 0), 0, None
    for index in range(start + 1, len(lines)):
        indent = measure_indent(lines[index])
        if indent <= base:
            return items, index
        if is_item(lines[index]):
            depth = indent if depth is None else depth
            items += indent == depth
    return items, len(lines)


# Applied in this order until the document is accepted. `json`, `fence`, `prose` precede them: see toon.py.
REPAIR_RULES: dict[str, Callable[[list[str], RepairContext], list[str]]] = {
    "line_ends": _remove_line_ends,
    "comment": _remove_comments,
    "blank_line": lambda lines, _: keep_lines(lines, str.strip),
    "header_space": _remove_header_spaces,
    "old_dialect": _convert_old_dialect,
    "header_colon": _add_header_colon,
    "indent": _correct_indent,
    "delimiter": _correct_delimiters,
    "trailing_comma": _remove_trailing_delimiter,
    "typography": _replace_typography,
    "cut_row": _remove_cut_row,
    "count": _correct_counts,
}
