"""The base class of all sections of params.yaml, and the value types they share."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator


def suggest_name(found: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" for the nearest known name, "" where none is near.

    A name with another number, as e010 beside e009, means another thing and is no misspelling.
    """
    alike = [name for name in known if _list_numbers(name) == _list_numbers(found)]
    nearest = next(iter(difflib.get_close_matches(found, alike, n=1)), None)
    return f" (did you mean {nearest}?)" if nearest else ""


def _list_numbers(name: str) -> list[str]:
    return [digits.lstrip("0") for digits in re.findall(r"\d+", name)]


PARAMS_FILE = Path("params.yaml")
RUN_PARAMS = Path("artifacts/inputs/params.json")  # all parameters of the run that DVC is at
BUILTIN = "builtin/"  # begins what is a model and nothing to download: embedded targets, drafts without weights
ROOT_CHECKPOINT = "e000"  # made by init_draft; every chain of segments starts from it
Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1)]
# What pip gets of a recipe. ASCII; it takes `name @ URL` for the URL, and `name==1.0.zip` for a file of that name.
PACKAGE_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
PACKAGE_VERSION = r"^[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?$"
# An id or a path that becomes a word of a command line, where - begins a flag.
Source = Annotated[str, Field(pattern=r"^[^-]")]
NAME = r"^[A-Za-z][A-Za-z0-9_]*$"
Name = Annotated[str, Field(pattern=NAME)]
Grid = Annotated[list[Count], Field(min_length=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
T = TypeVar("T")


def _check_unique(names: list[str]) -> list[str]:
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"{', '.join(repeated)} is listed twice; list each name once")
    return names


def _check_increasing(ids: list[int]) -> list[int]:
    if ids != (ordered := sorted(set(ids))):
        raise ValueError(f"is {ids}, expected ids in increasing order, each once; write {ordered}")
    return ids


Increasing = AfterValidator(_check_increasing)
FeatureLayers = Annotated[list[Count], Field(min_length=1), Increasing]  # ids i: the stream entering block i
Eagle3FeatureLayers = Annotated[list[Count], Field(min_length=3, max_length=3), Increasing]
Names = Annotated[list[Name], AfterValidator(_check_unique)]
RootCheckpoints = Annotated[list[Literal["e000"]], Field(max_length=1)]
SomeNames = Annotated[list[Name], Field(min_length=1), AfterValidator(_check_unique)]


class Section(BaseModel):
    """A strict, frozen section: unknown keys are refused, an integer is not a string. Keys of the graph have no default."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )

    OLD_KEYS: ClassVar[Mapping[str, str]] = {}  # of earlier versions, and what to write now

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, given: Any) -> Any:
        """Raise ValueError for anything but a mapping of known keys."""
        known = [field.alias or name for name, field in cls.model_fields.items()]
        if not isinstance(given, Mapping | cls):
            raise ValueError(f"expected a section with {', '.join(known)}, found {given!r:.200}")
        if old := dict.fromkeys(
            now for key, now in cls.OLD_KEYS.items() if isinstance(given, Mapping) and key in given
        ):
            raise ValueError("; ".join(old))
        if unknown := [str(key) for key in given if key not in known] if isinstance(given, Mapping) else []:
            named = ", ".join(f"{key}{suggest_name(key, known)}" for key in unknown)
            raise ValueError(f"unknown key {named}; known keys are {', '.join(known)}. Correct it, or leave it out")
        return given

    def list_conflicts(self) -> Iterator[str]:
        """Yield what is wrong with keys that are valid each by itself. A function that others call too may raise ValueError."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_conflicts(self) -> Self:
        problems: list[str] = []
        try:
            problems.extend(self.list_conflicts())  # which keeps those before an error
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise AttributeError(f"{type(self).__name__}.{name} is not declared; add it to params/stage_inputs.py")
            return super().__getattr__(name)


LIST_OR_NUMBER = Discriminator(lambda value: "a list" if isinstance(value, list) else "a number")
TEXT_OR_NUMBER = Discriminator(lambda value: "a text" if isinstance(value, str) else "a number")
CountOrGrid = Annotated[Annotated[Count, Tag("a number")] | Annotated[Grid, Tag("a list")], LIST_OR_NUMBER]


def get_named(items: Mapping[str, T], name: str, key: str) -> T:
    """Return items[name]. Raises ValueError with the names that `key` of params.yaml has."""
    if name not in items:
        raise ValueError(
            f"{PARAMS_FILE}: {key} has no {name!r}{suggest_name(name, items)}; it has {', '.join(items) or 'none'}"
        )
    return items[name]
