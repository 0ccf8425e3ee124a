"""published/*.yaml: what others printed, number by number, each with its source, setting and definition.

A file holds tables as they were printed; `read_publication` returns a PublishedRow for every number. A column of a
table is a setting (`tree`), a metric (`tau`), or a metric on a data set (`tau @ GSM8K`); a table of many rows may be a
CSV file in the same folder. In a row's setting, None means that it can't apply (plain decoding has no tree), UNKNOWN
that the source does not state it.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictInt,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.results import torch_records

PUBLISHED_FOLDER = Path("published")
UNKNOWN: Literal["unknown"] = "unknown"
MEAN_DATASET = "mean"  # the data set of a printed mean over a table's data sets
TREE_PATTERN = re.compile(r"t(\d+)_(\d+)_(\d+)")
# A column of SpecForge's CSV: batch, num_steps, topk, num_draft_tokens as "8,3,1,4".
BATCH_AND_TREE = "batch_and_tree"


# Settings


def _check_number(value: Any) -> Any:
    if value is None or value == UNKNOWN:
        return value
    if type(value) not in (int, float) or math.isnan(value) or value < 0:
        raise ValueError(f"expected a number, null or {UNKNOWN}, found {value!r}; correct it")
    return float(value)


def _check_words(value: Any) -> Any:
    if value is not None and not isinstance(value, str):  # 8_2_16 without quotes is an integer in YAML
        raise ValueError(f"expected words, null or {UNKNOWN}, found {value!r}; quote it")
    return value


def _check_tree_name(value: Any) -> Any:
    if _check_words(value) not in (None, UNKNOWN) and not TREE_PATTERN.fullmatch(value):
        raise ValueError(f"expected t<num_steps>_<topk>_<num_draft_tokens>, found {value!r}; correct it")
    return value


SettingNumber = Annotated[float | Literal["unknown"] | None, PlainValidator(_check_number)]
SettingWords = Annotated[str | None, PlainValidator(_check_words)]
SettingTree = Annotated[str | None, PlainValidator(_check_tree_name)]


@dataclass(frozen=True)
class PublishedSetting:
    target: SettingWords
    draft: SettingWords
    method: SettingWords  # "plain" is decoding without speculation
    engine: SettingWords
    engine_version: SettingWords
    hardware: SettingWords
    precision: SettingWords
    tree: SettingTree  # t<num_steps>_<topk>_<num_draft_tokens>, the root counted, as in docs/metrics.md
    temperature: SettingNumber
    dataset: SettingWords
    prompts: SettingNumber
    input_tokens: SettingNumber
    output_tokens: SettingNumber
    batch: SettingNumber
    concurrency: SettingNumber
    request_rate: SettingNumber  # requests per second; infinite where all are sent at once
    label: SettingWords  # the row's own name, as printed


SETTING_NAMES = tuple(field.name for field in fields(PublishedSetting))


# The schema of a file


class _FileSection(BaseModel):
    """Keys and values of a file. Other keys than the fields are errors."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            raise ValueError(f"expected keys and values, found {found!r}; correct it")
        if unknown := [key for key in found if key not in cls.model_fields]:
            raise ValueError(f"expected {', '.join(cls.model_fields)}, found {unknown}; correct it")
        return found


# Some of a PublishedSetting's fields, as a file, a table or a row gives them.
_SettingValues: Any = create_model(
    "_SettingValues", __base__=_FileSection, **{field.name: (field.type, None) for field in fields(PublishedSetting)}
)  # type: ignore[call-overload]


class PublishedMetric(_FileSection):
    printed: str  # its name there
    unit: str
    decimals: Annotated[StrictInt, Field(ge=0)]  # the most that are printed: a value is right to half of the last
    definition: str  # the metric's own name where torch_records.METRICS defines it, UNKNOWN, or the source's words
    note: str = ""


class _Source(_FileSection):
    document: str
    url: str
    date: Any


class _Table(_FileSection):
    where: str
    columns: list[Any]
    settings: _SettingValues = Field(default_factory=_SettingValues)
    rows: list[Any] | None = None
    csv: str | None = None

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.rows is None) == (self.csv is None):
            raise ValueError(f"expected rows or csv, found {'no rows' if self.rows is None else 'both'}; correct it")
        return self


class _PublicationFile(_FileSection):
    title: str
    source: _Source
    notes: list[str]
    settings: _SettingValues
    metrics: dict[str, PublishedMetric]
    tables: list[_Table]

    @field_validator("metrics")
    @classmethod
    def _check_definitions(cls, metrics: dict[str, PublishedMetric]) -> dict[str, PublishedMetric]:
        for name, metric in metrics.items():
            if re.fullmatch(r"\w+", metric.definition) and metric.definition not in (name, UNKNOWN):
                raise ValueError(
                    f"{name}.definition: expected {name}, {UNKNOWN} or a sentence, found {metric.definition!r}"
                )
            if metric.definition == name and name not in torch_records.METRICS:
                known = ", ".join(torch_records.METRICS)
                raise ValueError(
                    f"{name}.definition: expected one of our metrics ({known}), found {name}; say it in words, or {UNKNOWN}"
                )
        return metrics


_EXPECTED = {  # pydantic's type of error -> what a file must have there, and what to do
    "string_type": ("words", "quote it"),
    "list_type": ("a list", "begin each of its lines with a dash"),
    "dict_type": ("keys and values", "correct it"),
    "int_type": ("a count of digits", "count them"),
    "greater_than_equal": ("a count of digits", "count them"),
}


def _explain_error(error: ValidationError, where: str) -> str:
    """Return the first error in one line: its place below `where`, what was expected, what was found, what to do."""
    first = error.errors()[0]
    *parents, last = first["loc"] or ("",)
    if first["type"] == "missing":
        return f"{_join_place(where, parents)}: expected {last}, found no {last}; add it"
    place = _join_place(where, first["loc"])
    if first["type"] in _EXPECTED:
        expected, remedy = _EXPECTED[first["type"]]
        return f"{place}: expected {expected}, found {first['input']!r}; {remedy}"
    return f"{place}: {first['ctx']['error'] if 'error' in first.get('ctx', {}) else first['msg']}"


def _join_place(where: str, keys: Any) -> str:
    """Return `where` with keys and indices: small.yaml: tables[0].where."""
    place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")
    return ": ".join(filter(None, (where, place)))


# Publications


@dataclass(frozen=True)
class PublishedRow:
    """One printed number."""

    publication: str  # the file's stem
    where: str  # the table in the source
    setting: PublishedSetting
    metric: str
    value: float
    decimals: int
    unit: str
    definition: str
    source: str


@dataclass(frozen=True)
class Publication:
    name: str  # the file's stem
    title: str
    document: str
    url: str
    date: str
    notes: tuple[str, ...]
    metrics: dict[str, PublishedMetric]
    rows: tuple[PublishedRow, ...]


def read_publications(folder: Path = PUBLISHED_FOLDER) -> dict[str, Publication]:
    """Return every publication by name.

    Raises:
        ValueError: for the first defect, naming its place.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"{folder} holds no publication, expected NAME.yaml files; restore it: git checkout {folder}")
    return {file.stem: read_publication(file) for file in files}


def read_publication(path: Path) -> Publication:
    """Return one publication.

    Raises:
        ValueError: for the first defect: what was expected, what was found, and where.
    """
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        file = _PublicationFile.model_validate(content)
    except FileNotFoundError:
        raise ValueError(f"{path} not found; restore it: git checkout {path}") from None
    except ValidationError as error:
        raise ValueError(_explain_error(error, str(path))) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML, correct it: {error}") from None
    rows = [
        row for n, table in enumerate(file.tables) for row in _read_table(path, file, table, f"{path}: tables[{n}]")
    ]
    if unused := set(file.metrics) - {row.metric for row in rows}:
        raise ValueError(
            f"{path}: metrics: no table has {', '.join(sorted(unused))}; name the column so, or leave the metric out"
        )
    source = file.source
    return Publication(
        path.stem,
        file.title,
        source.document,
        source.url,
        str(source.date),
        tuple(file.notes),
        file.metrics,
        tuple(rows),
    )


def parse_tree(setting: PublishedSetting) -> tuple[int, int, int] | None:
    """Return (num_steps, topk, num_draft_tokens); None where the setting has no tree, or none is stated."""
    match = TREE_PATTERN.fullmatch(setting.tree or "")
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _read_table(path: Path, file: _PublicationFile, table: _Table, where: str) -> Iterator[PublishedRow]:
    columns = [_parse_column(column, file.metrics, f"{where}.columns") for column in table.columns]
    shared = file.settings.model_dump(exclude_unset=True) | table.settings.model_dump(exclude_unset=True)
    csv_file = path.parent / table.csv if table.csv else None
    for n, values in enumerate(_read_csv(csv_file) if csv_file else table.rows or ()):
        place = f"{csv_file}, row {n + 1}" if csv_file else f"{where}.rows[{n}]"
        if not isinstance(values, list) or len(values) != len(columns):
            found = len(values) if isinstance(values, list) else repr(values)
            raise ValueError(f"{place}: expected {len(columns)} values, one a column, found {found}; see {path}")
        own, numbers = _split_values(columns, values, place)
        for name, dataset, value in numbers:
            setting = shared | own | ({"dataset": dataset} if dataset else {})
            if missing := [key for key in SETTING_NAMES if key not in setting]:
                raise ValueError(f"{place}: no {', '.join(missing)}; give it, or null, or {UNKNOWN}, under settings")
            metric = file.metrics[name]
            yield PublishedRow(
                publication=path.stem,
                where=table.where,
                setting=PublishedSetting(**setting),
                metric=name,
                value=_parse_number(value, metric, f"{place}: {name}"),
                decimals=metric.decimals,
                unit=metric.unit,
                definition=metric.definition,
                source=f"{file.source.document}: {table.where}",
            )


def _parse_column(column: Any, metrics: dict[str, PublishedMetric], where: str) -> tuple[str, str]:
    """Return (name, the data set it is on, or "")."""
    name, _, dataset = str(column).partition(" @ ")
    if name not in metrics and (dataset or name not in (*SETTING_NAMES, BATCH_AND_TREE)):
        known = ", ".join((*metrics, *SETTING_NAMES))
        raise ValueError(f"{where}: expected a metric or a setting ({known}), found {column!r}; correct it")
    return name, dataset


def _split_values(
    columns: list[tuple[str, str]], values: list[Any], where: str
) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """Return a row's settings, and its numbers as (metric, data set, value). null is a number that was not printed."""
    own: dict[str, Any] = {}
    numbers = []
    for (name, dataset), value in zip(columns, values, strict=True):
        if name == BATCH_AND_TREE:
            batch, *shape = _parse_batch_and_tree(value, where)
            own |= {"batch": float(batch), "tree": "t{}_{}_{}".format(*shape)}
        elif name in SETTING_NAMES:
            own[name] = value
        elif value is not None:
            numbers.append((name, dataset, value))
    if not numbers:
        raise ValueError(f"{where}: expected at least one number, found none; give one, or leave the row out")
    try:
        return _SettingValues.model_validate(own).model_dump(exclude_unset=True), numbers
    except ValidationError as error:
        raise ValueError(_explain_error(error, where)) from None


def _parse_batch_and_tree(value: str, where: str) -> list[int]:
    match = re.fullmatch(r"(\d+),(\d+),(\d+),(\d+)", value)
    if not match:
        raise ValueError(f"{where}: expected batch,num_steps,topk,num_draft_tokens as 8,3,1,4, found {value!r}")
    return [int(part) for part in match.groups()]


def _parse_number(value: Any, metric: PublishedMetric, where: str) -> float:
    """Return the number. One with more decimals than are printed is a slip of the copyist, and an error."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a number, or null where none is printed, found {value!r}; correct it")
    if round(number, metric.decimals) != number:
        raise ValueError(f"{where}: expected at most {metric.decimals} decimals, found {value}; correct one of the two")
    return number


def _read_csv(path: Path) -> list[list[str]]:
    """Return the rows below the heading."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return list(csv.reader(lines))[1:]
    except FileNotFoundError:
        raise ValueError(f"{path} not found; restore it: git checkout {path}") from None
