"""Artifacts made with another release of torch or transformers: `stale` warns, and nothing reruns for them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline import cli, dvc_graph, versions
from stages.telemetry import run_stage, stage_log
from stages.telemetry.stage_log import StageRun
from tests.pipeline.conftest import Project, give_params

NOW = {package: version(package) for package in stage_log.PACKAGES}
AT = 1_700_000_000_000_000_000  # when the faked runs were, in ns
HOUR = 3_600_000_000_000


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of two stages whose outputs were written at AT, and a log without a line."""
    monkeypatch.chdir(tmp_path)
    stages = {}
    for name, command in {"init_draft": "init_draft", "train_draft@e003": 'train_draft "$DVC_STAGE"'}.items():
        out = Path("drafts") / name / "draft"
        out.mkdir(parents=True)
        written(out / "model.safetensors", AT)
        stages[name] = {"cmd": f"python -m stages.{command}", "outs": [{"path": str(out)}]}
    YAML(typ="safe").dump({"schema": "2.0", "stages": stages}, versions.LOCK_FILE)
    return tmp_path


def written(path: Path, at: int) -> None:
    path.write_text(str(at))
    os.utime(path, ns=(at, at))


def ran(stage: str, at: int = AT, **other: str) -> None:
    """A faked line of the log: a run around `at` with the versions of now, but for `other`."""
    run = StageRun(stage, at - 1_000_000_000, at + 1_000_000_000, NOW | other, 2.0, [], None)
    stage_log.LOG_FILE.parent.mkdir(exist_ok=True)
    with stage_log.LOG_FILE.open("a") as log:
        log.write(json.dumps(asdict(run)) + "\n")


def test_artifacts_of_the_installed_versions_give_no_warning() -> None:
    assert versions.list_warnings() == []
    ran("init_draft")
    assert versions.list_warnings() == []


def test_an_artifact_of_another_release_is_named_with_both_versions() -> None:
    """Bug: no stage depends on torch or transformers, so an upgrade mixed results of both without a word."""
    ran("init_draft", torch="1.13.1", transformers="4.57.0")
    ran("train_draft@e003", torch="1.13.1", transformers="4.57.0")
    (line,) = versions.list_warnings()
    assert line.startswith(
        f"made by other versions: init_draft, train_draft@e003 (torch 1.13.1, now {NOW['torch']}; transformers 4.57.0, now "
        f"{NOW['transformers']}); nothing reruns"
    )
    ran("init_draft", AT + HOUR)  # made again, with what is installed
    written(Path("drafts/init_draft/draft/model.safetensors"), AT + HOUR)
    (line,) = versions.list_warnings()
    assert "versions: train_draft@e003 (" in line


def test_what_comes_back_from_the_cache_is_of_the_run_that_made_it() -> None:
    """DVC's links keep the time a file was written: the last run is not that of what lies here."""
    ran("init_draft", torch="1.13.1")
    ran("init_draft", AT + HOUR)
    assert len(versions.list_warnings()) == 1
    written(Path("drafts/init_draft/draft/model.safetensors"), AT + 3 * HOUR)  # copied or pulled: nobody knows
    YAML(typ="safe").dump(YAML(typ="safe").load(versions.LOCK_FILE), versions.LOCK_FILE)  # as DVC does
    assert versions.list_warnings() == []


@pytest.mark.parametrize(
    ("package", "made_by", "now", "is_noted"),
    [
        ("torch", "2.11.0", "2.13.0+cpu", True),
        ("torch", "2.13.0+cu130", "2.13.1+cpu", False),
        ("transformers", "5.17.0", "5.23.0", False),
        ("transformers", "4.57.1", "5.0.0", True),
        ("numpy", "1.0", "2.0", False),
    ],
)
def test_a_release_is_torchs_minor_and_transformers_major_number(
    package: str, made_by: str, now: str, is_noted: bool
) -> None:
    run = StageRun("init_draft", AT, AT, {package: made_by}, 2.0, [], None)
    installed = {package: now} if package in versions.RELEASE_PARTS else NOW
    assert bool(versions._list_other_versions(run, installed)) == is_noted


def test_log_and_lock_are_read_only_where_one_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran("init_draft", torch="1.13.1")
    found = versions.list_warnings()
    with monkeypatch.context() as patch:
        patch.setattr(versions, "_describe_other_versions", None)
        assert versions.list_warnings() == found
    ran("train_draft@e003", torch="1.13.1")
    assert versions.list_warnings() != found


def test_stale_warns_of_other_versions_although_nothing_is_stale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dvc_graph, "ask_stale", dict)
    give_params(Project(Path()))
    Path("raw.csv").touch()
    ran("init_draft", torch="1.13.1")
    cli.run_command_line(["stale"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("made by other versions: init_draft (torch 1.13.1") and lines[1:] == ["nothing is stale"]


def test_a_run_that_ends_well_is_logged_and_a_broken_line_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)  # loaded or not by other tests
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with stage_log.log_run("train_draft@e003", ["e003"], []):
        pass
    with stage_log.LOG_FILE.open("a") as log:
        log.write('{"stage": "cut\n{"stage": "of another version"}\n')
    with pytest.raises(ValueError, match="it failed"), stage_log.log_run("train_draft@e009", ["e009"], []):
        raise ValueError("it failed")
    with stage_log.log_run("sample_target", ["--preview"], []):
        pass
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "1")
        with stage_log.log_run("train_draft@e003", ["e003"], []):
            pass
    (run,) = stage_log.read_log()
    assert run.stage == "train_draft@e003" and run.versions == {"torch": NOW["torch"]}
    assert run.began_ns <= run.ended_ns and run.seconds >= 0 and run.gpus == [] and run.joules is None


def test_a_logged_run_has_the_cpu_time_of_its_own_processes_too() -> None:
    """A child counts its CPU time by itself; lines of before have none."""
    until = "import time\nwhile time.process_time() < 0.2: pass"
    with stage_log.log_run("train_draft@e003", ["e003"], []):
        subprocess.run([sys.executable, "-c", until], check=True)
    line = json.loads(stage_log.LOG_FILE.read_text())
    del line["process_s"]
    with stage_log.LOG_FILE.open("a") as log:
        log.write(json.dumps(line) + "\n")
    now, before = stage_log.read_log()
    assert now.process_s is not None and now.process_s >= 0.2 and before.process_s is None


@pytest.mark.parametrize(
    ("argv", "stage"),
    [
        (["/there/stages/fix_data.py"], "fix_data"),
        (["/there/stages/train_draft.py", "train_draft@e003"], "train_draft@e003"),
        (["/there/stages/train_draft.py", "e003"], "train_draft@e003"),
        (["/there/stages/benchmark.py", "eval", "e003", "t5_1_6"], "benchmark@eval-e003-t5_1_6"),
        (["/there/stages/benchmark_served.py", "benchmark_served_baseline@eval"], "benchmark_served_baseline@eval"),
    ],
)
def test_a_run_is_logged_under_its_name_in_the_graph(argv: list[str], stage: str) -> None:
    """Bug: dvc.lock has the command with "$DVC_STAGE" in it, the log had the words, and no run was found again."""
    assert run_stage._stage_name(argv) == stage
