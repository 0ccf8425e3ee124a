"""published/*.yaml: what others printed, number by number, each with its source, setting and definition.

A file holds tables as they were printed; `read_publication` makes a Row of every number. A column of a table is a setting
(`parse_tree`), a metric (`tau`), or a metric on a data set (`tau @ GSM8K`); a table of many rows may lie beside the file as
CSV. In a row's setting, None says that it can't apply (plain decoding has no tree), UNKNOWN that nobody stated it.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.results import torch_records

PUBLISHED_FOLDER = Path("published")
UNKNOWN: Literal["unknown"] = "unknown"
MEAN_DATASET = "mean"  # the data set of a printed mean over a table's data sets
TREE_PATTERN = re.compile(r"t(\d+)_(\d+)_(\d+)")
# A column of SpecForge's CSV: batch, num_steps, topk, num_draft_tokens as "8,3,1,4".
BATCH_AND_TREE = "batch_and_tree"

SettingNumber = float | Literal["unknown"] | None


@dataclass(frozen=True)
class PublishedSetting:
    target: str | None
    draft: str | None
    method: str | None  # plain is decoding without speculation
    engine: str | None
    engine_version: str | None
    hardware: str | None
    precision: str | None
    tree: str | None  # t<num_steps>_<topk>_<num_draft_tokens>, the root counted, as in docs/metrics.md
    temperature: SettingNumber
    dataset: str | None
    prompts: SettingNumber
    input_tokens: SettingNumber
    output_tokens: SettingNumber
    batch: SettingNumber
    concurrency: SettingNumber
    request_rate: SettingNumber  # requests per second; infinite where all are sent at once
    label: str | None  # the row's own name, as printed


SETTING_NAMES = tuple(field.name for field in fields(PublishedSetting))
NUMBER_SETTINGS = {field.name for field in fields(PublishedSetting) if field.type == SettingNumber}


@dataclass(frozen=True)
class PublishedMetric:
    printed: str  # its name there
    unit: str
    decimals: int  # the most that are printed: a value is right to half of the last
    definition: str  # a name of cell.METRICS where it is ours, UNKNOWN, or the source's words
    note: str = ""


@dataclass(frozen=True)
class PublishedRow:
    what: str  # the file's stem
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
    """Every publication by name. Raises ValueError for the first defect, naming its place."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"{folder} holds no publication, expected NAME.yaml files; restore it: git checkout {folder}")
    return {file.stem: read_publication(file) for file in files}


def read_publication(path: Path) -> Publication:
    """One publication. Raises ValueError for the first defect: what was expected, what was found, where."""
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} not found; restore it: git checkout {path}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML, correct it: {error}") from None
    keys = ("title", "source", "notes", "settings", "metrics", "tables")
    _check_keys(content, keys, (), str(path))
    title, source = _check_text(content["title"], f"{path}: title"), content["source"]
    _check_keys(source, ("document", "url", "date"), (), f"{path}: source")
    document, url = (_check_text(source[key], f"{path}: source.{key}") for key in ("document", "url"))
    notes = [
        _check_text(note, f"{path}: notes[{n}]")
        for n, note in enumerate(_check_list(content["notes"], f"{path}: notes"))
    ]
    metrics = _parse_metrics(content["metrics"], f"{path}: metrics")
    settings = _parse_settings(content["settings"], f"{path}: settings")
    rows: list[PublishedRow] = []
    for n, table in enumerate(_check_list(content["tables"], f"{path}: tables")):
        rows += _parse_rows(path, table, settings, metrics, document, f"{path}: tables[{n}]")
    if unused := set(metrics) - {row.metric for row in rows}:
        raise ValueError(
            f"{path}: metrics: no table has {', '.join(sorted(unused))}; name the column so, or leave the metric out"
        )
    return Publication(path.stem, title, document, url, str(source["date"]), tuple(notes), metrics, tuple(rows))


def parse_tree(setting: PublishedSetting) -> tuple[int, int, int] | None:
    """(num_steps, topk, num_draft_tokens); None where there is no tree, or none is stated."""
    match = TREE_PATTERN.fullmatch(setting.tree or "")
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _parse_metrics(found: Any, where: str) -> dict[str, PublishedMetric]:
    _check_mapping(found, where)
    return {name: _parse_metric(name, metric, f"{where}.{name}") for name, metric in found.items()}


def _parse_metric(name: str, found: Any, where: str) -> PublishedMetric:
    _check_keys(found, ("printed", "unit", "decimals", "definition"), ("note",), where)
    for key in found.keys() - {"decimals"}:
        _check_text(found[key], f"{where}.{key}")
    if type(found["decimals"]) is not int or found["decimals"] < 0:
        raise ValueError(f"{where}.decimals: expected a count of digits, found {found['decimals']!r}; count them")
    definition = found["definition"]
    if re.fullmatch(r"\w+", definition) and definition not in (name, UNKNOWN):
        raise ValueError(f"{where}.definition: expected {name}, {UNKNOWN} or a sentence, found {definition!r}")
    if definition == name and name not in torch_records.METRICS:
        known = ", ".join(torch_records.METRICS)
        raise ValueError(f"{where}.definition: {name} is none of ours ({known}); say it in words, or {UNKNOWN}")
    return PublishedMetric(**found)


def _parse_settings(found: Any, where: str) -> dict[str, Any]:
    _check_mapping(found, where)
    return {key: _check_setting(key, value, where) for key, value in found.items()}


def _check_setting(key: str, value: Any, where: str) -> Any:
    """The value, once it is of its setting's kind."""
    if key not in SETTING_NAMES:
        raise ValueError(f"{where}: expected one of {', '.join(SETTING_NAMES)}, found {key}; correct it")
    if value is None or value == UNKNOWN:
        return value
    if key in NUMBER_SETTINGS:
        if type(value) not in (int, float) or math.isnan(value) or value < 0:
            raise ValueError(f"{where}: {key}: expected a number, null or {UNKNOWN}, found {value!r}; correct it")
        return float(value)
    if not isinstance(value, str):  # 8_2_16 without quotes is an integer in YAML
        raise ValueError(f"{where}: {key}: expected words, null or {UNKNOWN}, found {value!r}; quote it")
    if key == "tree" and not TREE_PATTERN.fullmatch(value):
        raise ValueError(f"{where}: tree: expected t<num_steps>_<topk>_<num_draft_tokens>, found {value!r}; correct it")
    return value


def _parse_rows(
    path: Path, table: Any, settings: dict[str, Any], metrics: dict[str, PublishedMetric], document: str, where: str
) -> Iterator[PublishedRow]:
    from_csv = isinstance(table, dict) and "csv" in table
    _check_keys(table, ("where", "columns", "csv" if from_csv else "rows"), ("settings",), where)
    name = _check_text(table["where"], f"{where}.where")
    columns = [
        _parse_column(column, metrics, f"{where}.columns")
        for column in _check_list(table["columns"], f"{where}.columns")
    ]
    shared = settings | _parse_settings(table.get("settings", {}), f"{where}.settings")
    beside = path.parent / _check_text(table["csv"], f"{where}.csv") if from_csv else None
    for n, values in enumerate(_read_csv(beside) if beside else _check_list(table["rows"], f"{where}.rows")):
        place = f"{beside}, row {n + 1}" if beside else f"{where}.rows[{n}]"
        if not isinstance(values, list) or len(values) != len(columns):
            found = len(values) if isinstance(values, list) else repr(values)
            raise ValueError(f"{place}: expected {len(columns)} values, one a column, found {found}; see {path}")
        own, numbers = _split_values(columns, values, place)
        for metric, dataset, value in numbers:
            setting = shared | own | ({"dataset": dataset} if dataset else {})
            if missing := [key for key in SETTING_NAMES if key not in setting]:
                raise ValueError(f"{place}: no {', '.join(missing)}; give it, or null, or {UNKNOWN}, under settings")
            m = metrics[metric]
            yield PublishedRow(
                path.stem,
                name,
                PublishedSetting(**setting),
                metric,
                _parse_number(value, m, f"{place}: {metric}"),
                m.decimals,
                m.unit,
                m.definition,
                f"{document}: {name}",
            )


def _parse_column(column: Any, metrics: dict[str, PublishedMetric], where: str) -> tuple[str, str]:
    """(name, the data set it is on or nothing)."""
    name, _, dataset = str(column).partition(" @ ")
    if name not in metrics and (dataset or name not in (*SETTING_NAMES, BATCH_AND_TREE)):
        known = ", ".join((*metrics, *SETTING_NAMES))
        raise ValueError(f"{where}: expected a metric or a setting ({known}), found {column!r}; correct it")
    return name, dataset


def _split_values(
    columns: list[tuple[str, str]], values: list[Any], where: str
) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """What a row's values set, and its numbers as (metric, data set, value); null is a number that wasn't printed."""
    own: dict[str, Any] = {}
    numbers = []
    for (name, dataset), value in zip(columns, values, strict=True):
        if name == BATCH_AND_TREE:
            batch, *shape = _parse_batch_and_tree(value, where)
            own |= {"batch": float(batch), "tree": "t{}_{}_{}".format(*shape)}
        elif name in SETTING_NAMES:
            own[name] = _check_setting(name, value, where)
        elif value is not None:
            numbers.append((name, dataset, value))
    if not numbers:
        raise ValueError(f"{where}: expected at least one number, found none; give one, or leave the row out")
    return own, numbers


def _parse_batch_and_tree(value: str, where: str) -> list[int]:
    match = re.fullmatch(r"(\d+),(\d+),(\d+),(\d+)", value)
    if not match:
        raise ValueError(f"{where}: expected batch,num_steps,topk,num_draft_tokens as 8,3,1,4, found {value!r}")
    return [int(part) for part in match.groups()]


def _parse_number(value: Any, metric: PublishedMetric, where: str) -> float:
    """The number, which must have no more digits than are printed: one more is a slip of the copyist."""
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
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return list(csv.reader(lines))[1:]
    except FileNotFoundError:
        raise ValueError(f"{path} not found; restore it: git checkout {path}") from None


def _check_keys(found: Any, needed: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    _check_mapping(found, where)
    if missing := [key for key in needed if key not in found]:
        raise ValueError(f"{where}: expected {', '.join(needed)}, found no {', '.join(missing)}; add it")
    if unknown := sorted(set(found) - set(needed) - set(optional)):
        raise ValueError(f"{where}: expected {', '.join((*needed, *optional))}, found {unknown}; correct it")


def _check_mapping(found: Any, where: str) -> None:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"{where}: expected keys and values, found {found!r}; correct it")


def _check_text(found: Any, where: str) -> str:
    if not isinstance(found, str):
        raise ValueError(f"{where}: expected words, found {found!r}; quote it")
    return found


def _check_list(found: Any, where: str) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{where}: expected a list, found {found!r}; begin each of its lines with a dash")
    return found
