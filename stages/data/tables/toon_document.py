"""Locate a TOON document in an answer: between fences, or the lines of its structure among lines of prose.

A line of prose that ends in a colon, or begins with a word and a colon, looks like a key. With a schema the names decide.
Without one, keys that hold spaces are prose, since the format quotes them, and what stays doubtful is dropped.
"""

import re
from dataclasses import dataclass, field

from stages.data.tables.schema_check import find_fenced_blocks, is_fence
from stages.data.tables.table_schema import ObjectValue, TableFile, list_parts
from stages.data.tables.toon_lines import (
    READ_DELIMITERS,
    AmbiguousTextError,
    Table,
    find_tables,
    is_comment,
    measure_indent,
    read_header,
    read_key,
    split_cells,
)

_LOOSE_KEY = re.compile(r"[ \t]*(?P<key>[^\s:\"`|#-][^:\"`|]*?)[ \t]*:(?:[ \t]+(?P<value>\S.*)|[ \t]*)$")


@dataclass(frozen=True)
class FoundDocument:
    """The lines of an answer: those of the document, and those around it."""

    before: list[str]
    lines: list[str]
    after: list[str]  # and what was between two parts of the document
    rules: list[str] = field(default_factory=list)  # applied already
    is_ended: bool = True  # something follows the document: no token limit cut it
    is_open: bool = False  # a fence is open at the end: its last value may be cut


def locate_document(text: str, schema: TableFile | None) -> FoundDocument:
    """Return the document in an answer.

    Raises:
        AmbiguousTextError: where there is none, or prose can't be told from data.
    """
    lines = text.split("\n")
    names = None if schema is None else _list_names(schema)
    first, last = 0, len(lines)
    blocks = [
        (start, end) for start, end in find_fenced_blocks(lines) if _mark_structure(lines[start:end], names, schema)
    ]
    if len(blocks) > 1:
        return _join_blocks(lines, blocks)
    if blocks:
        first, last = blocks[0]
        if any(table.rows for part in (lines[:first], lines[last:]) for table in find_tables(part)):
            raise AmbiguousTextError("repeated_table")
    inner = lines[first:last]
    marked = _mark_structure(inner, names, schema)
    if not marked:
        raise AmbiguousTextError("no_table")
    start, end = min(marked), max(marked) + 1
    document, between = _remove_prose_between(inner, start, end, marked)
    after = inner[end:]
    _check_lost_rows(inner, after, end)
    if schema is None and not blocks:
        _check_edges(document)
        header = read_header(document[0])
        if header is not None and not header.key and header.rest and (inner[:start] or after or len(document) > 1):
            raise AmbiguousTextError("no_table")  # a footnote: [1]: ...
    before = [*lines[:first], *inner[:start]]
    rest = [*between, *after, *lines[last:]]
    is_ended = bool([*after, *lines[last:]])
    return FoundDocument(before, document, rest, is_ended=is_ended, is_open=bool(blocks) and not is_ended)


def _list_names(schema: TableFile) -> set[str]:
    """Return the names that the document's own keys may have; "" for a table or list without a name."""
    if not isinstance(schema.document, ObjectValue):
        return {""}
    parts = list_parts(schema.document)
    return {*parts, *(other for part in parts.values() for other in part.names)}


def _join_blocks(lines: list[str], blocks: list[tuple[int, int]]) -> FoundDocument:
    """Return the document of several fenced blocks, where each has keys of its own."""
    parts = [[line for line in lines[start:end] if line.strip()] for start, end in blocks]
    keys = [name for part in parts for name in _list_root_keys(part)]
    if len(set(keys)) != len(keys) or "" in keys:
        raise AmbiguousTextError("repeated_table")
    inside = {index for start, end in blocks for index in range(start, end)}
    outside = [line for index, line in enumerate(lines) if index not in inside]
    is_ended = blocks[-1][1] < len(lines)
    joined = [line for part in parts for line in part]
    return FoundDocument(outside, joined, [], is_ended=is_ended, is_open=not is_ended)


def _list_root_keys(lines: list[str]) -> list[str]:
    base = min(map(measure_indent, lines), default=0)
    rows = {row for table in find_tables(lines) for row in table.rows}
    keys = []
    for index, line in enumerate(lines):
        header, key = read_header(line), read_key(line)
        if index not in rows and measure_indent(line) == base and (header or key):
            keys.append(header.key.strip('"') if header else str(key[0]) if key else "")
    return keys


def _mark_structure(lines: list[str], names: set[str] | None, schema: TableFile | None) -> set[int]:
    """Return the indices of lines that belong to a document: headers, rows, keys, and what is indented below them."""
    marked: set[int] = set()
    tables = {table.start: table for table in find_tables(lines)}
    rows = {row for table in tables.values() for row in table.rows}
    depth: int | None = None  # of the open key or list: deeper lines are its content
    for index, line in enumerate(lines):
        if index in rows:
            marked.add(index)
            continue
        if not line.strip() or is_fence(line) or is_comment(line):
            continue
        indent = measure_indent(line)
        if depth is not None and indent > depth:
            marked.add(index)
            continue
        depth = None
        header, key = tables[index].header if index in tables else read_header(line), read_key(line)
        name = header.key.strip('"') if header else key[0] if key else None
        if name is None and not _is_open_item(lines, index, marked):
            continue
        if name is not None and names is not None and name not in names:
            continue
        marked.add(index)
        if index not in tables and ((header is not None and not header.rest) or (key is not None and not key[1])):
            depth = indent
    return marked


def _is_open_item(lines: list[str], index: int, marked: set[int]) -> bool:
    """Return whether a line is an item of a list whose header is not indented less: `items[2]:` above `- a`."""
    if not re.match(r"[ \t]*-(?: |$)", lines[index]) or index - 1 not in marked:
        return False
    above = read_header(lines[index - 1])
    return (above is not None and above.fields is None) or re.match(r"[ \t]*-(?: |$)", lines[index - 1]) is not None


def _remove_prose_between(lines: list[str], start: int, end: int, marked: set[int]) -> tuple[list[str], list[str]]:
    """Return (the document's lines, lines of prose between its parts). Prose is only what follows a complete table or a key."""
    tables = find_tables(lines)
    owners = {index: table for table in tables for index in (table.start, *table.rows)}
    kept, removed, previous = [], [], start
    for line_index in range(start, end):
        line = lines[line_index]
        is_prose = bool(line.strip()) and line_index not in marked and not is_comment(line)
        table = owners.get(previous)
        previous = line_index if line_index in marked else previous
        is_whole = table is None or table.header.count == len(table.rows)
        loose = _LOOSE_KEY.match(line)
        if (
            is_prose
            and is_whole
            and (loose is None or _is_sentence(loose["value"]))
            and not line.startswith((" ", "\t"))
        ):
            removed.append(line)
        else:
            kept.append(line)
    return kept, removed


def _is_sentence(value: str | None) -> bool:
    """Return whether what follows `some words:` is prose: nothing, or words."""
    return value is None or (" " in value.strip() and re.search(r"[^\W\d]", value) is not None)


def _check_lost_rows(lines: list[str], after: list[str], end: int) -> None:
    """Raise AmbiguousTextError where a line after the document may be a row: cut short, or after a line that ended the table."""
    tables = find_tables(lines)
    last = tables[-1] if tables and tables[-1].end == end else None
    is_whole = last is not None and last.header.count == len(last.rows)
    if last is not None and last.header.leaves == 1 and after and after[0].strip() and not is_fence(after[0]):
        depth = measure_indent(lines[last.rows[-1]]) if last.rows else 0
        if measure_indent(after[0]) == depth:  # of one column, not indented: any line may be a row
            raise AmbiguousTextError("broken_row")
    for line in after:
        if not line.strip() or is_fence(line):
            continue
        if last is not None and _has_width(line, last):
            raise AmbiguousTextError("broken_row")
        if re.match(r"\s+[^\s`]", line) or (not is_whole and re.match(r"[-−]?\d", line)):
            raise AmbiguousTextError("broken_row" if tables else "no_table")


def _has_width(line: str, table: Table) -> bool:
    """Return whether a line has as many cells as a table's rows, where these are many or begin like it."""
    width = table.header.leaves
    readings = [cells for mark in READ_DELIMITERS if len(cells := split_cells(line, mark)) == width]
    if width < 2 or not readings:
        return False
    is_whole = table.header.count == len(table.rows)
    return not is_whole or (", " not in line and any(all(cells) for cells in readings))


def _check_edges(document: list[str]) -> None:
    """Raise AmbiguousTextError for a first or last key that may be a line of prose, as `Note: all in euros`.

    Such a line has words or nothing after its colon and begins with a capital letter where other keys do not, or has a blank
    line beside it.
    """
    rows = {row for table in find_tables(document) for row in table.rows}
    base = min(
        (measure_indent(line) for index, line in enumerate(document) if line.strip() and index not in rows), default=0
    )
    roots = [
        index
        for index, line in enumerate(document)
        if index not in rows and line.strip() and measure_indent(line) == base and (read_header(line) or read_key(line))
    ]
    names = {
        index: (h.key if (h := read_header(document[index])) else str((read_key(document[index]) or ("",))[0]))
        for index in roots
    }
    for edge in (roots, roots[::-1]):
        for index in edge:
            key = None if read_header(document[index]) else read_key(document[index])
            if key is None or document[index].lstrip().startswith('"') or _has_content(document, index, base):
                break
            is_capital = key[0][:1].isupper()
            others = [name for other, name in names.items() if other != index] if is_capital else []
            is_wordy = not key[1] or (" " in key[1] and not key[1].startswith('"'))
            is_apart = any(
                0 <= other < len(document) and not document[other].strip() for other in (index - 1, index + 1)
            )
            if is_capital and is_wordy and (is_apart or all(name[:1].islower() for name in others)):
                raise AmbiguousTextError("prose_or_key")


def _has_content(document: list[str], index: int, base: int) -> bool:
    following = next((line for line in document[index + 1 :] if line.strip()), "")
    return bool(following) and measure_indent(following) > base
