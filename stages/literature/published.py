"""published/*.yaml: what others printed, number by number, each with its source, setting and definition.

A file holds tables as they were printed; `read` makes a Row of every number. A column of a table is a setting
(`tree`), a metric (`tau`), or a metric on a data set (`tau @ GSM8K`); a table of many rows may lie beside the file as
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

FOLDER = Path("published")
UNKNOWN: Literal["unknown"] = "unknown"
MEAN = "mean"  # the data set of a printed mean over a table's data sets
TREE = re.compile(r"t(\d+)_(\d+)_(\d+)")
# A column of SpecForge's CSV: batch, num_steps, topk, num_draft_tokens as "8,3,1,4".
BATCH_AND_TREE = "batch_and_tree"

Number = float | Literal["unknown"] | None


@dataclass(frozen=True)
class Setting:
    target: str | None
    draft: str | None
    method: str | None  # plain is decoding without speculation
    engine: str | None
    engine_version: str | None
    hardware: str | None
    precision: str | None
    tree: str | None  # t<num_steps>_<topk>_<num_draft_tokens>, the root counted, as in docs/metrics.md
    temperature: Number
    dataset: str | None
    prompts: Number
    input_tokens: Number
    output_tokens: Number
    batch: Number
    concurrency: Number
    request_rate: Number  # requests per second; infinite where all are sent at once
    label: str | None  # the row's own name, as printed


SETTINGS = tuple(field.name for field in fields(Setting))
NUMBERS = {field.name for field in fields(Setting) if field.type == Number}


@dataclass(frozen=True)
class Metric:
    printed: str  # its name there
    unit: str
    decimals: int  # the most that are printed: a value is right to half of the last
    definition: str  # a name of cell.METRICS where it is ours, UNKNOWN, or the source's words
    note: str = ""


@dataclass(frozen=True)
class Row:
    what: str  # the file's stem
    where: str  # the table in the source
    setting: Setting
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
    metrics: dict[str, Metric]
    rows: tuple[Row, ...]


def load(folder: Path = FOLDER) -> dict[str, Publication]:
    """Every publication by name. Raises ValueError for the first defect, naming its place."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"{folder} holds no publication, expected NAME.yaml files; restore it: git checkout {folder}")
    return {file.stem: read(file) for file in files}


def read(path: Path) -> Publication:
    """One publication. Raises ValueError for the first defect: what was expected, what was found, where."""
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} not found; restore it: git checkout {path}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML, correct it: {error}") from None
    keys = ("title", "source", "notes", "settings", "metrics", "tables")
    _keys(content, keys, (), str(path))
    title, source = _words(content["title"], f"{path}: title"), content["source"]
    _keys(source, ("document", "url", "date"), (), f"{path}: source")
    document, url = (_words(source[key], f"{path}: source.{key}") for key in ("document", "url"))
    notes = [_words(note, f"{path}: notes[{n}]") for n, note in enumerate(_list(content["notes"], f"{path}: notes"))]
    metrics = _metrics(content["metrics"], f"{path}: metrics")
    settings = _settings(content["settings"], f"{path}: settings")
    rows: list[Row] = []
    for n, table in enumerate(_list(content["tables"], f"{path}: tables")):
        rows += _rows(path, table, settings, metrics, document, f"{path}: tables[{n}]")
    if unused := set(metrics) - {row.metric for row in rows}:
        raise ValueError(
            f"{path}: metrics: no table has {', '.join(sorted(unused))}; name the column so, or leave the metric out"
        )
    return Publication(path.stem, title, document, url, str(source["date"]), tuple(notes), metrics, tuple(rows))


def tree(setting: Setting) -> tuple[int, int, int] | None:
    """(num_steps, topk, num_draft_tokens); None where there is no tree, or none is stated."""
    match = TREE.fullmatch(setting.tree or "")
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _metrics(found: Any, where: str) -> dict[str, Metric]:
    _mapping(found, where)
    return {name: _metric(name, metric, f"{where}.{name}") for name, metric in found.items()}


def _metric(name: str, found: Any, where: str) -> Metric:
    _keys(found, ("printed", "unit", "decimals", "definition"), ("note",), where)
    for key in found.keys() - {"decimals"}:
        _words(found[key], f"{where}.{key}")
    if type(found["decimals"]) is not int or found["decimals"] < 0:
        raise ValueError(f"{where}.decimals: expected a count of digits, found {found['decimals']!r}; count them")
    definition = found["definition"]
    if re.fullmatch(r"\w+", definition) and definition not in (name, UNKNOWN):
        raise ValueError(f"{where}.definition: expected {name}, {UNKNOWN} or a sentence, found {definition!r}")
    if definition == name and name not in torch_records.METRICS:
        known = ", ".join(torch_records.METRICS)
        raise ValueError(f"{where}.definition: {name} is none of ours ({known}); say it in words, or {UNKNOWN}")
    return Metric(**found)


def _settings(found: Any, where: str) -> dict[str, Any]:
    _mapping(found, where)
    return {key: _setting(key, value, where) for key, value in found.items()}


def _setting(key: str, value: Any, where: str) -> Any:
    """The value, once it is of its setting's kind."""
    if key not in SETTINGS:
        raise ValueError(f"{where}: expected one of {', '.join(SETTINGS)}, found {key}; correct it")
    if value is None or value == UNKNOWN:
        return value
    if key in NUMBERS:
        if type(value) not in (int, float) or math.isnan(value) or value < 0:
            raise ValueError(f"{where}: {key}: expected a number, null or {UNKNOWN}, found {value!r}; correct it")
        return float(value)
    if not isinstance(value, str):  # 8_2_16 without quotes is an integer in YAML
        raise ValueError(f"{where}: {key}: expected words, null or {UNKNOWN}, found {value!r}; quote it")
    if key == "tree" and not TREE.fullmatch(value):
        raise ValueError(f"{where}: tree: expected t<num_steps>_<topk>_<num_draft_tokens>, found {value!r}; correct it")
    return value


def _rows(
    path: Path, table: Any, settings: dict[str, Any], metrics: dict[str, Metric], document: str, where: str
) -> Iterator[Row]:
    from_csv = isinstance(table, dict) and "csv" in table
    _keys(table, ("where", "columns", "csv" if from_csv else "rows"), ("settings",), where)
    name = _words(table["where"], f"{where}.where")
    columns = [_column(column, metrics, f"{where}.columns") for column in _list(table["columns"], f"{where}.columns")]
    shared = settings | _settings(table.get("settings", {}), f"{where}.settings")
    beside = path.parent / _words(table["csv"], f"{where}.csv") if from_csv else None
    for n, values in enumerate(_csv(beside) if beside else _list(table["rows"], f"{where}.rows")):
        place = f"{beside}, row {n + 1}" if beside else f"{where}.rows[{n}]"
        if not isinstance(values, list) or len(values) != len(columns):
            found = len(values) if isinstance(values, list) else repr(values)
            raise ValueError(f"{place}: expected {len(columns)} values, one a column, found {found}; see {path}")
        own, numbers = _split(columns, values, place)
        for metric, dataset, value in numbers:
            setting = shared | own | ({"dataset": dataset} if dataset else {})
            if missing := [key for key in SETTINGS if key not in setting]:
                raise ValueError(f"{place}: no {', '.join(missing)}; give it, or null, or {UNKNOWN}, under settings")
            m = metrics[metric]
            yield Row(
                path.stem, name, Setting(**setting), metric, _value(value, m, f"{place}: {metric}"), m.decimals, m.unit,
                m.definition, f"{document}: {name}",
            )  # fmt: skip


def _column(column: Any, metrics: dict[str, Metric], where: str) -> tuple[str, str]:
    """(name, the data set it is on or nothing)."""
    name, _, dataset = str(column).partition(" @ ")
    if name not in metrics and (dataset or name not in (*SETTINGS, BATCH_AND_TREE)):
        known = ", ".join((*metrics, *SETTINGS))
        raise ValueError(f"{where}: expected a metric or a setting ({known}), found {column!r}; correct it")
    return name, dataset


def _split(
    columns: list[tuple[str, str]], values: list[Any], where: str
) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """What a row's values set, and its numbers as (metric, data set, value); null is a number that wasn't printed."""
    own: dict[str, Any] = {}
    numbers = []
    for (name, dataset), value in zip(columns, values, strict=True):
        if name == BATCH_AND_TREE:
            batch, *shape = _four(value, where)
            own |= {"batch": float(batch), "tree": "t{}_{}_{}".format(*shape)}
        elif name in SETTINGS:
            own[name] = _setting(name, value, where)
        elif value is not None:
            numbers.append((name, dataset, value))
    if not numbers:
        raise ValueError(f"{where}: expected at least one number, found none; give one, or leave the row out")
    return own, numbers


def _four(value: str, where: str) -> list[int]:
    match = re.fullmatch(r"(\d+),(\d+),(\d+),(\d+)", value)
    if not match:
        raise ValueError(f"{where}: expected batch,num_steps,topk,num_draft_tokens as 8,3,1,4, found {value!r}")
    return [int(part) for part in match.groups()]


def _value(value: Any, metric: Metric, where: str) -> float:
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


def _csv(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            return list(csv.reader(lines))[1:]
    except FileNotFoundError:
        raise ValueError(f"{path} not found; restore it: git checkout {path}") from None


def _keys(found: Any, needed: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    _mapping(found, where)
    if missing := [key for key in needed if key not in found]:
        raise ValueError(f"{where}: expected {', '.join(needed)}, found no {', '.join(missing)}; add it")
    if unknown := sorted(set(found) - set(needed) - set(optional)):
        raise ValueError(f"{where}: expected {', '.join((*needed, *optional))}, found {unknown}; correct it")


def _mapping(found: Any, where: str) -> None:
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"{where}: expected keys and values, found {found!r}; correct it")


def _words(found: Any, where: str) -> str:
    if not isinstance(found, str):
        raise ValueError(f"{where}: expected words, found {found!r}; quote it")
    return found


def _list(found: Any, where: str) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{where}: expected a list, found {found!r}; begin each of its lines with a dash")
    return found
