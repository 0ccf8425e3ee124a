"""Apply a column map: which columns of a table, or keys of a row, hold the prompt, the answer and the rest.

`fix_data.columns` of params.yaml, whole or of the row's file, or `columns` of a NAME.hub.yaml, as {prompt: question, answer:
reply}. A row then has the named columns only, under the names of chat_formats.py, and its own id. A name may be a path into
nested values, as response.choices.0.message; a column of that very name goes first.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from stages.data import chat_formats, request_logs
from stages.params.section import suggest_name
from stages.params.units import list_first

TURN_LIST_COLUMNS = frozenset({"history", *(key for keys in chat_formats.TURN_LIST_KEYS.values() for key in keys)})
REQUIRED_ROLES = ("prompt", "messages")  # a row without one of these is no conversation
MAX_SHOWN_COLUMNS = 20


def check_table_columns(found: Sequence[str], columns: dict[str, str] | None, display_name: str, known: bool) -> None:
    """Raise ValueError where a table lacks a named column; with `known`, also where no format is known by its columns."""
    if columns is not None:
        missing = {role: column for role, column in columns.items() if not {column, column.split(".")[0]} & set(found)}
        _check_named(found, missing, f"{display_name}: expected", "columns", columns)
    elif known and chat_formats.detect_format({key: [] for key in found}) is None:
        raise ValueError(
            f"{display_name}: expected columns of a known format ({chat_formats.describe_formats()}), found the columns "
            f"{list_names(found)}; say which of them is which, as columns: {{prompt: COLUMN, answer: COLUMN}} of fix_data or "
            "of the prompt set (the first line of the file must name the columns; docs/data.md)"
        )


def select_columns(row: dict[str, Any], columns: dict[str, str], where: str) -> dict[str, Any]:
    """Return the named columns of a row under their roles, with its own `id`.

    Raises:
        ValueError: where the row lacks the key of a prompt, an answer or messages; others may be missing.
    """
    named = {role: _find_value(row, column) for role, column in columns.items()}
    missing = {role: columns[role] for role in columns if role in REQUIRED_ROLES and named[role] is _MISSING}
    _check_named(list(row), missing, f"{where}: expected", "keys", columns)
    named = {role: value for role, value in named.items() if value is not _MISSING}
    if isinstance(named.get("messages"), str):
        named["messages"] = parse_turn_list(named["messages"])
    return ({"id": row["id"]} if row.get("id") is not None else {}) | named


_MISSING = object()


def _find_value(row: dict[str, Any], column: str) -> Any:
    """Return what a row has under a name, or under a path of names and numbers of elements; _MISSING where it has none."""
    if column in row:
        return row[column]
    value: Any = row
    for step in column.split("."):
        value = request_logs.parse_json(value)
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return _MISSING
    return value


def parse_turn_list(value: Any) -> Any:
    """Return the list that a text holds as JSON, as CSV files and some Parquet files have turns; else `value` itself."""
    turns = request_logs.parse_json(value)
    return turns if isinstance(turns, list) else value


def list_names(names: Iterable[str]) -> str:
    """Return names for a message, the first of many."""
    return list_first((name if name.strip() else repr(name) for name in names), MAX_SHOWN_COLUMNS)


def _check_named(found: Sequence[str], missing: dict[str, str], start: str, noun: str, columns: dict[str, str]) -> None:
    if not missing:
        return
    named = ", ".join(f"{column}{suggest_name(column, found)} (for {role})" for role, column in missing.items())
    given = ", ".join(f"{role}: {column}" for role, column in columns.items())
    raise ValueError(
        f"{start} the {noun} {named}, as the column map {{{given}}} says, found {list_names(found)}; correct the map "
        "(fix_data.columns, which may have a map for each file, or columns of a .hub.yaml), or give another file"
    )
