"""Name a row by its position in the raw data: in messages, and in reports.

A module of its own, so that another form wakes only the stages that name rows.
"""


def describe_origin(source: str, source_row: int) -> str:
    """Return the file, as seen from fix_data.raw, and the row in it, counted from 0."""
    return f"{source}, row {source_row}"
