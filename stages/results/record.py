"""The base of the records that stages write to results/ as JSON."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Record(BaseModel):
    """A JSON object with exactly these keys."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def list_keys(cls) -> tuple[str, ...]:
        return tuple(cls.model_fields)

    @classmethod
    def check(cls, value: Mapping[str, Any]) -> None:
        """Raises AssertionError if a key is missing or unknown, at any depth. Values are written as given, never converted."""
        try:
            cls.model_validate(value)
        except ValidationError as error:
            wrong = [(e["type"], e["loc"]) for e in error.errors() if e["type"] in ("missing", "extra_forbidden")]
            assert not wrong, f"not a {cls.__name__}: {wrong}"
