"""Read the lines of a TOON document with defects: which are headers, rows of tables, keys, items and other text.

Nothing here decides what a value is: that is the strict decoder's work, once the repair rules have corrected the spelling.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

TOON_DELIMITERS = (",", "\t", "|")
READ_DELIMITERS = (*TOON_DELIMITERS, ";")  # `;` is written by models, not by the format
QUOTED = r'"(?:[^"\\]|\\.)*"'
PLAIN_KEY = r"[^\W\d][\w.]*"  # keys with other characters are quoted
_KEY = rf"{QUOTED}|{PLAIN_KEY}"
_HEADER = re.compile(
    rf"(?P<indent>[ \t]*)(?P<hyphen>- +)?(?P<key>{_KEY}|)(?P<gap>[ \t]*)(?P<bracket>\[[^\]\n{{}}]*\])?(?P<space>[ \t]*)"
    r"(?P<rest>.*)"
)
_COUNT = re.compile(r"\d|\bN\b|\[:?[,|\t]?\]")  # of a bracket: a number, N or none
_BRACKET = re.compile(r"\[[ #]*(?P<count>\d*|[A-Za-z]+)(?P<keyed>:?)(?P<delimiter>[,|\t;]?) *\]")
_KEY_LINE = re.compile(rf"[ \t]*(?:- +)?(?P<key>{_KEY})[ \t]*:(?:[ \t]+(?P<value>\S.*)|[ \t]*)$")
FENCE = re.compile(r"[ \t]*(?:`{3,}|~{3,})[\w+-]*[ \t]*$")


class AmbiguousTextError(Exception):
    """A text has two readings; the argument is the reason in one word."""


@dataclass(frozen=True)
class Header:
    """A line that opens an array: `- users[2|]{id|name}:`, as written, with any spacing, with or without count and colon."""

    indent: str
    hyphen: str
    key: str
    gap: str  # white space before the bracket, a defect
    bracket: str | None  # with its brackets
    space: str  # white space before the braces, a defect
    fields: str | None  # between the outer braces
    colon: str  # with the white space before it; "" where it is missing
    rest: str  # values on the same line

    @cached_property
    def parts(self) -> re.Match[str] | None:
        return _BRACKET.fullmatch(self.bracket) if self.bracket else None

    @cached_property
    def count(self) -> int | None:
        """Return the declared number of rows; None where it is missing or a letter."""
        digits = self.parts["count"] if self.parts else ""
        return int(digits) if digits.isdigit() and len(digits) < 10 else None

    @cached_property
    def keyed(self) -> bool:
        return bool(self.parts and self.parts["keyed"])

    @cached_property
    def delimiter(self) -> str:
        return (self.parts["delimiter"] if self.parts else "") or ","

    @cached_property
    def field_delimiter(self) -> str:
        """Return the only delimiter between the field names, else the declared one."""
        found = [mark for mark in READ_DELIMITERS if len(split_cells(self.fields or "", mark)) > 1]
        return found[0] if len(found) == 1 else self.delimiter

    @cached_property
    def leaves(self) -> int:
        """Return the number of cells of a row: of `id,name,at{x,y}` 4, since a group is its inner fields."""
        return len(split_cells(self.fields or "", self.field_delimiter))

    def declare(self, count: int | None = None, delimiter: str | None = None) -> "Header":
        """Return the header with another count or delimiter."""
        delimiter = self.delimiter if delimiter is None else delimiter
        written = "" if self.parts is None else self.parts["count"]
        text = written if count is None else str(count)
        mark = "" if delimiter == "," else delimiter
        return replace(self, bracket=f"[{text}{':' if self.keyed else ''}{mark}]")

    def write(self) -> str:
        fields = "" if self.fields is None else f"{{{self.fields}}}"
        rest = f" {self.rest}" if self.rest else ""
        return (
            f"{self.indent}{self.hyphen}{self.key}{self.gap}{self.bracket or ''}{self.space}{fields}{self.colon}{rest}"
        )


@dataclass(frozen=True)
class Table:
    """A header with fields and the lines that are its rows, by their indices in the document."""

    start: int  # index of the header
    header: Header
    rows: tuple[int, ...]
    end: int  # index after its last row


@lru_cache(maxsize=4096)  # each rule reads the same lines
def read_header(line: str) -> Header | None:
    """Return the header that a line is; None for any other line."""
    if "[" not in line and "{" not in line:
        return None
    found = _HEADER.fullmatch(line.rstrip(" \t\r"))
    assert found is not None
    bracket, rest, fields = found["bracket"], found["rest"], None
    if bracket is not None and not _BRACKET.fullmatch(bracket):
        return None
    if rest.startswith("{"):
        end = _find_closing_brace(rest)
        if end < 0:
            return None
        fields, rest = rest[1:end], rest[end + 1 :]
    colon = re.match(r"[ \t]*:|", rest)
    assert colon is not None
    rest = rest[colon.end() :].strip()
    if fields is None:
        gap = found["gap"] or found["space"]
        if bracket is None or not colon[0] or gap or not _COUNT.search(bracket):
            return None  # in prose, as "see [1]: ..."
    elif (not found["key"] and bracket is None) or not fields.strip() or rest:
        return None
    return Header(
        found["indent"],
        found["hyphen"] or "",
        found["key"],
        found["gap"],
        bracket,
        found["space"],
        fields,
        colon[0],
        rest,
    )


def _find_closing_brace(text: str) -> int:
    """Return the index of the brace that closes the one at the start of `text`; -1 where there is none."""
    depth = 0
    for token in re.finditer(rf"{QUOTED}|[{{}}]", text):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    return -1


def split_cells(text: str, delimiter: str) -> list[str]:
    """Split on delimiters outside quotes, and strip each cell, as the decoder does."""
    if '"' not in text:
        return [cell.strip(" ") for cell in text.split(delimiter)]
    cells, start, in_quotes, position = [], 0, False, 0
    while position < len(text):
        mark = text[position]
        if in_quotes and mark == "\\":
            position += 1
        elif mark == '"':
            in_quotes = not in_quotes
        elif mark == delimiter and not in_quotes:
            cells.append(text[start:position].strip(" "))
            start = position + 1
        position += 1
    return [*cells, text[start:].strip(" ")]


def has_open_quote(text: str) -> bool:
    return re.sub(QUOTED, "", text).count('"') % 2 == 1


def read_key(line: str) -> tuple[str, str] | None:
    """Return (key, value) of a line `key: value`, the key without quotes; None for other lines, and for headers."""
    found = _KEY_LINE.match(line.rstrip("\r"))
    return None if found is None else (found["key"].strip('"'), (found["value"] or "").strip())


def is_comment(line: str) -> bool:
    return line.lstrip(" \t").startswith("#")


def is_item(line: str) -> bool:
    return re.match(r"[ \t]*-(?: |$)", line) is not None


def measure_indent(line: str) -> int:
    """Return the columns of white space before a line; a tab is one level, as wide as two spaces."""
    return sum(2 if mark == "\t" else 1 for mark in line[: len(line) - len(line.lstrip(" \t"))])


def find_tables(lines: list[str]) -> list[Table]:
    """Return the tables of a document, with the lines that are their rows."""
    tables, index = [], 0
    while index < len(lines):
        header = read_header(lines[index])
        if header is None or header.fields is None:
            index += 1
            continue
        rows = _find_rows(lines, index, header)
        tables.append(Table(index, header, rows, (rows[-1] if rows else index) + 1))
        index = tables[-1].end
    return tables


def _find_rows(lines: list[str], start: int, header: Header) -> tuple[int, ...]:
    """Return the indices of a table's rows.

    They are the lines that are indented deeper than its header, up to a key or another header. Where the first of them is not
    indented, they are those beside the header, up to an empty line, that have as many cells as the header has fields: prose
    that follows may have a comma too.
    """
    base = measure_indent(header.indent) + (2 if header.hyphen else 0)
    rows: list[int] = []
    is_flat = is_apart = has_spaces = False
    for index in range(start + 1, len(lines)):
        line = lines[index]
        if not line.strip() or is_comment(line):
            is_apart |= not line.strip()
            continue
        is_deeper = measure_indent(line) > base
        if not rows:
            is_flat = not is_deeper
        if FENCE.match(line) or is_deeper == is_flat or not _is_row(line, header, is_flat):
            break
        if is_flat:
            is_full = header.leaves == 1 and header.count is not None and len(rows) == header.count
            is_spaced = f"{header.delimiter} " in re.sub(QUOTED, '""', line)
            if is_apart or is_full or (rows and is_spaced and not has_spaces):
                break
            has_spaces |= is_spaced
        rows.append(index)
    return tuple(rows)


def _is_row(line: str, header: Header, is_flat: bool) -> bool:
    if header.keyed:
        return re.search(rf"^[ \t]*(?:{_KEY}|[^\s:]+)[ \t]*:[ \t]*\S", line) is not None and read_header(line) is None
    if ends_rows(line, header.delimiter) or read_header(line) is not None:
        return False
    if not is_flat:
        return True
    widths = {len(split_cells(line, mark)) for mark in READ_DELIMITERS}
    return header.leaves in widths


def ends_rows(line: str, delimiter: str) -> bool:
    """Return whether a line has a colon before its first delimiter, outside quotes: a key, by the format."""
    bare = re.sub(rf'{QUOTED}|".*$', lambda m: "_" * len(m[0]), line)
    colon, split = bare.find(":"), bare.find(delimiter)
    return colon >= 0 and (split < 0 or colon < split)


def split_row(line: str, table_header: Header, delimiter: str | None = None) -> list[str]:
    """Return the cells of a row as written."""
    delimiter = table_header.delimiter if delimiter is None else delimiter
    text = strip_row(line, delimiter)
    if table_header.keyed:
        text = text[re.match(rf"(?:{QUOTED}|[^:])*:?", text).end() :]  # type: ignore[union-attr]
    return split_cells(text.strip(" "), delimiter)


def strip_row(line: str, delimiter: str) -> str:
    """Return a row without indentation and white space at its end; a tab there is an empty cell where tabs are delimiters."""
    text = line.lstrip(" \t")
    return text.rstrip(" ") if delimiter == "\t" else text.rstrip(" \t")
