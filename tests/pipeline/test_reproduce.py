"""`aerie reproduce`: the estimate before it, refusals, the stages it runs, and the table at its end."""

import shutil
from collections import namedtuple
from collections.abc import Collection
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline import dvc_graph, preflight, processes, resources
from pipeline.cli import run_command_line
from tests.conftest import ROOT

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes and code, without data."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    for folder in ("recipes", "published", "stages"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copytree(ROOT / "data/tables", tmp_path / "data/tables")
    for file in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def equipped_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with SGLang, a GPU of 80 GiB and room on its disk."""
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: Usage(0, 0, 2**50))
    (home / "serving-env/sglang/bin").mkdir(parents=True)
    (home / "serving-env/sglang/bin/sglang").touch()
    monkeypatch.setattr(preflight.resources, "list_gpu_memory", lambda: [resources.Gpu("H100", 80 * 2**30)])


@pytest.fixture
def dvc_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whether DVC was run. A stage fails."""
    done: list[str] = []

    def run_all_stages(stages: Collection[str], groups: Collection[list[str]]) -> None:
        assert "report" in stages
        done.append("all stages")
        raise processes.StageError("a stage failed")

    monkeypatch.setattr(dvc_graph, "run_all_stages", run_all_stages)
    return done


@pytest.mark.usefixtures("in_process")
def test_a_dry_run_changes_and_runs_nothing(
    home: Path, dvc_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in home.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    run_command_line(["reproduce", "qwen3-coder-30b-a3b", "--dry-run"])
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed[0] == "17 stages:"
        and "init_draft" not in "".join(printed)
        and "  import_draft (1): theirs" in printed
        and "  report" in printed
    )
    assert "  benchmark_served_baseline (3): sglang-chat, sglang-code_gen, sglang-completion" in printed
    assert any(
        line.startswith("target: Qwen/Qwen3-Coder-30B-A3B-Instruct, 30.5e9 parameters, 3.35e9 of them")
        for line in printed
    )
    assert any(line.startswith("KV cache: 98,304 bytes a token") for line in printed)
    assert any(line.startswith("together: ") and "GPU-hours" in line for line in printed)
    after = {file: file.read_bytes() for file in home.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert after == before and dvc_runs == []


@pytest.mark.usefixtures("in_process", "equipped_machine")
def test_it_applies_the_recipe_runs_all_stages_it_can_and_compares_results(
    home: Path, dvc_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failure DVC goes on with other stages (test_dvc_graph.py); the table is of what is there, and the exit tells."""
    (home / "data/raw").mkdir(parents=True)
    (home / "data/raw/weather_maps.jsonl").touch()
    with pytest.raises(SystemExit, match=r"60 of 60 stages failed: .*sample_target, .*; see above, run again"):
        run_command_line(["reproduce", "qwen3-vl-2b-weather"])
    printed = capsys.readouterr().out
    assert dvc_runs == ["all stages"]
    assert YAML(typ="safe").load((home / "params.yaml").read_text())["target"]["model"] == "Qwen/Qwen3-VL-2B-Instruct"
    table = (home / "results/reproduce/qwen3-vl-2b-weather.md").read_text()
    assert table in printed and "79 published numbers" in table and "79 not run" in table


@pytest.mark.usefixtures("in_process")
def test_what_is_not_here_is_named_with_the_command_that_gets_it_before_anything_changes(
    home: Path, dvc_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: nine of eleven recipes stopped for files, one at a time, and said that the recipe knew where they come from."""
    before = (home / "params.yaml").read_bytes()
    needs = [
        r"fix_data.raw: data/raw/weather_toon.jsonl not found; put it there, or correct the key",
        *(
            rf"prepare_prompts.sets.{name}.from: data/prompt_sets/angelslim/{name}.jsonl not found; "
            "run: aerie fetch angelslim-qwen3-1.7b"
            for name in ("alpaca", "gsm8k", "humaneval", "mt_bench")
        ),
        r"benchmark_served or time_cycles, vllm: vllm is neither in serving-env/ nor on the PATH; run: make serving-env",
        r"GPUs: none, expected 1 for target.device cuda; run on a machine with 1 or more",
    ]
    with pytest.raises(SystemExit) as refused:
        run_command_line(["reproduce", "angelslim-qwen3-1.7b"])
    lines = str(refused.value).splitlines()
    assert lines[0] == "aerie: recipe angelslim-qwen3-1.7b needs 7 things that are not here, and nothing was changed:"
    assert all(line.strip().startswith(need) for line, need in zip(lines[1:], needs, strict=True))
    assert dvc_runs == [] and (home / "params.yaml").read_bytes() == before
    capsys.readouterr()
    run_command_line(["reproduce", "angelslim-qwen3-1.7b", "--dry-run"])
    printed = capsys.readouterr().out
    assert all(f"PROBLEM  {need}" in printed for need in needs) and "ok       disk: " in printed


@pytest.mark.usefixtures("in_process", "equipped_machine")
def test_a_disk_or_a_gpu_that_is_too_small_is_refused(
    home: Path, dvc_runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "data/raw").mkdir(parents=True)
    (home / "data/raw/weather_maps.jsonl").touch()
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: Usage(0, 0, 2**30))
    with pytest.raises(
        SystemExit, match=r"needs 1 thing .*\n  disk: 1.00 GiB free here, a run writes about 9.97 GiB; make room"
    ):
        run_command_line(["reproduce", "qwen3-vl-2b-weather"])
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: Usage(0, 0, 2**50))
    monkeypatch.setattr(preflight.resources, "list_gpu_memory", lambda: [resources.Gpu("T4", 4 * 2**30)])
    with pytest.raises(SystemExit, match=r"GPU memory: 3\.96 GiB of weights on 1 GPU; spread a copy over more GPUs"):
        run_command_line(["reproduce", "qwen3-vl-2b-weather"])
    assert dvc_runs == []
