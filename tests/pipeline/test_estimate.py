"""`aerie estimate`: each time says where it comes from, and a run of other parameters is not taken for one of these."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline import dvc_graph, estimate, reproduce
from pipeline.cli import run_command_line
from pipeline.reproduce import RunEstimate, StageEstimate
from stages.params import schema, stage_inputs
from stages.telemetry import stage_log
from tests.conftest import ROOT, edit_params

DAY_NS = 1_795_393_833 * 10**9  # 2026-11-23
ARITHMETIC = RunEstimate(
    lines=["target: of the test"],
    disk_bytes=3 * 2**30,
    download_bytes=0,
    gpu_hours=2,
    weight_bytes=0,
    stages={"train_draft": StageEstimate(seconds=3600, gpu_hours=2, disk_bytes=2**30)},
    origin="arithmetic of the test",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """params.yaml, dvc.yaml and the committed dvc.lock; nothing has run here, and the arithmetic is that of above."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for file in ("params.yaml", "dvc.yaml", "dvc.lock"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "estimate_params", lambda recipe, file, gpu: ARITHMETIC)
    return tmp_path


def lock_present_params(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last run of every stage be one with the params.yaml that is here now."""
    params = schema.load_params()
    recorded = {
        one.name: {"params": stage_inputs.list_values(params, one)} for one in stage_inputs.list_instances(params)
    }
    monkeypatch.setattr(dvc_graph, "read_recorded_inputs", lambda: recorded)


def log_runs(home: Path, seconds: dict[str, float], gpus: tuple[str, ...] = ()) -> None:
    (home / "logs").mkdir(exist_ok=True)
    runs = [stage_log.StageRun(stage, 0, DAY_NS, {}, took, list(gpus), None) for stage, took in seconds.items()]
    (home / stage_log.LOG_FILE).write_text("".join(json.dumps(vars(run)) + "\n" for run in runs))


def read_rows(*words: Any) -> dict[str, str]:
    lines = list(estimate.describe_estimate(*(words or (None, None, "h200"))))
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}


def test_without_a_run_times_are_recorded_ones_or_arithmetic(home: Path) -> None:
    rows = read_rows()
    assert rows["train_draft"] == "2 60 min 1.00 GiB 2 arithmetic of the test"
    assert "measured on 2026-11-23, AMD EPYC, 2 shared cores, with the defaults" in rows["replay_trees"]
    assert rows["to"] == "get before the run: data/raw/weather_toon.jsonl, data/tables/weather.yaml"


def test_a_run_here_with_these_parameters_comes_before_arithmetic(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_present_params(monkeypatch)
    log_runs(home, {"train_draft@e003": 30.0, "train_draft@e009": 60.0}, ("a GPU", "a GPU"))
    rows = read_rows()
    assert rows["train_draft"] == "2 90.0 s 1.00 GiB 0.05 measured here on 2026-11-23"


def test_a_cell_that_did_not_run_counts_as_the_others_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_present_params(monkeypatch)
    log_runs(home, {"benchmark@eval-e009-t8_1_9": 5.0, "benchmark@eval-e009-t5_1_6": 7.0})
    rows = read_rows()
    assert rows["benchmark"] == "8 48.0 s - - measured here on 2026-11-23, 2 of 8; the others counted as their mean"


def test_a_run_of_other_parameters_yields_to_arithmetic_and_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling fewer rows changes every stage behind it, though their own parameters are the same."""
    lock_present_params(monkeypatch)
    log_runs(home, {"fix_data": 1.5, "extract_hiddens": 2.5, "train_draft@e003": 30.0, "train_draft@e009": 60.0})
    edit_params(home, {"sample_target": {"train_rows": 20}})
    rows = read_rows()
    assert rows["fix_data"].endswith("measured here on 2026-11-23")
    assert rows["extract_hiddens"].endswith("2.5 s - - measured here with other parameters on 2026-11-23")
    assert rows["train_draft"].endswith("arithmetic of the test")


def test_a_run_of_another_target_tells_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_present_params(monkeypatch)
    log_runs(home, {"replay_trees@e009": 9.0})
    edit_params(home, {"target": {"model": "someone/Other-9B"}})
    assert read_rows()["replay_trees"].endswith("not estimated")


def test_a_target_of_unknown_shape_leaves_the_table(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> RunEstimate:
        raise ValueError("recipes/targets/Other-9B.json not found")

    monkeypatch.setattr(reproduce, "estimate_params", refuse)
    lines = list(estimate.describe_estimate(None, None, "h200"))
    assert "no arithmetic: recipes/targets/Other-9B.json not found" in lines
    assert any(line.startswith("together") for line in lines)


def test_another_file_of_parameters_is_estimated_and_changes_nothing(home: Path) -> None:
    (home / "params.yaml").rename(home / "mine.yaml")
    assert read_rows(None, Path("mine.yaml"), "h200")["target"].endswith("21 stages")
    assert not (home / "params.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "b200"], "--gpu is b200, expected one of h200, h100"),
        (["weather-tiny", "--params", "mine.yaml"], "expected a recipe or --params FILE, found both"),
        (["nothing"], "there is no recipe recipes/nothing.yaml"),
    ],
)
def test_wrong_words_are_one_line(home: Path, words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run_command_line(["estimate", *words])


def test_recorded_stages_are_stages_of_the_default_pipeline(home: Path) -> None:
    """A renamed stage must be renamed there too."""
    stages = reproduce.list_stages_with(home / "params.yaml")
    for file in estimate.MEASURED_FOLDER.glob("*.json"):
        recorded = estimate.MeasuredStages.model_validate(json.loads(file.read_text()))
        assert {name.partition("@")[0] for name in recorded.seconds} <= {name.partition("@")[0] for name in stages}


def test_the_gpus_offered_are_those_with_rates() -> None:
    from stages.reproduce import measured_rates

    assert tuple(measured_rates.GPUS) == estimate.GPUS
