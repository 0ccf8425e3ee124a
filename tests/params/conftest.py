"""A folder with the real params.yaml, for every test of the parameters."""

from pathlib import Path

import pytest

from tests.params.params_edits import REAL


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the real params.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(REAL, encoding="utf-8")
    return tmp_path
