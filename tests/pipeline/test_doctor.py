"""`aerie doctor`: what is installed, found and missing, for params.yaml or for a recipe."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline import commands, doctor, dvc_graph, preflight, reproduce
from pipeline.doctor import Finding
from pipeline.reproduce import RunEstimate
from tests.conftest import ROOT, edit_params

Usage = namedtuple("Usage", "total used free")
ESTIMATE = RunEstimate(
    lines=["target: models/mine, 1.09e6 parameters (recorded)"],
    disk_bytes=3 * 2**30, gpu_hours=0, weight_bytes=0,
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """params.yaml and recipes, the embedded raw data, no GPU; the estimate is 3 GiB, and 100 GiB are free."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copytree(ROOT / "stages", tmp_path / "stages", ignore=lambda *_: ["__pycache__"])
    shutil.copytree(ROOT / "data/tables", tmp_path / "data/tables")
    for file in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / file, tmp_path)
    raw = Path(YAML(typ="safe").load(tmp_path / "params.yaml")["fix_data"]["raw"])
    (tmp_path / raw).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / raw).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(reproduce, "estimate_params", lambda recipe, file: ESTIMATE)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: Usage(0, 0, 100 * 2**30))
    return tmp_path


def check(recipe: str | None = None) -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.check_all(recipe)}


def test_a_machine_that_can_run_has_no_problem_and_nothing_is_changed(home: Path) -> None:
    before = {file: file.read_bytes() for file in home.rglob("*") if file.is_file() and ".dvc" not in file.parts}
    lines = list(doctor.report_findings())
    assert lines[-1] == "nothing is in the way of a run" and not any(line.startswith("PROBLEM") for line in lines)
    found = check()
    assert found["GPUs"].found.startswith("none") and found["sglang"].found.startswith("not found")
    assert found["params.yaml"].found == "valid, target builtin/weather-tiny"
    assert found["dvc.yaml"].found == f"{len(dvc_graph.list_stages())} stages"
    assert found["disk"].found == "100 GiB free here"  # of an embedded target, whose run is small
    assert found["DVC remote"].found.startswith("none")
    after = {file: file.read_bytes() for file in home.rglob("*") if file.is_file() and ".dvc" not in file.parts}
    assert after == before


def make_target(folder: Path) -> None:
    """Write the files that a target of four layers and 500 tokens must have; the file of weights is empty."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 500}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()


def test_a_file_that_a_local_target_lacks_is_a_problem_before_a_run(home: Path) -> None:
    """Bug: prepare_target named it, after fix_data, and doctor nothing."""
    make_target(home / "models/mine")
    edit_params(home, {"target": {"model": "models/mine"}})
    (home / "models/mine/tokenizer.json").unlink()
    (found,) = [each.found for each in doctor.check_all() if each.subject == "params.yaml" and each.ok is False]
    assert "target.model models/mine has no tokenizer, expected one of" in found
    for command in (commands.run_graph, commands.list_stale):
        with pytest.raises(ValueError, match="has no tokenizer"):
            list(command())
    (home / "models/mine/tokenizer.json").touch()
    found = check()
    assert found["disk"].found == "100 GiB free here, a run writes about 3.00 GiB"
    assert found["target"].found.startswith("models/mine, 1.09e6") and found["target"].ok is None
