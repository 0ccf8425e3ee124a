"""What a user gets wrong stops at the stage that knows, with one message naming key, expectation and remedy."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages import (
    benchmark,
    check_overfit,
    init_draft,
    prepare_target,
    replay_trees,
    report,
    sample_target,
    train_draft,
)
from stages.telemetry.run_stage import run_stage
from tests.conftest import edit_params


@pytest.fixture
def project(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    shutil.copytree(small_run, project, ignore=shutil.ignore_patterns(".dvc", ".git"))
    monkeypatch.chdir(project)
    return project


def refused(project: Path, changes: dict, main, *arguments: str) -> str:
    edit_params(project, changes)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - each caller looks at the message
        main(*arguments)
    return str(error.value)


def test_a_draft_vocabulary_larger_than_the_targets(project: Path) -> None:
    before = (project / "drafts/e000/draft/model.safetensors").read_bytes()
    for main in (init_draft.main, prepare_target.main):  # prepare_target refuses it before it trains anything
        message = refused(project, {"init_draft": {"draft_vocab_size": 100_000}}, main)
        assert "init_draft.draft_vocab_size is 100000" in message
        assert "464 tokens" in message
        assert "use at most 464" in message
    assert (project / "drafts/e000/draft/model.safetensors").read_bytes() == before
    assert (project / "artifacts/target/model.safetensors").exists()


def test_an_unknown_builtin_target(project: Path) -> None:
    message = refused(project, {"target": {"model": "builtin/weather-huge"}}, prepare_target.main)
    assert "target.model" in message
    assert "builtin/weather-tiny" in message


def test_a_target_that_is_nowhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refused(project, {"target": {"model": "nobody/nothing"}}, prepare_target.main)
    assert "target.model nobody/nothing" in message
    assert "check the spelling" in message


def test_a_draft_that_can_not_learn(project: Path) -> None:
    message = refused(project, {"check_overfit": {"steps": 1, "min_tau": 7.5}}, check_overfit.main)
    assert "check_overfit.min_tau" in message
    assert "raise check_overfit.steps" in message


@pytest.mark.parametrize(
    ("main", "arguments"), [(replay_trees.main, ["e003"]), (benchmark.main, ["eval", "e003", "t5_1_6"])]
)
def test_a_cut_draft(project: Path, main, arguments) -> None:
    weights = project / "drafts/e003/draft/model.safetensors"
    data = weights.read_bytes()
    weights.unlink()  # it is a hard link into DVC's cache
    weights.write_bytes(data[:-100])
    message = refused(project, {}, main, *arguments)
    assert "drafts/e003/draft/model.safetensors" in message
    assert "train_draft@e003" in message


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (train_draft.main, ["e004"], "train_draft.checkpoints has no 'e004'; it has e001, e003, straight"),
        (benchmark.main, ["chat", "e003", "t5_1_6"], "benchmark.workloads has no 'chat'; it has eval"),
        (benchmark.main, ["eval", "e003", "t8_2_99"], "t8_2_31"),
        (train_draft.main, [], "expected NAME, found none"),
    ],
)
def test_words_that_name_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch, main, words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", [main.__module__, *words])
    with pytest.raises(SystemExit) as ended:
        run_stage(main)
    assert message in str(ended.value.code)
    assert str(ended.value.code).startswith("aerie: ")


def test_what_is_refused_is_one_message_and_no_traceback(project: Path) -> None:
    words = [sys.executable, "-m", "stages.fix_data", "now"]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "aerie: expected no arguments, found now\n"


BROKEN = {  # a file, and a stage that reads it
    "results/fix_report.json": (report.main, []),
    "results/train/e003.json": (report.main, []),
    "results/replay/e003.csv": (report.main, []),
    "results/cells/torch/eval-e003-t5_1_6.json": (report.main, []),
    "data/hiddens/eval/origin.json": (replay_trees.main, ["e003"]),
    "drafts/e003/draft/config.json": (replay_trees.main, ["e003"]),
    "drafts/e000/state/progress.json": (train_draft.main, ["e001"]),
    "artifacts/target/target.json": (sample_target.main, []),
    "artifacts/target/config.json": (sample_target.main, []),
    "artifacts/target/tokenizer.json": (sample_target.main, []),
    "artifacts/target/model.safetensors": (sample_target.main, []),
}
CONTENTS = {"empty": b"", "bytes": b"\x00\xff" * 50, "a list": b"[]", "null": b"null", "deep": b"[" * 100_000}


@pytest.mark.parametrize("file", BROKEN)
def test_a_broken_file_is_one_message_that_names_it(project: Path, file: str) -> None:
    """Bug: a file of valid JSON that is no object, a folder in its place, or a broken target ended in tracebacks."""
    main, arguments = BROKEN[file]
    (project / file).unlink()  # it is a hard link into DVC's cache
    for content in CONTENTS.values():
        (project / file).write_bytes(content)
        assert str(Path(file).parent) in refused(project, {}, main, *arguments)
        (project / file).unlink()
    (project / file).mkdir()
    assert str(Path(file).parent) in refused(project, {}, main, *arguments)
