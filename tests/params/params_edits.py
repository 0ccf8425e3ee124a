"""Edits of the repository's params.yaml, with every default written out, and the problems that loading it names."""

import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from stages.params import schema
from tests.conftest import ROOT

ON_ONE_LINE = ("checkpoints", "sets", "stages")  # mappings of mappings


def _write_out(values: dict[str, Any], indent: str = "", one_line: bool = False) -> Iterator[str]:
    """Yield the lines of params.yaml: a key each, with a comment behind it as a user's file has."""
    for key, value in values.items():
        if isinstance(value, dict) and value and not one_line:
            yield f"{indent}{key}:"
            yield from _write_out(value, f"{indent}  ", key in ON_ONE_LINE)
        else:
            yaml, text = YAML(typ="safe"), io.StringIO()
            yaml.default_flow_style, yaml.width, yaml.sort_base_mapping_type_on_output = True, 1000, False
            yaml.dump(value, text)
            yield f"{indent}{key}: {text.getvalue().removesuffix(chr(10)).removesuffix('...').strip()}  # a remark"


READ: dict[str, Any] = schema.load_params(ROOT / "params.yaml").model_dump(by_alias=True)
for segment in READ["train_draft"]["checkpoints"].values():
    del segment["horizon_epochs"]  # filled in
    del segment["method"]  # as a user writes segments of EAGLE-3
REAL = "\n".join(_write_out(READ)) + "\n"
READ["train_draft"]["dtype"] = None  # filled in
MEASURED = "benchmark|[e009]"  # benchmark.checkpoints
SECOND = "e009: {from: e003, epochs: 6}"


def edit_params_text(*changes: tuple[str, str]) -> None:
    """Change params.yaml as a user does, in its text; the first place of `old`, of `section|old` the first in that section."""
    text = REAL
    for old, new in changes:
        section, _, old = old.rpartition("|")
        start = f"\n{text}".index(f"\n{section}:") if section else 0
        assert old in text[start:], old
        text = text[:start] + text[start:].replace(old, new, 1)
    Path("params.yaml").write_text(text, encoding="utf-8")


def set_value(key_path: tuple[str, ...], value: Any) -> None:
    """Set one key of params.yaml, or delete it where the value is `...`."""
    set_values({key_path: value})


def set_values(edits: dict[tuple[str, ...], Any]) -> None:
    """Set keys of params.yaml, or delete those whose value is `...`."""
    whole = copy.deepcopy(READ)
    for key_path, value in edits.items():
        section = whole
        for part in key_path[:-1]:
            section = section[part]
        section[key_path[-1]] = value
        if value is ...:
            del section[key_path[-1]]
    Path("params.yaml").write_text(json.dumps(whole, sort_keys=True))  # JSON is YAML, and written in no time


def read_refusal() -> str:
    """The one message; fails where the file is accepted."""
    with pytest.raises(ValueError, match=r"^params\.yaml") as error:
        schema.load_params()
    assert not isinstance(error.value, ValidationError)  # of pydantic, which is a ValueError
    assert error.value.__context__ is None or error.value.__suppress_context__  # no second traceback above it
    return str(error.value)


def list_problems() -> list[str]:
    """Every problem the message names, a line each."""
    head, *lines = read_refusal().split("\n")
    assert head == f"params.yaml has {len(lines)} problem(s) to correct:"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def iterate_leaves(section: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from iterate_leaves(value, (*above, key))
        else:
            yield (*above, key), value


LEAVES = dict(iterate_leaves(READ))
NUMBERS = {key_path: value for key_path, value in LEAVES.items() if type(value) in (int, float)}
