"""Before any stage runs: targets that are refused, and trees that are left out."""

import contextlib
import logging
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoConfig, PretrainedConfig, Qwen2_5_VLConfig, Qwen3NextConfig

from pipeline import commands, doctor, processes
from stages import prepare_target
from stages.draft import supported_targets
from stages.params import schema
from stages.target import manifest
from tests.conftest import ROOT, edit_params

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
    made = supported_targets.describe_target("builtin/weather-tiny", None, config, manifest.TARGET_FOLDER, None)
    manifest.write_manifest(manifest.TARGET_FOLDER, made)
    return tmp_path


def test_a_run_by_prefect_makes_the_checks_of_a_run_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it looked for the raw data alone, and failed in a stage, hours later where that is sampling on other hosts."""
    from pipeline import flows  # Prefect, 1 s

    edit_params(home, {"target": {"chat_template": "none.jinja"}})
    with pytest.raises(ValueError, match=r"^params\.yaml: target\.") as error:
        commands.check_run_params()
    monkeypatch.setattr(flows, "require_server", lambda: None)
    monkeypatch.setattr(flows.run_pages, "rename_run", lambda name: name)
    monkeypatch.setattr(flows, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(flows.dispatch, "find_hosts", lambda *_: pytest.fail("hosts were asked"))
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match=re.escape(str(error.value))):
        flows._prepare_run(stack, "a run", None)


HYBRID = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 640, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
MISTRAL = {key: HYBRID[key] for key in list(HYBRID)[:6]}
WINDOW = {
    "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}  # fmt: skip
REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "hybrid": (Qwen3NextConfig(**HYBRID), r"is a qwen3_next, which keeps state other than keys and values of its own"),
    "window": (Qwen2_5_VLConfig(text_config=MISTRAL | WINDOW), r"see 24 tokens \(sliding_window\)"),
}


def run_here(module: str, *words: object) -> str:
    """Run the check of targets in this process, which has imported transformers. The size of a run is not known."""
    if module == "stages.reproduce.estimate":
        raise ValueError("nothing is recorded of this target")
    prepare_target.supported_targets.main(*map(str, words))
    return ""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_target_that_prepare_target_refuses_is_refused_before_any_stage(
    home: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Bug: doctor said that nothing was in the way of a run. A folder, and an id whose config is in the cache; no weights."""
    config, message = REFUSED[kind]
    if kind != "hybrid":  # one of them in the processes of a user, 4 s each
        monkeypatch.setattr(processes, "run_silent", run_here)
    cache = home / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    snapshot = cache / "models--someone--mine/snapshots" / ("0" * 40)
    config.save_pretrained(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("0" * 40)
    edit_params(home, {"target": {"model": "someone/mine"}})
    with pytest.raises(ValueError, match=message) as error:
        prepare_target.supported_targets.check_target_config(schema.load_params(), config)
    for model in ("someone/mine", str(snapshot)):
        edit_params(home, {"target": {"model": model}})
        found = [each.found for each in doctor.check_all() if each.subject == "params.yaml"]
        expected = str(error.value).replace("someone/mine", model).removeprefix("params.yaml: ")
        assert expected in found
    edit_params(home, {"target": {"model": "someone/mine"}})
    with pytest.raises(ValueError, match=message):
        commands.check_run_params()


def test_a_target_is_checked_once_for_the_same_config(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of doctor, stale and run took the seconds of an import of transformers."""
    started = list[tuple[object, ...]]()
    monkeypatch.setattr(processes, "run_silent", lambda *words: started.append(words))
    edit_params(home, {"target": {"model": str(manifest.TARGET_FOLDER)}})
    for _ in range(2):
        commands.check_run_params()
    assert started == [("stages.draft.supported_targets", Path("params.yaml"), manifest.TARGET_FOLDER)]
    (manifest.TARGET_FOLDER / "config.json").touch()
    commands.check_run_params()
    assert len(started) == 2
