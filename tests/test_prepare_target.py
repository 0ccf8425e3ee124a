"""prepare_target: the template that takes the place of a target's own, and the tables that later stages read by name."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from stages import prepare_target
from stages.target import chat_template, manifest
from stages.toy import text_targets
from tests.conftest import ROOT, edit_params
from tests.target.multimodal_targets import KINDS, save
from tests.target.pinned_targets import LLAMA, pinned, start_project

SAID = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "sun?"},
]


def test_the_given_template_takes_the_place_of_the_targets_own(tmp_path: Path) -> None:
    """A base model has none; what it is then told is what a server is told with the same file."""
    tokenizer = text_targets.build_tokenizer(text_targets.render_conversations(text_targets.make_corpus(7)[:50]))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    text = (ROOT / "templates/chatml.jinja").read_text()
    loaded = chat_template.load_tokenizer(tmp_path, False, text)
    rendered = tokenizer.apply_chat_template(SAID, chat_template=text, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>user\nrain?<|im_end|>\n") and rendered.endswith("<|im_start|>assistant\n")
    assert chat_template.encode_prompt(loaded, SAID) == tokenizer.encode(rendered)
    tokenizer.chat_template = text_targets.CHAT_TEMPLATE  # as the embedded targets have it
    tokenizer.save_pretrained(tmp_path)
    own = chat_template.load_tokenizer(tmp_path, False, None)
    assert own.chat_template == AutoTokenizer.from_pretrained(tmp_path).chat_template == text_targets.CHAT_TEMPLATE
    assert chat_template.encode_prompt(own, SAID) == chat_template.encode_prompt(loaded, SAID)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"target\.model mine has no chat template, .* set target\.chat_template: NAME\.jinja"),
        (
            "{{ raise_exception('no system message') }}",
            r"mine: a question can't be rendered: .* refuses messages of the roles user: no system message",
        ),
    ],
)
def test_a_target_without_a_working_chat_template_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None, message: str
) -> None:
    """Bug: a base model without a chat template failed an hour later, in sample_target, with a traceback."""
    folder = pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA)))
    tokenizer = text_targets.build_tokenizer(["a b c"])
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        prepare_target.main()
    (tmp_path / "templates/own.jinja").write_text(text_targets.CHAT_TEMPLATE)
    edit_params(tmp_path, {"target": {"chat_template": "own.jinja"}})
    prepare_target.main()


def test_a_draft_that_reads_layers_that_are_not_stored_is_refused_before_any_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init_draft would refuse it too, but after hours of sampling and extraction."""
    pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA)), feature_layers=[1, 2, 4, 5, 6])
    with pytest.raises(
        ValueError, match=r"init_draft\.feature_layers is null, which means EAGLE-3's \[2, 3, 4\], .*: add 3 there"
    ):
        prepare_target.main()
    assert not manifest.TARGET_FOLDER.exists()
    edit_params(tmp_path, {"init_draft": {"feature_layers": [2, 4, 6]}})
    prepare_target.main()
    assert manifest.read_manifest().feature_layers == [1, 2, 4, 5, 6]


def test_a_head_that_its_class_does_not_compute_with_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: with the table of another head, sampling and extraction ran for hours before check_overfit failed."""
    pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA)), dtype="bfloat16")
    right = manifest.read_embedding_and_head
    monkeypatch.setattr(manifest, "read_embedding_and_head", lambda *given: (right(*given)[0], torch.randn(301, 32)))
    expected = (
        r"target\.model mine: of LlamaForCausalLM, logits of 8 tokens differ from final hidden states times its head by up to "
        r"\S+ \(largest logit \S+\), expected at most \S+ in float32: lm_head\.weight of its files is another table"
    )
    with pytest.raises(ValueError, match=expected):
        prepare_target.main()
    assert not (tmp_path / "artifacts/target").exists()


def test_pickled_weights_are_refused_with_a_conversion_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards, of which two tensors share their memory."""
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    folder = pinned(tmp_path, monkeypatch, model)
    (folder / "model.safetensors").unlink()
    tensors = list(model.state_dict().items())
    torch.save(dict(tensors[:5]) | {"lm_head.weight": tensors[0][1]}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(tensors[5:-1]), folder / "pytorch_model-00002-of-00002.bin")
    torch.save({"no": "weights"}, folder / "training_args.bin")
    found = r"found pytorch_model-00001-of-00002\.bin, pytorch.* in mine: python -c"
    with pytest.raises(ValueError, match=found) as error:
        prepare_target.main()
    command = str(error.value).partition(" in mine: ")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(command, shell=True, cwd=folder, check=True)
    prepare_target.main()
    assert manifest.read_manifest().model == "mine"


@pytest.mark.parametrize("kind", ["tied", "moe", "sliding", "qwen3-vl"])
def test_the_tables_of_every_kind_of_target_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """One block of each is enough to compare, and nothing is said."""
    if kind in KINDS:
        pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA)))
        save(kind, tmp_path / "mine")
    else:
        experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        window = {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 3, "head_dim": 8}
        model = {
            "tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
            "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**LLAMA, **experts)),
            "sliding": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, **window)),
        }[kind]()
        pinned(tmp_path, monkeypatch, model)
    prepare_target.main()
    output = capsys.readouterr()
    assert "not compared" not in output.out and "note" not in output.out
    assert "UNEXPECTED" not in output.err + output.out


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose target is a local folder."""
    start_project(tmp_path, monkeypatch)
    save("qwen3-vl", tmp_path / "mine")
    edit_params(tmp_path, {"target": {"model": "mine", "num_threads": 1}, "init_draft": {"draft_vocab_size": None}})
    return tmp_path


def test_other_weights_in_a_local_folder_are_another_manifest(local: Path) -> None:
    """Bug: target.json held digests of config and tokenizer only; not even `dvc repro -f` noticed other weights."""
    prepare_target.main()
    before = manifest.read_manifest()
    assert manifest.resolve_weights_folder(before) == Path("mine")
    path = local / "mine/model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.randn_like(tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="mine holds other weights"):
        manifest.resolve_weights_folder(before)
    prepare_target.main()
    after = manifest.read_manifest()
    assert after.weights_digest != before.weights_digest and after.config_digest == before.config_digest
    assert manifest.resolve_weights_folder(after) == Path("mine")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: NaN in one weight alone, behind the first block, was found by no check, and every answer was noise."""
    folder = pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA)))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][3, 4] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight hold NaN"):
        prepare_target.main()
