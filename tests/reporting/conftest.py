"""Made-up projects to be in, for the tests of report."""

from pathlib import Path

import pytest

from stages.cells.cell import CELLS_FOLDER
from stages.params import schema
from tests.conftest import ROOT
from tests.reporting.made_up_results import made_up_project


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> schema.Params:
    return made_up_project(tmp_path, monkeypatch)


@pytest.fixture
def half_measured(made_up: schema.Params) -> schema.Params:
    """The project with the repository's own params.yaml: e009 has cells, e003 was replayed only."""
    Path("params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    for path in CELLS_FOLDER.glob("*/*-e003-*"):
        path.unlink()
    return schema.load_params()
