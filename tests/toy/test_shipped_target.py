"""The embedded target and data: what made them, and that prepare_target gives every machine the same target."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import prepare_target
from stages.target import manifest
from stages.toy import shipped_target, text_targets
from tests.conftest import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "data/targets", tmp_path / "data/targets")
    (tmp_path / "data/raw").mkdir()
    (tmp_path / "data/raw/weather_toon.jsonl").touch()
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_target_is_a_copy_of_the_shipped_one(project: Path) -> None:
    prepare_target.main()
    for file in (ROOT / "data/targets/weather-tiny").iterdir():
        copy = project / "artifacts/target" / file.name
        assert copy.exists() == (file.name != "training.json")
        assert not copy.exists() or copy.read_bytes() == file.read_bytes()
    assert manifest.read_manifest().model == "builtin/weather-tiny"


def test_the_record_is_of_what_the_parameters_and_the_code_train() -> None:
    record = shipped_target.read_record()
    corpus = text_targets.make_corpus(record.settings["seed"])
    texts = "\n".join(text_targets.render_conversations(corpus))
    assert record.corpus_digest == hashlib.sha256(texts.encode()).hexdigest()
    tokenizer = text_targets.build_tokenizer(text_targets.render_conversations(corpus[:2000]))
    shipped = AutoTokenizer.from_pretrained(ROOT / "data/targets/weather-tiny")
    assert shipped.get_vocab() == tokenizer.get_vocab() and shipped.chat_template == tokenizer.chat_template
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data/targets/weather-tiny")
    built = text_targets.build_model(tokenizer, record.settings["seed"])
    assert {name: weight.shape for name, weight in model.state_dict().items()} == {
        name: weight.shape for name, weight in built.state_dict().items()
    }
    assert sum(file.stat().st_size for file in (ROOT / "data/targets").rglob("*.safetensors")) < 5_000_000


def test_the_shipped_weights_have_the_recorded_loss(one_thread: None) -> None:
    """On conversations that they were not trained on: no weights of other training would."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data/targets/weather-tiny")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/targets/weather-tiny")
    rows = text_targets.encode_conversations(tokenizer, text_targets.make_corpus(8)[:40])
    losses, tokens = 0.0, 0
    with torch.no_grad():
        for ids, labels in rows:
            logits = model(input_ids=ids[None]).logits[0, :-1]
            losses += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
            tokens += int((labels[1:] != -100).sum())
    assert losses / tokens == pytest.approx(shipped_target.read_record().loss, rel=0.1)


def test_changed_weights_are_refused(project: Path) -> None:
    weights = project / "data/targets/weather-tiny/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match=r"does not hold the weights .* restore it .git checkout"):
        prepare_target.main()


def test_the_committed_data_regenerates_byte_for_byte() -> None:
    command, raw = [sys.executable, "-m", "tests.toy.damaged_exports"], ROOT / "data/raw/weather_toon.jsonl"
    made = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=True).stdout
    assert made == raw.read_bytes(), "run: python -m tests.toy.damaged_exports > data/raw/weather_toon.jsonl"
