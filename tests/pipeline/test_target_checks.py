"""Before any stage runs: mask tokens against the tokenizer of a target that is here already, and trees that are left out."""

import contextlib
import logging
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig

from pipeline import commands, doctor, dvc_graph
from stages import prepare_target
from stages.target import manifest
from tests.conftest import EAGLE3, ROOT, edit_params

pytestmark = pytest.mark.usefixtures("forked_stages")
BLOCK = {"from": "e000", "epochs": 1, "method": "dflash", "layers": 1, "block_size": 8, "anchors": 8}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params.yaml, raw data and the embedded target, as a run leaves them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "data/raw", tmp_path / "data/raw")
    shutil.copytree(ROOT / "data/targets/weather-tiny", manifest.TARGET_FOLDER)
    config = AutoConfig.from_pretrained(manifest.TARGET_FOLDER)
    made = prepare_target.describe_target("builtin/weather-tiny", None, config, manifest.TARGET_FOLDER, None)
    manifest.write_manifest(manifest.TARGET_FOLDER, made)
    return tmp_path


def test_a_mask_token_that_texts_use_is_refused_before_any_stage(home: Path) -> None:
    """Bug: check_overfit found it, after sampling and extraction, where prepare_target's output was there already."""
    size = manifest.read_manifest().vocab_size
    segments = {"used": BLOCK | {"mask_token_id": 5}, "beyond": BLOCK | {"mask_token_id": size}, "auto": BLOCK}
    edit_params(home, {"train_draft": {"checkpoints": EAGLE3 | segments}})
    with pytest.raises(
        ValueError, match=r"^params\.yaml: train_draft\.checkpoints\.used: mask_token_id is 5, the"
    ) as error:
        commands.check_run_params()
    assert f"params.yaml: train_draft.checkpoints.beyond: mask_token_id is {size}, outside of" in str(error.value)
    assert "expected one of the" in str(error.value) and "checkpoints.auto" not in str(error.value)
    (found,) = [each for each in doctor.check_all() if each.subject == "params.yaml"]
    assert found.ok is False and f"params.yaml: {found.found}" == str(error.value)
    edit_params(home, {"target": {"model": "someone/other"}})  # of another target, which is not here yet
    commands.check_run_params()
    edit_params(home, {"target": {"model": "builtin/weather-tiny"}})
    (manifest.TARGET_FOLDER / "tokenizer.json").write_text("{")  # broken: prepare_target makes it anew
    commands.check_run_params()


@pytest.mark.parametrize("target", [{"chat_template": "none.jinja"}, {"feature_layers": [1, 99]}])
def test_a_chat_template_and_feature_layers_are_checked_before_any_stage(home: Path, target: dict[str, object]) -> None:
    """Bug: prepare_target found them, after fix_data; doctor said that nothing was in the way of a run."""
    shutil.copytree(ROOT / "data/targets", home / "data/targets")
    edit_params(home, {"target": target})
    with pytest.raises(ValueError, match=rf"^params\.yaml: target\.{next(iter(target))} is ") as error:
        commands.check_run_params()
    (found,) = [each for each in doctor.check_all() if each.subject == "params.yaml"]
    assert found.ok is False and f"params.yaml: {found.found}" == str(error.value)


@pytest.mark.parametrize("edit", [{"chat_template": "none.jinja"}, {"model": "mine"}], ids=["template", "unwatched"])
def test_a_run_by_prefect_makes_the_checks_of_a_run_here(
    home: Path, monkeypatch: pytest.MonkeyPatch, edit: dict[str, object]
) -> None:
    """Bug: it looked for the raw data alone, and failed in a stage, hours later where that is sampling on other hosts."""
    from pipeline import flows  # Prefect, 1 s

    shutil.copytree(ROOT / "data/targets/weather-tiny", home / "mine")
    edit_params(home, {"target": edit})
    with pytest.raises(ValueError, match=r"^params\.yaml: target\.") as error:
        commands.check_run_params()
    monkeypatch.setattr(flows, "require_server", lambda: None)
    monkeypatch.setattr(flows, "build", lambda **_: pytest.fail("the flow was started"))
    with pytest.raises(SystemExit) as ended:  # from a terminal
        flows.main()
    assert ended.value.code == f"aerie: {error.value}"
    monkeypatch.setattr(flows.run_names, "rename_run", lambda name: name)
    monkeypatch.setattr(flows.run_names, "tag_run", lambda tags: None)
    monkeypatch.setattr(flows, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(flows.dispatch, "open_hosts", lambda _: pytest.fail("hosts were asked"))
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(ValueError, match=re.escape(str(error.value))),
    ):  # from the pages
        flows._prepare_run(stack, lambda _: "a run", None, None)


def test_trees_that_are_left_out_are_told_before_a_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stale, run and doctor: the user need not open a cell to learn why it has no number."""
    edit_params(home, {
        "train_draft": {"checkpoints": EAGLE3 | {"block": BLOCK}},
        "benchmark": {"checkpoints": ["e009", "block"], "trees": ["t7_1_8", "t8_2_16"]},
    })  # fmt: skip
    told = "left out of benchmark: t8_2_16 with block: it is deeper than the 7 drafts of a block"
    monkeypatch.setattr(dvc_graph, "ask_stale", dict)
    assert list(commands.list_stale()) == [told, commands.NOTHING_STALE]
    assert told in [each.found for each in doctor.check_all()]
    monkeypatch.setattr(dvc_graph, "explain_stale", lambda: {"report": ["new"]})
    monkeypatch.setattr(dvc_graph, "list_stages", lambda: {"report": []})
    lines = commands.run_graph()
    assert [next(lines), next(lines)] == [told, "stale: report (new)"]
    lines.close()  # before the first stage


def test_a_mask_token_is_no_reason_to_start_a_process_where_none_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_params(home, {"train_draft": {"checkpoints": EAGLE3 | {"auto": BLOCK}}})
    monkeypatch.setattr("pipeline.target_checks.subprocess.run", lambda *_, **__: pytest.fail("a process was started"))
    commands.check_run_params()
