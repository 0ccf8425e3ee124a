"""A project of its own for every test of fix_data."""

import shutil
from pathlib import Path

import pytest

from stages.data.tables.table_schema import load_table_file
from tests.conftest import ROOT
from tests.fix_data.raw_rows import RAW


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project with the real params.yaml and the real raw file."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    RAW.parent.mkdir(parents=True)
    shutil.copy(ROOT / RAW, RAW)
    shutil.copytree(ROOT / "data/tables", "data/tables")
    load_table_file.cache_clear()  # of a relative path, which is another file in each test
    return tmp_path
