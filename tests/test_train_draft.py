"""Training as a stage: killed at any moment it resumes, and ends bit for bit where an undisturbed run ends."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages import train_draft
from stages.families import held_out
from stages.runtime import free_port
from tests.conftest import SMALL, edit_params

pytestmark = pytest.mark.usefixtures("forked_stages", "one_thread")
RESULTS = ("draft/model.safetensors", "draft/config.json", "state/optimizer.safetensors", "state/progress.json")


def epochs(num_epochs: int | None) -> dict[str, dict]:
    """Return parameters by which `straight` has this many."""
    return {"checkpoints": SMALL["train_draft"]["checkpoints"] | {"straight": {"from": "e000", "epochs": num_epochs}}}


@pytest.fixture
def project(small_run: Path, tmp_path: Path) -> Path:
    """The small run, ready to train again: `straight`, three epochs from e000, is not there yet."""
    project = tmp_path / "project"
    shutil.copytree(small_run, project, ignore=shutil.ignore_patterns(".dvc", ".git", "straight*", ".scratch"))
    return project


@pytest.fixture(scope="module")
def killed_project(small_run: Path, forked_stages: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, where `straight` was killed after its first epoch. Copy it before you change it."""
    project = tmp_path_factory.mktemp("killed") / "project"
    shutil.copytree(small_run, project, ignore=shutil.ignore_patterns(".dvc", ".git", "straight*", ".scratch"))
    process = start(project)
    while not list((project / ".scratch").glob("train_draft-straight-*/log.json")):
        assert process.poll() is None, "no epoch was saved"
        time.sleep(0.02)
    process.kill()
    process.communicate()  # until every process that holds its output has ended
    return project


@pytest.fixture
def killed(killed_project: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed_project, tmp_path / "killed")


def start(project: Path, **variables: str) -> subprocess.Popen:
    command, env = [sys.executable, "-m", "stages.train_draft", "straight"], os.environ | variables
    return subprocess.Popen(command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_and_finish(project: Path, kills: int, seed: int) -> str:
    """Let it be killed `kills` times at random moments, more and more of them past its start, then let it finish."""
    rng = random.Random(seed)
    for _ in range(kills):
        process = start(project)
        time.sleep(rng.uniform(0.5, 3.5))
        process.kill()
        process.communicate()
    process = start(project)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def equals_undisturbed(project: Path, small_run: Path) -> bool:
    files = [Path("drafts/straight") / part for part in RESULTS]
    return all((project / p).read_bytes() == (small_run / p).read_bytes() for p in files)


@pytest.mark.long
def test_a_run_killed_at_random_ends_where_an_undisturbed_one_does(project: Path, small_run: Path) -> None:
    kill_and_finish(project, kills=3, seed=1)
    assert equals_undisturbed(project, small_run)


def test_a_killed_run_resumes_and_ends_where_an_undisturbed_one_does(killed: Path, small_run: Path) -> None:
    assert "resumed after epoch" in kill_and_finish(killed, kills=0, seed=0)
    assert equals_undisturbed(killed, small_run)
    assert not list((killed / ".scratch").glob("train_draft-straight-*"))


def test_work_of_other_parameters_is_not_taken_up(killed: Path) -> None:
    edit_params(killed, {"train_draft": {"ttt_decay": 0.7}})
    assert "resumed" not in kill_and_finish(killed, kills=0, seed=0)


def test_broken_unfinished_work_names_its_folder_and_removing_that_leads_on(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the message was `delete it and run: dvc repro init_draft`, after which the same file was `not found` for good."""
    monkeypatch.chdir(killed)
    (log,) = (killed / ".scratch").glob("train_draft-straight-*/log.json")
    work = log.parent
    for file, content in (("state/progress.json", b"{}"), ("log.json", b"{}"), ("draft/model.safetensors", b"cut")):
        data = (work / file).read_bytes()
        (work / file).write_bytes(content)
        with pytest.raises(ValueError, match=r".") as error:  # what run_stage prints in place of a traceback
            train_draft.main("straight")
        output = str(error.value)
        assert f"{work.relative_to(killed) / file}" in output and "init_draft" not in output
        assert f"remove the folder {work.relative_to(killed)}, which holds nothing else, and run again" in output
        (work / file).write_bytes(data)
    shutil.rmtree(work)
    train_draft.main("straight")


def test_epochs_are_scored_on_eval_answers_which_teach_nothing(project: Path, small_run: Path) -> None:
    """The accept length is replay_trees' tau of that checkpoint; without eval rows the weights are the same to the bit."""
    report = json.loads((small_run / "results/train/straight.json").read_text())
    scores = [epoch["held_out"] for epoch in report["epochs"]]
    chain = pl.read_csv(small_run / "results/replay/straight.csv").filter(num_steps=3, topk=1, temperature=0.0)
    assert scores[-1]["accept_length"] == pytest.approx(chain["tau"].item()) and scores[-1]["answers"] == 6
    shutil.rmtree(project / "data/hiddens/eval")
    assert all(epoch["held_out"] is None for epoch in finish(project)["epochs"])
    assert equals_undisturbed(project, small_run)


def test_the_best_epoch_is_kept_with_its_state(project: Path, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs are made to accept 2, 3 and 1: the checkpoint is that of two epochs under the same schedule."""
    monkeypatch.chdir(project)
    lengths = iter([2.0, 3.0, 1.0])
    monkeypatch.setattr(held_out.HeldOutAnswers, "_replay_chain", lambda own: next(lengths))
    edit_params(project, {"train_draft": {"keep": "best"}})
    train_draft.main("straight")
    assert json.loads(Path("drafts/straight/state/progress.json").read_text())["epoch"] == 2
    edit_params(project, {"train_draft": {"keep": "last", "horizon_epochs": 3, **epochs(2)}})
    best = [(project / "drafts/straight" / part).read_bytes() for part in RESULTS]
    shutil.rmtree(project / "drafts/straight")
    finish(project)
    assert best == [(project / "drafts/straight" / part).read_bytes() for part in RESULTS]
    assert not list(Path(".scratch").glob("train_draft-straight-*"))


def test_epochs_by_the_rows_are_a_schedule_to_their_end(
    project: Path, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr("stages.params.families.MOST_EPOCHS", 3)  # and so those of 32 rows
    edit_params(project, {"train_draft": {"horizon_epochs": None, **epochs(None)}})
    train_draft.main("straight")
    assert equals_undisturbed(project, small_run)


def test_two_processes_learn_what_one_does(project: Path, small_run: Path) -> None:
    """Same packs, same loss, weights equal but for the order of sums; and the state is whole: one process goes on from it."""
    edit_params(project, {"train_draft": {"packs_per_step": 3, **epochs(1)}})
    single_report = finish(project)
    single = load_file(project / "drafts/straight/draft/model.safetensors")
    for parallel in ("ddp", "fsdp"):
        shutil.rmtree(project / "drafts/straight")
        edit_params(project, {"train_draft": {"processes": 2, "parallel": parallel}})
        joint_report = finish_as_ranks(project)
        joint = load_file(project / "drafts/straight/draft/model.safetensors")
        assert single_report["epochs"][-1]["loss"] == pytest.approx(joint_report["epochs"][-1]["loss"], rel=1e-4), (
            parallel
        )
        assert joint.keys() == single.keys()
        for name, tensor in single.items():
            assert (joint[name].float() - tensor.float()).norm() <= 1e-3 * tensor.float().norm(), (parallel, name)
        moments = load_file(project / "drafts/straight/state/optimizer.safetensors")
        assert moments.keys() == load_file(small_run / "drafts/straight/state/optimizer.safetensors").keys()


def test_online_learns_what_stored_hidden_states_teach(project: Path) -> None:
    """The trainer runs the target itself: no hidden states of training rows on disk, the same weights but for how sums round."""
    edit_params(project, {"extract_hiddens": {"online": True}, "train_draft": {"packs_per_step": 2, **epochs(1)}})
    stored = finish(project)
    expected = load_file(project / "drafts/straight/draft/model.safetensors")
    tau = json.loads((project / "results/train/e000.overfit.json").read_text())["tau"]
    run(project, "extract_hiddens")
    shards = {s: next((project / f"data/hiddens/{s}").glob("*.safetensors")) for s in ("train", "eval")}
    assert {s: load_file(path)["last"].shape[1] for s, path in shards.items()} == {"train": 0, "eval": 128}
    run(project, "check_overfit")
    assert json.loads((project / "results/train/e000.overfit.json").read_text())["tau"] == pytest.approx(tau, rel=0.2)
    shutil.rmtree(project / "drafts/straight")
    edit_params(project, {"train_draft": {"processes": 2}})
    online = finish(project)
    assert online["epochs"][-1]["loss"] == pytest.approx(stored["epochs"][-1]["loss"], rel=1e-4)
    for name, tensor in load_file(project / "drafts/straight/draft/model.safetensors").items():
        assert (tensor.float() - expected[name].float()).norm() <= 1e-3 * expected[name].float().norm(), name


def test_segments_in_bfloat16_and_of_a_falling_rate_are_one_under_the_same_horizon(project: Path) -> None:
    """e003 after e001 is three epochs straight to the bit, though the rate falls over four; another horizon differs.

    And were the float32 masters of a draft in bfloat16 rounded between the two, e003 would end elsewhere. The schedule is of
    one shape: each is a number for each step, which tests/training/test_learning_rate.py compares with transformers'.
    """
    edit_params(
        project, {"train_draft": {"dtype": "bfloat16", "schedule": "cosine", "horizon_epochs": 4, "warmup_steps": 2}}
    )
    finish(project)
    for name in ("e001", "e003"):
        shutil.rmtree(project / "drafts" / name)
        finish(project, name)
    straight, chained = (
        {part: (project / "drafts" / name / part).read_bytes() for part in RESULTS} for name in ("straight", "e003")
    )
    assert straight == chained
    state = load_file(project / "drafts/straight/state/optimizer.safetensors")
    draft = load_file(project / "drafts/straight/draft/model.safetensors")
    assert state["master.fc.weight"].dtype == torch.float32 and draft["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(draft["fc.weight"], state["master.fc.weight"].bfloat16())
    first = (project / "drafts/e001" / RESULTS[0]).read_bytes()
    shutil.rmtree(project / "drafts/e001")
    edit_params(project, {"train_draft": {"horizon_epochs": 3}})
    finish(project, "e001")
    assert (project / "drafts/e001" / RESULTS[0]).read_bytes() != first


def finish_as_ranks(project: Path) -> dict:
    """As torchrun starts two processes; the test of online training has the stage start its own."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": free_port.HOST, "MASTER_PORT": str(free_port.find_free_port())}
    ranks = [start(project, **group, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(outputs)
    return json.loads((project / "results/train/straight.json").read_text())


def run(project: Path, stage: str, *arguments: str) -> None:
    command = [sys.executable, "-m", f"stages.{stage}", *arguments]
    completed = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def finish(project: Path, name: str = "straight") -> dict:
    run(project, "train_draft", name)
    return json.loads((project / f"results/train/{name}.json").read_text())


def test_labels_are_the_targets_own_logits_with_its_scale(project: Path, small_run: Path, tmp_path: Path) -> None:
    """Bug: drafts of targets that divide their logits (Granite) were trained on a distribution that is far too certain."""
    edit_params(project, {"train_draft": epochs(1), "check_overfit": {"steps": 5, "min_tau": 1.0}})
    other_project = shutil.copytree(project, tmp_path / "other")
    about = json.loads((project / "artifacts/target/target.json").read_text())
    (project / "artifacts/target/target.json").write_text(json.dumps(about | {"logits_scale": 0.25}))
    weights = load_file(other_project / "artifacts/target/model.safetensors")
    quarter = {"lm_head.weight": weights["model.embed_tokens.weight"] / 4}  # of the tied target
    save_file(weights | quarter, other_project / "artifacts/target/model.safetensors")
    (other_project / "artifacts/target/target.json").write_text(json.dumps(about | {"tie_word_embeddings": False}))
    for folder in (project, other_project):
        kill_and_finish(folder, kills=0, seed=0)
        command = [sys.executable, "-m", "stages.check_overfit", "check_overfit@e000"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    for file in ("drafts/straight/draft/model.safetensors", "results/train/e000.overfit.json"):
        assert (project / file).read_bytes() == (other_project / file).read_bytes() != (small_run / file).read_bytes()
