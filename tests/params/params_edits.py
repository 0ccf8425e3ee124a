"""Edits of the repository's params.yaml in the current folder, and the problems that loading it names."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.params import schema
from tests.conftest import ROOT

REAL = (ROOT / "params.yaml").read_text(encoding="utf-8")
READ = YAML(typ="safe").load(REAL)
MEASURED = "".join(re.findall(r"\[e009\] .*\n  trees", REAL))  # benchmark.checkpoints, with its comment
SECOND = "e009: {from: e003, epochs: 6}"


def edit_params_text(*changes: tuple[str, str]) -> None:
    """Change params.yaml as a user does, in its text."""
    text = REAL
    for old, new in changes:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
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
    assert type(error.value) is ValueError
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
