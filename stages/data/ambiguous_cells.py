"""Find the one reading of a table's row with more cells than its header has: a value that holds a delimiter without quotes.

Three kinds of evidence count. A single column: the whole row is its value. White space: values of prose have a space after a
comma, `New York, NY`, where the table has none. A schema: exactly one way to join cells puts numbers where it has numbers.
Without any, the row may as well have a cell too many: a bare `x,y` is not joined because the cells around it are numbers.
"""

import json
import re
from collections.abc import Iterator, Mapping

from stages.data.table_schema import NumberValue, PlainValue, TextValue, Value
from stages.data.toon_lines import Header, split_cells

FORMS = (
    r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?",
    r"true|false",
    r"\d{4}-\d\d-\d\d",
    r"\d{4}-\d\d-\d\dT.+",
)  # of the cells of a column that is no text
MIN_KNOWN_ROWS = 2  # rows of the right width from which a column's form is known
MAX_CELLS = 40  # of a row with several readings: their number grows with it


class AmbiguousTextError(Exception):
    """A text has two readings; the argument is the reason in one word."""


def merge_cells(rows: list[str], header: Header, columns: Mapping[str, Value] | None) -> list[str | None]:
    """Return each row with quotes around the value that needs them; None for a wide row without one reading.

    Args:
        rows: rows as written, without indentation.
        columns: the schema's columns by name, where there is a schema.
    """
    mark, width = header.delimiter, header.leaves
    known = [cells for cells in (split_cells(row, mark) for row in rows) if len(cells) == width]
    forms = [_find_form(column, name, known, columns) for column, name in enumerate(header.leaf_names)]
    has_spaces = any(re.search(rf"{re.escape(mark)} ", row) for row in rows if len(split_cells(row, mark)) == width)
    made: list[str | None] = []
    for row in rows:
        cells = split_cells(row, mark)
        if len(cells) <= width:
            made.append(row)
            continue
        reading = None
        if '"' not in row or _quotes_are_whole(cells):
            reading = None if has_spaces else _read_by_spaces(row, mark, forms)
            if width == 1 or columns:
                reading = reading or _read_by_forms(row, mark, forms)
        made.append(None if reading is None else mark.join(reading))
    return made


def _quotes_are_whole(cells: list[str]) -> bool:
    return all('"' not in cell or re.fullmatch(r'"(?:[^"\\]|\\.)*"', cell) for cell in cells)


def _find_form(column: int, name: str, known: list[list[str]], columns: Mapping[str, Value] | None) -> str | None:
    """Return the pattern of a column's cells; None where they may be any text."""
    value = None if columns is None else columns.get(name) or _find_other_name(name, columns)
    if isinstance(value, TextValue):
        return "|".join(map(re.escape, value.choices)) if value.choices else None
    if isinstance(value, NumberValue):
        return FORMS[0]
    if isinstance(value, PlainValue) and value.type != "any":
        return {"boolean": FORMS[1], "date": FORMS[2], "datetime": FORMS[3]}[value.type]
    if len(known) < MIN_KNOWN_ROWS:
        return None
    cells = [row[column] for row in known]
    return next((form for form in FORMS if all(re.fullmatch(form, cell) for cell in cells)), None)


def _find_other_name(name: str, columns: Mapping[str, Value]) -> Value | None:
    return next((value for value in columns.values() if name in value.names), None)


def _read_by_spaces(row: str, mark: str, forms: list[str | None]) -> list[str] | None:
    """Return the cells where only delimiters without a space beside them separate cells."""
    if mark == "\t":
        return None
    inner = r", " if mark == "," else rf" {re.escape(mark)} "
    hidden = re.sub(rf'"(?:[^"\\]|\\.)*"|{inner}', lambda m: m[0] if m[0][0] == '"' else m[0].replace(mark, "\0"), row)
    cells = split_cells(hidden, mark)
    if len(cells) != len(forms):
        return None
    for cell, form in zip(cells, forms, strict=True):
        if "\0" not in cell:
            if form and not re.fullmatch(form, cell):
                return None
        elif form or not _may_be_one_value(cell.split("\0")):
            return None
    return [json.dumps(cell.replace("\0", mark), ensure_ascii=False) if "\0" in cell else cell for cell in cells]


def _read_by_forms(row: str, mark: str, forms: list[str | None]) -> list[str] | None:
    """Return the cells where one way to join them fits the columns' forms, and a column with a form follows the joined one.

    Without such a column, a cell too many at the end would be taken for a part of the last text.
    """
    spans = _split_with_spaces(row, mark)
    if len(forms) == 1:
        return [json.dumps(row.strip(), ensure_ascii=False)] if _may_be_one_value(spans) and '"' not in row else None
    if len(spans) > MAX_CELLS or sum(form is None for form in forms) > 3:
        return None
    readings = []
    for reading in _iterate_readings(spans, forms):
        readings.append(reading)
        if len(readings) > 1:
            return None
    if not readings:
        return None
    cells = []
    for column, parts in enumerate(readings[0]):
        if len(parts) > 1:
            if not any(forms[column + 1 :]) or not _may_be_one_value(parts) or any('"' in part for part in parts):
                return None
            cells.append(json.dumps(mark.join(parts).strip(), ensure_ascii=False))
        else:
            cells.append(parts[0].strip())
    return cells


def _split_with_spaces(row: str, mark: str) -> list[str]:
    """Return the cells with the spaces around them, which belong to a value that holds the delimiter."""
    parts = re.findall(rf'((?:"(?:[^"\\]|\\.)*"|[^{re.escape(mark)}"])*)(?:{re.escape(mark)}|$)', row)
    return parts[:-1] if len(parts) > len(split_cells(row, mark)) else parts


def _iterate_readings(cells: list[str], forms: list[str | None]) -> Iterator[list[list[str]]]:
    """Yield each way to give every column one cell of its form, or of a text column one and more."""
    if not forms:
        if not cells:
            yield []
        return
    spare = len(cells) - len(forms)
    longest = 1 + spare if forms[0] is None else 1
    for taken in range(1, longest + 1):
        if forms[0] is not None and not (cells and re.fullmatch(forms[0], cells[0].strip())):
            return
        for rest in _iterate_readings(cells[taken:], forms[1:]):
            yield [cells[:taken], *rest]


def _may_be_one_value(parts: list[str]) -> bool:
    """Return whether parts look like one text: none is empty or a number, and no two neighbours are equal."""
    texts = [part.strip() for part in parts]
    is_text = all(text and not re.fullmatch(r"[-+]?[\d.]+%?|true|false|null", text) for text in texts)
    return is_text and all(texts[index] != texts[index - 1] for index in range(1, len(texts)))
