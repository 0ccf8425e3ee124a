"""docs/flags.md: what flags of the seeds do, shown by an effect in a small run.

The runs are of tests/flag_runs.py: a tiny target of random weights, a draft trained on 17 rows for one epoch.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from stages import train_draft
from stages.draft import checkpoint
from tests import flag_runs
from tests.conftest import edit_params


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = flag_runs.copy_trained(trained_once, tmp_path / "project")
    monkeypatch.chdir(project)
    return project


@pytest.fixture(scope="module")
def trained_once(shared_talking_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("flags") / "project"
    shutil.copytree(shared_talking_project, project, symlinks=True)
    flag_runs.make_trained(project)
    return project


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.05},
        {"warmup_steps": 1},
        {"grad_clip": 1e-4},
        {"ttt_steps": 1},
        {"ttt_decay": 0.1},
        {"mask": "eagle"},
        {"loss": "lk_alpha"},
        {"schedule": "cosine", "horizon_epochs": 3},
        {"schedule": "linear", "horizon_epochs": 3},
        {"seed": 7},
    ],
    ids=lambda change: next(iter(change)),
)
def test_settings_of_training_change_the_draft(trained: Path, change: dict[str, Any]) -> None:
    """Of SpecForge's and AngelSlim's flags: another draft after one epoch; without a change the same one."""
    path = checkpoint.locate_checkpoint("e001") / "draft/model.safetensors"
    before = path.read_bytes()
    edit_params(trained, {"train_draft": change})
    train_draft.main("e001")
    assert path.read_bytes() != before


def test_answers_follow_the_workloads_keys(trained: Path) -> None:
    base = {"num_prompts": 2, "max_new_tokens": 6, "repeats": 1, "warmup": 0}
    greedy = flag_runs.decode(base)
    assert {row.output_tokens for row in greedy.point.requests} == {6} and greedy.row.temperature == 0
    assert {row.output_tokens for row in flag_runs.decode(base | {"max_new_tokens": 9}).point.requests} == {9}
    assert flag_runs.decode(base | {"repeats": 2}).row.requests == 2 * greedy.row.requests
    larger = flag_runs.decode(base, cell=("e003", "t3_1_4"))
    assert (larger.row.num_steps, larger.row.topk, larger.row.num_draft_tokens) == (3, 1, 4)
    assert (greedy.row.num_steps, greedy.row.topk, greedy.row.num_draft_tokens) == (3, 2, 6)
    drawn = [flag_runs.decode(base | {"temperature": 1.0, "seed": seed}) for seed in (1, 1, 2)]
    cycles = [[(row.cycles, row.accepted, row.finish_reason) for row in line.point.requests] for line in drawn]
    assert cycles[0] == cycles[1] and {line.row.temperature for line in drawn} == {1.0}
    assert drawn[0].row.tau == drawn[1].row.tau
