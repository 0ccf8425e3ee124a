"""A sampled project for every test of sample_target."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from stages import fix_data, prepare_target, sample_target
from tests.conftest import copy_project, edit_params, make_for_all
from tests.sampling.sampled_project import TEMPLATE


@pytest.fixture(scope="session")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a target that can say a little, and its answers by the transformers backend. Copy it to change it."""

    def make(project: Path) -> None:
        edit_params(copy_project(project), {
            "target": {"num_threads": 1},  # two processes of two threads on two cores would wait for each other
            "sample_target": {"train_rows": 6, "eval_rows": 3, "max_new_tokens": 24, "shard_size": 4},
        })  # fmt: skip
        with chdir(project):
            fix_data.main()
            prepare_target.main()
            template = Path("artifacts/target/chat_template.jinja")
            assert template.exists()
            template.write_text(TEMPLATE)
            sample_target.main()

    return make_for_all(tmp_path_factory, "sampled", make)


@pytest.fixture
def project(sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(sampled, tmp_path / "project", ignore=shutil.ignore_patterns(".git", ".dvc"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"
