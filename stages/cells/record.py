"""The base of the records in results/: JSON objects and rows of CSV files, with one reader of each."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.runtime import atomic

DraftSampling = Literal["greedy", "sampled"]
GREEDY: DraftSampling = "greedy"


def name_draft_sampling(samples_drafts: bool) -> DraftSampling:
    return "sampled" if samples_drafts else GREEDY


def limit_draft_sampling(draft_sampling: DraftSampling, temperature: float) -> DraftSampling:
    """Return how drafts are chosen at a temperature: at 0 nothing is sampled."""
    return draft_sampling if temperature else GREEDY


class Record(BaseModel):
    """An object with exactly these keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    def __getitem__(self, name: str) -> Any:
        """Return a field whose name is known at run time only, as a column of a table."""
        return getattr(self, name)

    @classmethod
    def read_json(cls, path: Path, made_by: str, definitions: str | None = None) -> Self:
        """Read a JSON file. Raises ValueError if it is missing, measured by other `definitions`, or no such record."""
        found = atomic.read_json(path, made_by)
        if definitions and (held := found.get("definitions", definitions)) != definitions:
            raise atomic.BrokenArtifactError(
                f"{path} was measured with the definitions of {held}, expected {definitions}",
                atomic.format_rerun_hint(made_by),
            )
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            raise atomic.BrokenArtifactError(
                f"{path} {_explain_error(error)}", atomic.format_rerun_hint(made_by)
            ) from None

    @classmethod
    def write_csv(cls, path: Path, rows: Iterable[Self]) -> None:
        """Write rows of a CSV file. Floats keep every bit, so that figures can be compared between machines."""
        atomic.write_csv(path, tuple(cls.model_fields), (row.model_dump() for row in rows))

    @classmethod
    def read_csv(cls, path: Path, made_by: str) -> list[Self]:
        """Read the rows of a CSV file, empty values as None. Raises ValueError as `read_json`.

        A column whose field has a default may be missing, as such a key of a JSON file, and others are passed over: an earlier
        version wrote other columns.
        """
        with atomic.guard_artifact(path, "CSV", made_by), path.open(newline="", encoding="utf-8") as file:
            lines = csv.DictReader(file)
            columns, rows = lines.fieldnames or (), list(lines)
        if missing := sorted({name for name, field in cls.model_fields.items() if field.is_required()} - set(columns)):
            raise atomic.BrokenArtifactError(f"{path} lacks the columns {missing}", atomic.format_rerun_hint(made_by))
        try:
            known = ({name: text or None for name, text in row.items() if name in cls.model_fields} for row in rows)
            found = [cls.model_validate(row) for row in known]
        except ValidationError as error:
            raise atomic.BrokenArtifactError(
                f"{path} has a line that {_explain_error(error)}", atomic.format_rerun_hint(made_by)
            ) from None
        if any(isinstance(value, float) and not math.isfinite(value) for row in found for value in vars(row).values()):
            raise atomic.BrokenArtifactError(
                f"{path} holds NaN or infinity, expected numbers", atomic.format_rerun_hint(made_by)
            )
        return found


@dataclass(frozen=True)
class Column:
    """Where a field of a row comes from, and how the terminal and the page show it."""

    heading: tuple[str, str] | None = None  # two lines; None: in the CSV alone
    # in the record that the row is of, by attributes: "acceptance.tau"; of a list the mean over its items
    source: str = ""
    decimals: int = 2
    factor: float = 1.0
    suffix: str = ""
    ends: tuple[str, str] | None = None  # the fields of its interval, shown behind it
    is_spread: bool = False  # the interval is shown as "± 0.21"
    high: str = ""  # of an interval that has a column of its own, whose field is its low end: the field of its high end
    on_page_only: bool = False  # too many for a terminal


class TableRow(Record):
    """A row of a CSV table of the report: the one list of its columns, each a field annotated with a Column."""

    TABLE: ClassVar[Path]

    @classmethod
    def list_columns(cls) -> dict[str, Column]:
        """Return the columns by field, in order; a field without a Column is in the CSV alone."""
        found = {name: [m for m in field.metadata if isinstance(m, Column)] for name, field in cls.model_fields.items()}
        return {name: columns[0] for name, columns in found.items() if columns}

    @classmethod
    def read_sources(cls, record: object) -> dict[str, Any]:
        """Return the values that a record holds by the columns' sources; None where a part of it is None."""
        columns = cls.list_columns().items()
        return {name: _read_source(record, column.source.split(".")) for name, column in columns if column.source}

    @classmethod
    def read_table(cls) -> list[Self]:
        """Return the rows of the table. Raises ValueError naming the command to run, if it is missing or broken."""
        return cls.read_csv(cls.TABLE, "report")

    @classmethod
    def write_table(cls, rows: Iterable[Self]) -> None:
        cls.write_csv(cls.TABLE, rows)


def _read_source(record: Any, path: list[str]) -> Any:
    if record is None or not path:
        return record
    if isinstance(record, list):
        known = [value for item in record if (value := _read_source(item, path)) is not None]
        return fmean(known) if known else None  # a repeat without answers has no latency
    return _read_source(getattr(record, path[0]), path[1:])


def _explain_error(error: ValidationError) -> str:
    """Return what is missing, or the first wrong value; indices of lists are left out."""
    keys = [".".join(part for part in e["loc"] if isinstance(part, str)) for e in error.errors()]
    if missing := {key for key, e in zip(keys, error.errors(), strict=True) if e["type"] == "missing"}:
        return f"lacks {sorted(missing)}; it was cut or written by another version"
    first = error.errors()[0]
    return f"holds a wrong {keys[0]}: {first['msg']}, found {first['input']!r:.60}"
