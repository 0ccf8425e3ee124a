"""What a user gets wrong stops at the stage that knows, with one message naming key, expectation and remedy."""

import shutil
from pathlib import Path

import pytest

from stages import init_draft, prepare_target, replay_trees, sample_target, train_draft
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
    for main in (init_draft.main, prepare_target.main):
        message = refused(project, {"init_draft": {"draft_vocab_size": 100_000}}, main)
        assert "init_draft.draft_vocab_size is 100000" in message
        assert "expected at most the target's 464 tokens" in message
    assert (project / "drafts/e000/draft/model.safetensors").read_bytes() == before
    assert (project / "artifacts/target/model.safetensors").exists()


def test_a_target_that_is_nowhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refused(project, {"target": {"model": "nobody/nothing"}}, prepare_target.main)
    assert "target.model nobody/nothing" in message
    assert "check the spelling" in message


BROKEN = {  # a file, and a stage that reads it; those of the report are mutated in test_foreign_bytes.py
    "data/hiddens/eval/origin.json": (replay_trees.main, ["e003"]),
    "drafts/e000/state/progress.json": (train_draft.main, ["e001"]),
    "artifacts/target/target.json": (sample_target.main, []),
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
