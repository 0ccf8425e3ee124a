"""A folder with the real params.yaml, for every test of the parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.runtime import guarded_yaml
from tests.params.params_edits import REAL

PARSE_YAML = guarded_yaml.parse_yaml


def parse_json_or_yaml(text: str) -> Any:
    """Parse what `set_values` has written as JSON: as YAML it takes ten times as long, two thirds of these tests' time."""
    return json.loads(text) if text.startswith("{") else PARSE_YAML(text)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the real params.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guarded_yaml, "parse_yaml", parse_json_or_yaml)
    Path("params.yaml").write_text(REAL, encoding="utf-8")
    return tmp_path
