"""Targets of others, mutated: prepare_target takes what it gets, or refuses it by one line that names the target."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from stages import prepare_target
from stages.runtime.guarded_files import BrokenArtifactError
from tests.target.pinned_targets import LLAMA, pinned
from tests.test_foreign_bytes import mutate

YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
# What one mutant in thousands is: file, the keys to a value, the value.
RARE = [
    ("config.json", ["rope_parameters", "factor"], 0),
    ("config.json", ["num_hidden_layers"], 2**31),
    ("generation_config.json", ["eos_token_id"], {"a": 1}),
    ("tokenizer_config.json", ["model_max_length"], "x"),
    ("tokenizer_config.json", ["eos_token"], 7),
    ("tokenizer.json", ["pre_tokenizer"], {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
]  # fmt: skip


def is_refused_by_one_line() -> bool:
    """Return whether prepare_target refuses the target; False where it takes it."""
    try:
        prepare_target.main()
    except ValueError as error:
        kinds = ValueError, BrokenArtifactError
        assert "\n" not in str(error) and "mine" in str(error) and type(error) in kinds, error  # noqa: PT017
        return True
    return False


def replace_by_another_kind(path: Path, choice: random.Random) -> None:
    path.unlink()
    choice.choice([path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("nowhere"), lambda: None])()


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.long)])
def test_a_mutated_target_is_taken_or_refused_by_one_line(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: 111 of 420 mutants ended in a traceback, and a pipe in the place of a file in a stage that never ended."""
    folder, choice = (
        pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=YARN))),
        random.Random(1),
    )
    whole = shutil.copytree(folder, tmp_path / "whole")
    assert not is_refused_by_one_line()
    for attempt in range(count):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        path = choice.choice(sorted(folder.iterdir()))
        (replace_by_another_kind if attempt % 5 == 0 else mutate)(path, choice)
        is_refused_by_one_line()


@pytest.mark.parametrize(("file", "keys", "value"), RARE)
def test_a_value_of_a_wrong_type_or_size_is_refused_by_one_line(
    file: str, keys: list[str], value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: yarn's factor 0, a tokenizer's length that is a word and end tokens of a wrong type ended in a traceback."""
    folder = pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=YARN)))
    document = json.loads((folder / file).read_text())
    *path, last = keys
    inner = document
    for key in path:
        inner = inner[key]
    inner[last] = value
    (folder / file).write_text(json.dumps(document))
    assert is_refused_by_one_line()


def test_end_tokens_of_all_files_are_those_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Bug: the tokenizer's own end token and the template's were not the target's, and servers stop at them."""
    folder = pinned(tmp_path, monkeypatch, LlamaForCausalLM(LlamaConfig(**LLAMA | {"eos_token_id": 5})))
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 5]}')
    prepare_target.main()
    target = json.loads(Path("artifacts/target/target.json").read_text())
    assert target["eos_token_ids"] == [6, 5, 2]
    assert (
        "end tokens by its tokenizer or chat template, beside [6, 5] of its configs: 2 '<|im_end|>'"
        in capsys.readouterr().out
    )
