"""What each stage may read of params.yaml, and what its inputs file says."""

import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from stages import inputs
from stages.params import stage_inputs
from stages.params.engines import ENGINES
from stages.params.schema import load_params
from stages.params.stage_inputs import Instance, build_inputs, list_differences, read_params
from stages.runtime.digests import KeptDigests
from tests.conftest import ROOT, edit_params


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_key_that_a_stage_does_not_declare_is_an_error(project: Path) -> None:
    params = read_params("train_draft", "e003")
    assert list(params.train_draft.checkpoints) == ["e003"] and params.train_draft.processes == 1
    for read in (lambda: params.benchmark, lambda: params.extract_hiddens.dtype):
        with pytest.raises(AttributeError, match="is not declared"):
            read()


def test_defaults_count_as_written_out(project: Path) -> None:
    """Or writing a default into params.yaml would run stages again."""
    instance = Instance.parse("train_draft@e003")
    found = build_inputs(load_params(), instance, KeptDigests())
    edit_params(
        project, {"train_draft": {"grad_clip": 0.5, "ttt_steps": 7}, "sample_target": {"server": {"timeout_s": 600}}}
    )
    assert build_inputs(load_params(), instance, KeptDigests()) == found
    edit_params(project, {"train_draft": {"grad_clip": 0.6, "processes": 8}})
    differences = list_differences(found, build_inputs(load_params(), instance, KeptDigests()))
    assert differences == ["params.yaml: train_draft.grad_clip is 0.6, was 0.5"]


def test_a_family_leaves_out_the_code_of_others(project: Path) -> None:
    block = {"from": "e000", "epochs": 3, "method": "dflash", "layers": 1, "block_size": 4, "anchors": 8}
    heads = {"from": "e000", "epochs": 3, "method": "medusa", "heads": 2}
    edit_params(project, {"train_draft": {"checkpoints": {"b": block, "m": heads, "e": {"from": "e000", "epochs": 3}}}})
    edit_params(project, {"replay_trees": {"checkpoints": ["e"]}, "benchmark": {"checkpoints": ["e"]}})
    params, kept = load_params(), KeptDigests()
    code = {name: build_inputs(params, Instance.parse(f"train_draft@{name}"), kept)["code"] for name in "bme"}
    loss, heads_loss, ttt = "stages/families/block/loss.py", "stages/families/medusa.py", "stages/training/ttt.py"
    found = [[file in code[name] for file in (loss, heads_loss, ttt)] for name in "bme"]
    assert found == [[True, False, False], [False, True, True], [False, False, True]]


def test_the_shapes_of_cells_count_for_the_replay_of_lookups_alone(project: Path) -> None:
    """Or another cell would replay trained drafts again, which takes hours."""
    edit_params(project, {
        "import_draft": {"checkpoints": {"suffix": {"model": "builtin/suffix"}}},
        "replay_trees": {"checkpoints": ["e003", "suffix"]}, "benchmark": {"trees": ["t3_1_4", "x8_4"]},
    })  # fmt: skip
    found = [
        build_inputs(load_params(), Instance("replay_trees", {"checkpoint": n}), KeptDigests())
        for n in ("e003", "suffix")
    ]
    assert ["benchmark.trees" in one["params"] for one in found] == [False, True]
    engine = "stages/engine/proposer.py"
    assert [engine in one["code"] for one in found] == [False, True]
    assert read_params("replay_trees", "suffix").benchmark.trees == ["t3_1_4", "x8_4"]
    with pytest.raises(AttributeError, match="is not declared"):
        read_params("replay_trees", "e003").benchmark.trees  # noqa: B018


def test_what_every_engine_and_family_runs_is_left_out_for_none(project: Path) -> None:
    """Bug: a list of files to leave out named a module that others had been joined to, so its edits would rerun nothing."""
    shared = {"stages/measuring/measured_server.py", "stages/families/family.py"}
    for engine in ("sglang", "vllm"):
        edit_params(project, {"benchmark_served": {"engines": [engine], "workloads": ["eval"]}})
        name = f"benchmark_served@{engine}-eval-e009-t5_1_6"
        code = build_inputs(load_params(), Instance.parse(name), KeptDigests())["code"]
        assert shared <= code.keys() and "stages/engines/torch_engine.py" not in code, engine
    code = build_inputs(load_params(), Instance.parse("benchmark@eval-e009-t8_2_16"), KeptDigests())["code"]
    assert "stages/engines/torch_engine.py" in code and "stages/measuring/measured_server.py" not in code
    assert all((ROOT / file).is_file() for engine in ENGINES.values() for file in engine.modules)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of the project, made once."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, folder)
    (folder / "stages").symlink_to(ROOT / "stages")
    with chdir(folder):
        inputs.main()
    return folder / "artifacts"


@pytest.fixture
def begun(project: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which `inputs` ran, as a stage that DVC runs finds it."""
    shutil.copy(ROOT / "dvc.yaml", project)
    shutil.copytree(artifacts, project / "artifacts")
    monkeypatch.setenv("DVC_STAGE", "train_draft@e003")
    return project


def test_a_stage_reads_what_the_run_began_with(begun: Path) -> None:
    """Bug: params.yaml edited for the next run was what this run's later stages read, or what DVC recorded of the present one."""
    edit_params(begun, {"train_draft": {"seed": 6}})
    assert read_params("train_draft", "e003").train_draft.seed == 5
    (begun / "params.yaml").write_text("train_draft: {seed: ")  # being typed
    assert read_params("train_draft", "e003").train_draft.seed == 5


def test_a_stage_on_stale_inputs_stops(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dvc repro --single-item` does not run `inputs`."""
    monkeypatch.setattr(stage_inputs, "is_run_of_inputs", lambda: False)
    stage_inputs.check_inputs("train_draft@e003")
    edit_params(begun, {"train_draft": {"seed": 6}, "report": {"title": "another"}})
    stage_inputs.check_inputs("replay_trees@e003")
    with pytest.raises(
        ValueError, match=r"train_draft\.seed is 6, was 5 since the stage `inputs` ran.* run `aerie run`"
    ):
        stage_inputs.check_inputs("train_draft@e003")
    monkeypatch.setattr(stage_inputs, "is_run_of_inputs", lambda: True)
    stage_inputs.check_inputs("train_draft@e003")


def test_code_that_changed_since_stops_a_stage_in_any_run(begun: Path) -> None:
    file = begun / "artifacts/inputs/train_draft-e003.json"
    recorded = json.loads(file.read_text())
    recorded["code"]["stages/training/ttt.py"] = "of before"
    file.write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match=r"train_draft@e003: stages/training/ttt\.py changed since"):
        stage_inputs.check_inputs("train_draft@e003")


def test_files_that_a_parameter_names_count(project: Path) -> None:
    (project / "mine").mkdir()
    (project / "mine/model.safetensors").write_text("weights")
    edit_params(project, {"target": {"model": "mine"}})
    before = build_inputs(load_params(), Instance("prepare_target"), KeptDigests())
    (project / "mine/model.safetensors").write_text("another")
    after = build_inputs(load_params(), Instance("prepare_target"), KeptDigests())
    assert list_differences(before, after) == ["target.model: other files"]
