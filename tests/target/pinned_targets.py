"""Projects whose target is a folder with a small model, as a user brings one to prepare_target."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from stages.toy import text_targets
from tests.conftest import ROOT, edit_params


def start_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a project of the committed parameters, without data, the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    raw = tmp_path / "data/raw/weather_toon.jsonl"
    raw.parent.mkdir(parents=True)
    raw.touch()


LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 301, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 64,
}  # fmt: skip


def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, **target: Any) -> Path:
    """A project whose target is `model`, in the folder mine; -> that folder."""
    start_project(tmp_path, monkeypatch)
    (tmp_path / "templates").mkdir()
    edit_params(tmp_path, {
        "target": {"model": "mine", "num_threads": 1, **target}, "init_draft": {"draft_vocab_size": None},
    })  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():  # so that logits are far from 0
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    model.save_pretrained(tmp_path / "mine")
    text_targets.build_tokenizer(["a b c"]).save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"
