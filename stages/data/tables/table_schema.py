"""The file that `fix_data.tables` names: keys, columns, types and units that structured answers must have.

A value is text, integer, number, boolean, date, datetime, any, list, object or table; objects, lists and tables hold more
values. docs/data.md explains every key, data/tables/weather.yaml is an example.
"""

import re
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from stages.params.section import Count, Section, Text, suggest_name
from stages.runtime import guarded_yaml


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression, found {pattern!r} ({error}); correct it") from None
    return pattern


def _check_asking_pattern(pattern: str) -> str:
    if re.compile(_check_pattern(pattern)).groups != 1:
        raise ValueError(
            rf"expected one group that holds the number, as \b(\d+) days?\b, found {pattern!r}; correct it"
        )
    return pattern


def _check_fraction(text: str | int | float) -> str | int | float:
    try:
        Fraction(str(text))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"expected a number or a fraction as 5/9, found {text!r}; correct it") from None
    return text


Pattern = Annotated[Text, AfterValidator(_check_pattern)]
Factor = Annotated[int | float | str, AfterValidator(_check_fraction)]


class UnitConversion(Section):
    """How a unit becomes another: value * scale + offset."""

    to: Text
    scale: Factor = 1
    offset: Factor = 0


class Value(Section):
    """The keys that values of every type have."""

    optional: bool = False  # may be missing or null
    missing: list[Text] = Field(default_factory=list)  # texts that stand for null, as N/A
    names: dict[Text, Text | None] = Field(
        default_factory=dict
    )  # other names in answers, each with its unit (null: the same)

    @model_validator(mode="after")
    def missing_needs_optional(self) -> "Value":
        if self.missing and not self.optional:
            raise ValueError(
                "missing lists texts for null, expected optional: true beside it; add that, or leave missing out"
            )
        return self


class TextValue(Value):
    type: Literal["text"]
    choices: list[Text] = Field(default_factory=list)
    pattern: Pattern | None = None
    forbid: str = ""  # characters that no value has; quotes “” around a whole value are then removed
    cast: bool = False  # numbers and booleans become text


class NumberValue(Value):
    type: Literal["integer", "number"]
    minimum: float | int | None = None
    maximum: float | int | None = None
    unit: Text | None = None
    decimals: Annotated[int, Field(ge=0, le=12)] | None = None  # of a converted value
    cast: bool = False  # text that holds only a number becomes one

    @model_validator(mode="after")
    def range_is_not_empty(self) -> "NumberValue":
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum} is above maximum {self.maximum}; lower it")
        return self


class PlainValue(Value):
    type: Literal["boolean", "date", "datetime", "any"]
    cast: bool = False  # the texts true and false, yes and no, become a boolean


class ListValue(Value):
    type: Literal["list"]
    items: "AnyValue"
    minimum: Annotated[int, Field(ge=0)] = 0  # number of items
    maximum: Count | None = None


class ObjectValue(Value):
    type: Literal["object"]
    keys: dict[Text, "AnyValue"]
    other_keys: Literal["refuse", "keep"] = "refuse"


class RowsRule(Section):
    """How many rows a table has."""

    asked: Annotated[Text, AfterValidator(_check_asking_pattern)] | None = None  # finds the number in the question
    minimum: Annotated[int, Field(ge=0)] = 1
    maximum: Count | None = None


class TableValue(Value):
    type: Literal["table"]
    columns: Annotated[dict[Text, "AnyValue"], Field(min_length=1)]
    other_columns: Literal["refuse", "keep"] = "refuse"
    ordered: list[Text] = Field(default_factory=list)  # in each row each of these numbers is at most the next
    consecutive: Text | None = None  # a date column that increases by one day, or an integer one by one, per row
    unique: list[Text] = Field(default_factory=list)  # columns without a repeated value
    rows: RowsRule = RowsRule()

    @model_validator(mode="after")
    def rules_name_columns(self) -> "TableValue":
        for key, names in (("ordered", self.ordered), ("consecutive", [self.consecutive]), ("unique", self.unique)):
            for name in names:
                if name is not None and name not in self.columns:
                    raise ValueError(
                        f"{key} names the column {name}{suggest_name(name, self.columns)}, expected one of "
                        f"{', '.join(self.columns)}; correct it"
                    )
        if self.consecutive and self.columns[self.consecutive].type not in ("date", "integer"):
            raise ValueError(
                f"consecutive names {self.consecutive}, expected a column of type date or integer; correct it"
            )
        return self


AnyValue = Annotated[
    TextValue | NumberValue | PlainValue | ListValue | ObjectValue | TableValue, Field(discriminator="type")
]


class TableFile(Section):
    """The whole file: `keys` of a document that is an object, or `root`, where the document is one table or list."""

    keys: dict[Text, AnyValue] = Field(default_factory=dict)
    root: AnyValue | None = None
    other_keys: Literal["refuse", "keep"] = "refuse"
    units: dict[Text, UnitConversion] = Field(default_factory=dict)

    @model_validator(mode="after")
    def units_and_names_are_known(self) -> "TableFile":
        if bool(self.keys) == (self.root is not None):
            raise ValueError(
                "expected keys, or root where the document is one table or list, found both or neither; keep one"
            )
        _check_value("", self.document, self.units)
        return self

    @cached_property
    def document(self) -> AnyValue:
        """Return the whole document as one value."""
        return self.root or ObjectValue(type="object", keys=self.keys, other_keys=self.other_keys)


for _model in (ListValue, ObjectValue, TableValue, TableFile):
    _model.model_rebuild()


def list_parts(value: Value) -> dict[str, AnyValue]:
    """Return the named values inside an object or a table; {} for others."""
    if isinstance(value, ObjectValue):
        return value.keys
    return value.columns if isinstance(value, TableValue) else {}


def _check_value(key_path: str, value: Value, units: dict[str, UnitConversion]) -> None:
    """Raise ValueError for a unit that can't be converted, or a name that two values of one object claim."""
    parts = list_parts(value)
    owners = {name: name for name in parts}
    for key, part in parts.items():
        for other, unit in part.names.items():
            if owners.setdefault(other, key) != key:
                raise ValueError(
                    f"{key_path}{key}: names has {other}, which is also a name of {owners[other]}, expected a name of one only; "
                    "correct it"
                )
            if unit is not None:
                _check_unit(f"{key_path}{key}", part, unit, units)
        _check_value(f"{key_path}{key}.", part, units)
    if isinstance(value, ListValue):
        _check_value(f"{key_path}items.", value.items, units)


def _check_unit(key_path: str, value: Value, unit: str, units: dict[str, UnitConversion]) -> None:
    own = value.unit if isinstance(value, NumberValue) else None
    if own is None:
        raise ValueError(f"{key_path}: names gives the unit {unit}, expected a number with a unit of its own; add unit")
    if unit != own and (unit not in units or units[unit].to != own):
        raise ValueError(
            f"{key_path}: no conversion from {unit}{suggest_name(unit, units)} to {own}, expected one in units, as "
            f"{unit}: {{to: {own}, scale: 1}}; add it"
        )


@cache
def load_table_file(path: Path) -> TableFile:
    """Return the schema in a file. Raises ValueError with one line for each mistake."""
    try:
        content = guarded_yaml.read_yaml(path, path.parent)
    except FileNotFoundError:
        others = sorted(file.as_posix() for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ValueError(
            f"fix_data.tables is {path}, which does not exist{suggest_name(path.as_posix(), others)}; correct it, or set it "
            "to null to accept any table"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: expected keys, as keys: {{name: {{type: text}}}}, found {content!r}; docs/data.md shows one"
        )
    try:
        return TableFile.model_validate(content)
    except ValidationError as error:
        advice = "correct it (docs/data.md has all keys)"
        raise ValueError(guarded_yaml.explain_schema_errors(error, str(path), advice)) from None
