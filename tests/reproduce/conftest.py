"""A folder with what recipes are made of, to be in."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("recipes", "published"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
