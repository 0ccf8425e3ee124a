"""What reruns: edit one thing in a finished project, and see which stages wake. docs/reruns.md says the same in prose.

The graph is the real dvc.yaml, untouched, DVC is the real DVC, and `inputs` runs. Only the work of the others is not: in place
of each command we note its stage and write outputs that are a digest of all the stage depends on. So an edit wakes what it
wakes in the worst case: where the stage's real output would not change, DVC stops earlier.
"""

import filecmp
import json
import shutil
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import dvc.output
import dvc.rwlock
import dvc.stage.run
import pytest
from dvc.exceptions import ReproductionError
from dvc.fs import LocalFileSystem
from dvc.utils import strictyaml
from dvc.utils.serialize import _yaml
from dvc_data.hashfile.state import State

from stages.params.draft_sections import TrainDraft
from stages.params.schema import Params
from stages.runtime import stage_code
from tests.conftest import ROOT as REPO
from tests.recorded_graph import (
    Recorder,
    build_quietly,
    digested_once,
    located_once,
    opened,
    parse_json_or_yaml,
    parsed_once,
    validated_once,
)
from tests.reruns_table import BASE, PUBLISHED, RERUNS, Row, adds, sets


def match_stages(patterns: str, names: set[str]) -> set[str]:
    """The names that `patterns` means; a pattern that means none is a mistake of the table."""
    chosen: set[str] = set()
    for pattern in patterns.split():
        found = {name for name in names if fnmatchcase(name, pattern.removeprefix("-"))}
        assert found, f"{pattern} matches no stage"
        chosen = chosen - found if pattern.startswith("-") else chosen | found
    return chosen


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path_factory.mktemp("site")))
        made = Recorder()
        patch.setattr(dvc.stage.run, "cmd_run", made)
        # dvc.lock is read and written whole after each stage, its comments kept: two thirds of the time here. So as JSON.
        parse = _yaml.parse_yaml
        patch.setattr(_yaml, "parse_yaml_for_update", lambda text, path: parse_json_or_yaml(parse, text, path))
        # In one piece: json.dump writes it in Python, a hundred thousand pieces a file.
        patch.setattr(_yaml, "_dump", lambda data, stream: stream.write(json.dumps(data)))
        cached = parsed_once(parse)
        for module in (_yaml, strictyaml):
            patch.setattr(module, "parse_yaml", cached)
        patch.setattr(strictyaml, "validate", validated_once(strictyaml.validate))
        patch.setattr(dvc.output.Output, "_build", build_quietly)
        # Each path of each stage is looked up, and compared with the project's folder, at every step: a quarter of the rest.
        patch.setattr(dvc.output, "get_cloud_fs", located_once(dvc.output.get_cloud_fs))
        patch.setattr(LocalFileSystem, "isin", staticmethod(cache(LocalFileSystem.isin)))
        # The same code in each copy of the project.
        patch.setattr(stage_code, "digest_code", digested_once(stage_code.digest_code))
        patch.setattr(stage_code, "_read_imports", digested_once(stage_code._read_imports))
        # DVC's locks, which take an eighth of the time; no other process works in this project.
        patch.setattr(dvc.rwlock, "rwlock", lambda *_, **__: nullcontext())
        # The links made in the project, for a checkout to remove: a database is opened and closed for every output.
        patch.setattr(State, "set_link", lambda *_: None)
        yield made


@pytest.fixture(scope="module")
def finished_project(tmp_path_factory: pytest.TempPathFactory, recorder: Recorder) -> Path:
    """A project in which every stage has run once."""
    root = tmp_path_factory.mktemp("reruns") / "finished"
    (root / ".dvc").mkdir(parents=True)
    config = (REPO / ".dvc" / "config").read_text()
    (root / ".dvc" / "config").write_text(config.replace("[core]", "[core]\n    no_scm = true"))
    for name in ("dvc.yaml", "params.yaml", ".dvcignore"):
        shutil.copy(REPO / name, root / name)
    sets(**BASE)(root)
    code = [
        file for file in (REPO / "stages").rglob("*.*") if file.suffix in (".py", ".j2")
    ]  # of stages yet to come, too
    for name in (file.relative_to(REPO) for file in code):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, root / name)
    (root / "README.md").touch()
    (root / "local" / "mine").mkdir(parents=True)
    (root / "local" / "mine" / "model.safetensors").write_text("weight")
    shutil.copytree(REPO / "data/tables", root / "data/tables")
    (root / "templates").mkdir()
    (root / "templates" / "chatml.jinja").touch()
    (root / "draft_configs").mkdir()
    (root / "draft_configs" / "theta_10000.json").touch()
    (root / "data/prompt_sets").mkdir(parents=True)
    (root / "data/prompt_sets/gsm8k.jsonl").touch()
    (root / "data/prompt_sets/mt_bench.jsonl").touch()
    (root / "data/targets").mkdir()
    (root / "data/targets/weights").touch()
    (root / "data" / "raw").mkdir()
    (root / "data" / "raw" / "rows.jsonl").write_text("{}\n")
    ran = recorder.repro(root)
    assert ran == recorder.names
    assert recorder.repro(root) == set()
    return root


def test_a_published_draft_is_benchmarked_without_sampling_for_training_or_training(
    finished_project: Path, tmp_path: Path, recorder: Recorder
) -> None:
    """Its cell needs the target, the eval split's prompts and the draft: no hidden states, no draft of ours."""
    root = tmp_path / "project"
    shutil.copytree(finished_project, root)
    sets(import_draft={"checkpoints": PUBLISHED}, benchmark={"checkpoints": adds("theirs")})(root)
    with opened(root) as repo:
        cell = next(s for s in repo.index.stages if "-theirs-" in s.addressing)
        graph, open_ends, needed = repo.index.graph, [cell], set()
        while open_ends:
            stage = open_ends.pop()
            needed.add(stage.addressing)
            open_ends += graph.successors(stage)
    prompts = {"prepare_prompts@eval", "prepare_target", "sample_target", "fix_data", "inputs"}
    assert needed == {cell.addressing, "import_draft@theirs"} | prompts


@pytest.mark.parametrize("row", RERUNS, ids=lambda row: row.edit)
def test_an_edit_wakes_its_stages_and_undoing_it_brings_the_rest_back(
    row: Row, finished_project: Path, tmp_path: Path, recorder: Recorder
) -> None:
    root = tmp_path / "project"
    shutil.copytree(finished_project, root)
    row.by(root)
    ran = recorder.repro(root)
    assert ran == match_stages(row.runs, recorder.names)
    if row.back is None:
        return
    for file in (
        "params.yaml",
        "README.md",
        *(path.relative_to(finished_project) for path in finished_project.glob("stages/**/*.py")),
    ):
        if not (root / file).exists() or not filecmp.cmp(finished_project / file, root / file):
            shutil.copy(finished_project / file, root / file)
    ran = recorder.repro(root)
    assert ran == match_stages(row.back, recorder.names)


def test_a_default_of_the_schema_reruns_the_stages_that_declare_it(
    finished_project: Path, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "project"
    shutil.copytree(finished_project, root)
    monkeypatch.setattr(TrainDraft.model_fields["weight_decay"], "default", 0.01)
    try:
        for model in (TrainDraft, Params):
            model.model_rebuild(force=True)
        ran = recorder.repro(root)
    finally:
        monkeypatch.undo()
        for model in (TrainDraft, Params):
            model.model_rebuild(force=True)
    assert ran == match_stages("train_draft@* replay_trees@* benchmark@* benchmark_served@* report", recorder.names)


def test_an_edit_while_a_run_is_at_work_mislabels_nothing(
    finished_project: Path, tmp_path: Path, recorder: Recorder
) -> None:
    """Bug: DVC hashes parameters when a stage has ended, and recorded the edit as what the result was made by."""
    root = tmp_path / "project"
    shutil.copytree(finished_project, root)
    sets(train_draft={"muon_learning_rate": 0.5})(root)
    recorder.meanwhile["train_draft@e003"] = lambda: sets(train_draft={"muon_learning_rate": 0.25})(root)
    trained = "train_draft@* replay_trees@* benchmark@* benchmark_served@* report"
    assert recorder.repro(root) == match_stages(trained, recorder.names)
    assert recorder.repro(root) == match_stages(trained, recorder.names)  # by the edit
    sets(train_draft={"muon_learning_rate": 0.5})(root)
    assert recorder.repro(root) == set()  # all of the first run is that of 0.5


def pushed_project(finished_project: Path, tmp_path: Path) -> Path:
    """A copy of a finished project that has a remote, and all in it that may be there."""
    root = tmp_path / "published"
    shutil.copytree(finished_project, root)
    local = f"[core]\n    remote = shared\n['remote \"shared\"']\n    url = {tmp_path / 'remote'}\n"
    (root / ".dvc" / "config.local").write_text(local)
    with opened(root) as repo:
        repo.push()
    return root


def clone_project(root: Path, to: Path) -> Path:
    """What git has of it: neither DVC's cache nor what the stages made."""
    made = shutil.ignore_patterns("cache", "tmp", "artifacts", "fixed", "sampled", "hiddens", "drafts", "results")
    code = str(root / "stages")  # where a folder is called results, too
    shutil.copytree(root, to, ignore=lambda folder, files: set() if folder.startswith(code) else made(folder, files))
    return to


SHARED = {"pull": True, "allow_missing": True}  # dvc repro --pull --allow-missing


def test_a_clone_runs_only_what_was_edited(finished_project: Path, tmp_path: Path, recorder: Recorder) -> None:
    """On what its author has published, without the hidden states of training."""
    clone = clone_project(pushed_project(finished_project, tmp_path), tmp_path / "clone")
    assert recorder.repro(clone, **SHARED) == set()
    assert not (clone / "results").exists()  # nor is anything fetched for it
    with opened(clone) as repo:
        repo.pull(allow_missing=True)
    assert recorder.repro(clone, **SHARED) == set()
    sets(benchmark={"trees": adds("t8_2_16")}, replay_trees={"topk": adds(7)})(clone)
    runs = "benchmark@*-t8_2_16 replay_trees@* report"
    ran = recorder.repro(clone, **SHARED)
    assert ran == match_stages(runs, recorder.names)
    assert not list(clone.glob("data/hiddens/train/*"))
    sets(train_draft={"muon_learning_rate": lambda old: old / 2})(clone)
    with pytest.raises(ReproductionError) as failed:
        recorder.repro(clone, **SHARED)
    assert "data/hiddens/train" in str(failed.value.__cause__)
    runs = "extract_hiddens train_draft@* replay_trees@* benchmark@* benchmark_served@* report"
    ran = recorder.repro(clone)
    assert ran == match_stages(runs, recorder.names)
