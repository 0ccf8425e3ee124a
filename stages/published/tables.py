"""published/*.yaml: what others printed, number by number, each with its source, setting and definition.

A file holds tables as they were printed; `read_publication` returns a PublishedRow for every number. A column of a
table is a setting (`tree`), a metric (`tau`), or a metric on a data set (`tau @ GSM8K`). In a row's setting, None means
that it can't apply (plain decoding has no tree), UNKNOWN that the source does not state it.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from stages.runtime import guarded_yaml

PUBLISHED_FOLDER = Path("published")
# The metrics of docs/metrics.md that a published table may have by these names.
METRICS = (
    "tau", "accept_rate", "node_accept_rate", "prefill_latency_s", "e2e_latency_s", "output_tok_s", "baseline_output_tok_s",
    "speedup", "identical_share",
)  # fmt: skip
UNKNOWN: Literal["unknown"] = "unknown"
MEAN_DATASET = "mean"  # the data set of a printed mean over a table's data sets


def normalise_model_name(model: str | None) -> str:
    """Return a model's name in lower case without its owner or folder, and without the suffix "-instruct"."""
    return (model or "").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-instruct")


# The schema of a file


class _FileSection(BaseModel):
    """Keys and values of a file. Other keys than the fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SettingNumber = Annotated[float, Field(strict=True, ge=0)] | Literal["unknown"] | None
SettingWords = StrictStr | None  # 8_2_16 without quotes is an integer in YAML
# t<num_steps>_<topk>_<num_draft_tokens>, the root counted, as in docs/metrics.md
SettingTree = Annotated[str, Field(strict=True, pattern=rf"^(t\d+_\d+_\d+|{UNKNOWN})$")] | None


class PublishedSetting(_FileSection):
    """The setting of a row. A file, a table and a row each give some of the keys, together all."""

    target: SettingWords = None
    draft: SettingWords = None
    method: SettingWords = None  # "plain" is decoding without speculation
    engine: SettingWords = None
    engine_version: SettingWords = None
    hardware: SettingWords = None
    precision: SettingWords = None
    tree: SettingTree = None
    temperature: SettingNumber = None
    drafting: SettingWords = None  # "greedy" or "sampled": how drafts are drawn above temperature 0; at 0 both are one
    thinking: SettingWords = None  # "on" or "off"; None for a target without the mode
    dataset: SettingWords = None
    prompts: SettingNumber = None
    input_tokens: SettingNumber = None
    output_tokens: SettingNumber = None
    batch: SettingNumber = None
    concurrency: SettingNumber = None
    request_rate: SettingNumber = None  # requests per second; infinite where all are sent at once
    label: SettingWords = None  # the row's own name, as printed


SETTING_NAMES = tuple(PublishedSetting.model_fields)


class PublishedMetric(_FileSection):
    printed: str  # its name there
    unit: str
    decimals: Annotated[StrictInt, Field(ge=0)]  # the most that are printed: a value is right to half of the last
    definition: str  # the metric's own name where METRICS defines it, UNKNOWN, or the source's words
    note: str = ""


class _Source(_FileSection):
    document: str
    url: str
    date: Any


class _Table(_FileSection):
    where: str
    columns: list[StrictStr]
    settings: PublishedSetting = PublishedSetting()
    rows: list[list[Any]]


class _Publication(_FileSection):
    title: str
    source: _Source
    notes: list[str]
    settings: PublishedSetting
    metrics: dict[str, PublishedMetric]
    tables: list[_Table]

    @model_validator(mode="after")
    def _check_definitions(self) -> Self:
        for name, metric in self.metrics.items():
            own = [name] if name in METRICS else []
            if re.fullmatch(r"\w+", metric.definition) and metric.definition not in (*own, UNKNOWN):
                expected = ", ".join([*own, UNKNOWN])
                raise ValueError(f"{name}.definition: expected {expected} or a sentence, found {metric.definition!r}")
        return self


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


def read_publications(folder: Path = PUBLISHED_FOLDER) -> dict[str, list[PublishedRow]]:
    """Return the rows of every publication by its name. Raises ValueError for the first defect, naming its location."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"{folder} holds no publication, expected NAME.yaml files; restore it: git checkout {folder}")
    return {file.stem: read_publication(file) for file in files}


def read_publication(path: Path) -> list[PublishedRow]:
    """Return the rows of one publication. Raises ValueError for the first defect: what was expected and found, and where."""
    try:
        file = _Publication.model_validate(guarded_yaml.read_yaml(path, path.parent))
    except FileNotFoundError:
        raise ValueError(f"{path} not found; restore it: git checkout {path}") from None
    except ValidationError as error:
        raise ValueError(guarded_yaml.explain_schema_errors(error, str(path))) from None
    named = [(table, f"{path}: tables[{n}]") for n, table in enumerate(file.tables)]
    rows = [row for table, name in named for row in _read_table(path, file, table, name)]
    if unused := ", ".join(sorted(set(file.metrics) - {row.metric for row in rows})):
        raise ValueError(f"{path}: metrics: no table has {unused}; name the column so, or leave it out")
    return rows


def _read_table(path: Path, file: _Publication, table: _Table, where: str) -> Iterator[PublishedRow]:
    columns = [_parse_column(column, file.metrics, f"{where}.columns") for column in table.columns]
    shared = file.settings.model_dump(exclude_unset=True) | table.settings.model_dump(exclude_unset=True)
    for n, values in enumerate(table.rows):
        location = f"{where}.rows[{n}]"
        if len(values) != len(columns):
            raise ValueError(f"{location}: expected {len(columns)} values, one a column, found {len(values)}")
        cells = list(zip(columns, values, strict=True))
        own = {name: value for (name, _), value in cells if name in SETTING_NAMES}
        numbers = [(column, value) for column, value in cells if column[0] not in own and value is not None]
        if not numbers:
            raise ValueError(f"{location}: expected at least one number, found none; give one, or leave the row out")
        for (name, dataset), value in numbers:
            metric = file.metrics[name]
            yield PublishedRow(
                publication=path.stem,
                where=table.where,
                setting=_build_setting(shared | own | ({"dataset": dataset} if dataset else {}), location),
                metric=name,
                value=_parse_number(value, metric, f"{location}: {name}"),
                decimals=metric.decimals,
                unit=metric.unit,
                definition=metric.definition,
            )


def _parse_column(column: str, metrics: dict[str, PublishedMetric], where: str) -> tuple[str, str]:
    """Return (name, the data set it is on, or "")."""
    name, _, dataset = column.partition(" @ ")
    if name not in metrics and (dataset or name not in SETTING_NAMES):
        known = ", ".join((*metrics, *SETTING_NAMES))
        raise ValueError(f"{where}: expected a metric or a setting ({known}), found {column!r}; correct it")
    return name, dataset


def _build_setting(values: dict[str, Any], where: str) -> PublishedSetting:
    if missing := [key for key in SETTING_NAMES if key not in values]:
        raise ValueError(f"{where}: no {', '.join(missing)}; give it, or null, or {UNKNOWN}, under settings")
    try:
        return PublishedSetting.model_validate(values)
    except ValidationError as error:
        raise ValueError(guarded_yaml.explain_schema_errors(error, where)) from None


def _parse_number(value: Any, metric: PublishedMetric, where: str) -> float:
    """Return the number. One with more decimals than are printed is a slip of the copyist, and an error."""
    number = math.nan
    with suppress(ValueError, TypeError):
        number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a number, or null where none is printed, found {value!r}; correct it")
    if round(number, metric.decimals) != number:
        raise ValueError(f"{where}: expected at most {metric.decimals} decimals, found {value}; correct one of the two")
    return number
