"""prepare_target: the template that takes the place of a target's own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages import prepare_target
from stages.builtin import tiny
from stages.drafting import prompt
from stages.formats import manifest
from tests.conftest import ROOT, edit_params
from tests.drafting.seeing import save

SAID = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "sun?"},
]


def test_the_given_template_takes_the_place_of_the_targets_own(tmp_path: Path) -> None:
    """A base model has none; what it is then told is what a server is told with the same file."""
    tokenizer = tiny.build_tokenizer(tiny.texts(tiny.corpus(7)[:50]))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    text = (ROOT / "templates/chatml.jinja").read_text()
    loaded = prompt.load_tokenizer(tmp_path, False, text)
    rendered = tokenizer.apply_chat_template(SAID, chat_template=text, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>user\nrain?<|im_end|>\n") and rendered.endswith("<|im_start|>assistant\n")
    assert prompt.prompt_ids(loaded, SAID) == tokenizer.encode(rendered)
    tokenizer.chat_template = tiny.TEMPLATE  # as the embedded targets have it
    tokenizer.save_pretrained(tmp_path)
    own = prompt.load_tokenizer(tmp_path, False, None)
    assert own.chat_template == AutoTokenizer.from_pretrained(tmp_path).chat_template == tiny.TEMPLATE
    assert prompt.prompt_ids(own, SAID) == prompt.prompt_ids(loaded, SAID)


def test_a_template_that_is_not_there_or_no_template_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/broken.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    assert prepare_target._template(None) is None
    with pytest.raises(ValueError, match=r"target\.chat_template is mine\.jinja, expected .* which has broken\.jinja"):
        prepare_target._template("mine.jinja")
    with pytest.raises(ValueError, match=r"broken\.jinja line 2 is no Jinja template"):
        prepare_target._template("broken.jinja")


def test_how_pictures_are_cut_is_pinned_with_the_target(tmp_path: Path) -> None:
    model, _ = save("qwen3-vl", tmp_path)
    before = prepare_target.describe("mine", None, model.config, tmp_path, None)
    assert before.modality == "image"
    said = tmp_path / "preprocessor_config.json"
    said.write_text(said.read_text().replace("16384", "4096"))
    after = prepare_target.describe("mine", None, model.config, tmp_path, None)
    assert after.config_digest != before.config_digest and after.tokenizer_digest == before.tokenizer_digest


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose target is a local folder, which DVC does not watch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    raw = tmp_path / "data/raw/weather_toon.jsonl"
    raw.parent.mkdir(parents=True)
    raw.touch()
    save("qwen3-vl", tmp_path / "mine")
    edit_params(tmp_path, {"target": {"model": "mine", "num_threads": 1}, "init_draft": {"draft_vocab_size": None}})
    return tmp_path


def test_other_weights_in_a_local_folder_are_another_manifest(local: Path) -> None:
    """Bug: target.json held digests of config and tokenizer only; not even `dvc repro -f` noticed other weights."""
    edit_params(local, {"target": {"watch": "mine"}})
    prepare_target.main()
    before = manifest.read()
    assert manifest.weights(before) == Path("mine")
    path = local / "mine/model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.randn_like(tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="mine holds other weights"):
        manifest.weights(before)
    prepare_target.main()
    after = manifest.read()
    assert after.weights_digest != before.weights_digest and after.config_digest == before.config_digest
    assert manifest.weights(after) == Path("mine")


def test_a_local_folder_that_dvc_does_not_watch_is_refused(local: Path) -> None:
    with pytest.raises(ValueError, match=r"expected target\.watch to be that folder .* set target\.watch: mine"):
        prepare_target.main()
    assert not manifest.FOLDER.exists()
