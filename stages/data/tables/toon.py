"""Validate TOON answers with a strict decoder and, where there is one, a schema; repair them where there is one reading.

TOON has YAML-like keys above CSV-like tables that declare their row count: `days[3]{date,low}:`, then three rows. Models write
it with small defects, which non-strict decoders accept by losing data: rows vanish, columns shift. Here an answer is accepted
only if `toon_format.loads` (spec 4.4, always strict) accepts it, and the schema. A repair may change how a table is written,
never its values; where two readings are possible, the answer is dropped with a reason. docs/data.md lists the rules.
"""

import re
from typing import Any, Literal

import toon_format

from stages.data.tables import json_answers
from stages.data.tables.json_repairs import BrokenJsonError
from stages.data.tables.schema_check import (
    JudgedAnswer,
    SchemaMismatchError,
    conform_document,
    drop,
    find_asked_rows,
    judge,
    name_surroundings,
)
from stages.data.tables.table_schema import TableFile
from stages.data.tables.toon_document import FoundDocument, locate_document
from stages.data.tables.toon_lines import AmbiguousTextError, find_tables, read_header, split_row
from stages.data.tables.toon_repairs import REPAIR_RULES, RepairContext, may_be_cut


def repair_toon(
    text: str, surrounding: Literal["strip", "keep"], schema: TableFile | None = None, question: str | None = None
) -> JudgedAnswer:
    """Return an answer as clean, repaired or dropped. A clean or repaired text is clean when judged again.

    Args:
        surrounding: whether to strip fences and prose around the document. With "keep" they are part of the answer and no
            defect.
        schema: what the document must have; None accepts any document with a table, a list or several keys.
        question: where the schema's `rows.asked` finds the number of rows.
    """
    _, problem, changes = _check(text, schema, question)
    is_clean = problem is None and not changes
    if is_clean and schema is not None:
        return JudgedAnswer(text, "clean")
    try:
        document = _find_json(text) or locate_document(text, schema)
        if is_clean and not (document.before or document.after or document.rules):
            return JudgedAnswer(text, "clean")
        return _repair(text, document, surrounding, schema, question)
    except (AmbiguousTextError, SchemaMismatchError) as error:
        return drop(text, str(error))


def _find_json(text: str) -> FoundDocument | None:
    """Return JSON, given instead of TOON, as TOON; None where the answer holds no JSON."""
    if not re.search(r'^[ \t]*(?:\{|\[[ \t]*(?:[\[{"]|$))', text, re.MULTILINE):
        return None
    try:
        found = json_answers.locate_json(text)
    except BrokenJsonError:  # its lines would pass as keys of TOON
        raise AmbiguousTextError("not_toon") from None
    if found is None or found.lead.strip() or found.tail.strip():
        return None
    table = _write(found.value, ",")
    return FoundDocument(found.before, table.split("\n"), found.after, rules=[*found.rules, "json"])


def _write(document: Any, delimiter: str) -> str:
    try:
        return str(toon_format.dumps(document, delimiter=delimiter))
    except (ValueError, RecursionError):  # half a surrogate pair, or nested too deep
        raise AmbiguousTextError("not_toon") from None


def _repair(
    text: str,
    document: FoundDocument,
    surrounding: Literal["strip", "keep"],
    schema: TableFile | None,
    question: str | None,
) -> JudgedAnswer:
    """Apply the rules in their order until the document is accepted."""
    applied = name_surroundings([*document.before, *document.after]) if surrounding == "strip" else []
    applied += document.rules
    lines, work = document.lines, RepairContext(schema, question, document.is_ended)
    made, problem, changes = _check("\n".join(lines), schema, question)
    for name, rule in REPAIR_RULES.items():
        if problem is None:
            break
        changed = rule(lines, work)
        if changed != lines:
            lines = changed
            made, problem, changes = _check("\n".join(lines), schema, question)
            applied.append(name)
    if problem is not None:
        return drop(text, _explain_undecodable(lines, work) if problem == "not_toon" else problem)
    if document.is_open and schema is None and not work.was_cut and may_be_cut(lines):
        return drop(text, "count_or_cut")
    table = "\n".join(lines)
    if changes:
        tables = find_tables(lines)
        mark = tables[0].header.delimiter if tables else ","
        table = _write(made, mark)
        applied += [change for change in changes if change not in applied]
    if surrounding == "keep":
        before = document.before
        if "json" in applied:  # the content of the fence is TOON now
            before = [line.replace("```json", "```toon") for line in before]
        table = "\n".join([*before, table, *document.after])
    return judge(text, table, applied)


def _check(text: str, schema: TableFile | None, question: str | None) -> tuple[Any, str | None, list[str]]:
    """Return (the document, why it is not accepted in one word or None, what the schema changes in it)."""
    try:
        document = toon_format.loads(text)
    except (toon_format.ToonDecodeError, ValueError, RecursionError):
        return None, "not_toon", []
    changes: list[str] = []
    if schema is not None:
        try:
            document, changes = conform_document(document, schema, question)
        except SchemaMismatchError as error:
            return None, str(error), []
    elif "- [" in text and any(re.match(r"\s*- +\[", line) and read_header(line) is None for line in text.split("\n")):
        return None, "not_toon", []  # a header that was cut, which decodes as text
    elif not _has_structure(document, text):
        return None, "no_table", []
    elif "\N{MINUS SIGN}" in text and _has_minus_number(document):
        return None, "minus_or_text", []
    # These decode too, but decoders before spec 4 differ on comments, and a draft should not learn carriage returns.
    is_untidy = "\r" in text or re.search(r"^[ \t]*#", text, re.MULTILINE)
    return document, "untidy" if is_untidy else None, changes


def _has_structure(document: Any, text: str) -> bool:
    """Return whether a document is more than a line of prose with a colon, which decodes as one key."""
    if isinstance(document, list):
        return bool(document)
    if not isinstance(document, dict) or not document:
        return False
    value = next(iter(document.values()))
    return len(document) > 1 or not isinstance(value, str) or " " not in value or text.rstrip().endswith('"')


def _has_minus_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_minus_number, value.values()))
    if isinstance(value, list):
        return any(map(_has_minus_number, value))
    return isinstance(value, str) and re.fullmatch("\N{MINUS SIGN}\\d[\\d.]*", value) is not None


def _explain_undecodable(lines: list[str], work: RepairContext) -> str:
    """Return why a document that no rule could repair does not decode; the most specific reason wins."""
    tables = find_tables(lines)
    names = [table.header.key for table in tables if not table.header.indent]
    if len(set(names)) != len(names):
        return "repeated_table"
    if not tables or not any(table.rows for table in tables):
        is_list = work.schema is None and any(read_header(line) for line in lines)
        return "row_count" if tables and work.schema is None else "not_toon" if is_list else "no_table"
    for table in tables:
        if any(len(split_row(lines[row], table.header)) != table.header.leaves for row in table.rows):
            return "row_width"
    for table in tables:
        if table.header.count != len(table.rows):
            schema = work.find_table(table.header)
            has_rule = schema and schema.rows.asked is not None
            is_unsure = schema and has_rule and find_asked_rows(schema.rows, work.question) is None
            return "count_unsure" if is_unsure else "row_count"
    return "not_toon"
