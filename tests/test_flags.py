"""docs/flags.md: what it names is there."""

import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from stages.params.schema import Params
from tests.conftest import ROOT

TEXT = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
SPANS = re.findall(r"`([^`]+)`", TEXT)
KEYS = sorted(
    {span.partition(":")[0] for span in SPANS if span.partition(".")[0] in Params.model_fields and "." in span}
)


def section_inside(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """(the section an annotation holds, whether under names of the user's own), through dict[...], | None, Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for inner in get_args(annotation):
        model, _ = section_inside(inner)
        if model:
            return model, getattr(annotation, "__origin__", None) is dict
    return None, False


@pytest.mark.parametrize("key", KEYS)
def test_every_key_it_names_exists(key: str) -> None:
    model: type[BaseModel] | None = Params
    free = False
    for part in key.split("."):
        if free:
            free = False
            continue
        assert model is not None, key
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        assert part in fields, f"{key}: there is no {part}, only {', '.join(fields)}"
        model, free = section_inside(fields[part].annotation)
