"""`aerie estimate`: a row for each kind of stage, and the totals."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline import estimate, reproduce
from stages.params import schema
from stages.reproduce import data_size
from stages.reproduce import estimate as arithmetic
from tests.conftest import ROOT


def estimate_here(recipe: Path | None, file: Path, gpu: str) -> reproduce.RunEstimate:
    """In this process, which has imported torch: 5 s less each."""
    params = schema.load_params(file)
    about = schema.read_recipe(recipe)[0] if recipe else None
    params, tokens = (params, about.row_tokens) if about else data_size.apply_data(params)
    return reproduce.RunEstimate.model_validate(
        asdict(arithmetic.estimate_run(params, about and about.train_rows, tokens, gpu))
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for file in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "estimate_params", estimate_here)
    return tmp_path


def read_rows(recipe: str | None = None, params: Path | None = None) -> dict[str, str]:
    lines = list(estimate.describe_estimate(recipe, params, "h200"))
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}


def test_another_file_of_parameters_is_estimated_and_changes_nothing(home: Path) -> None:
    (home / "params.yaml").rename(home / "mine.yaml")
    rows = read_rows(None, Path("mine.yaml"))
    assert rows["together"].startswith("21 - "), "no rates of a CPU were measured"
    assert rows["to"] == "get before the run: data/raw/weather_toon.jsonl, data/tables/weather.yaml"
    assert not (home / "params.yaml").exists()
