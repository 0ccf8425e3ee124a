"""Plain decoding in batches: the target's own argmax, whatever its generation_config.json says."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from stages.target import generation

PROMPTS = [[5, 6, 7, 5, 6, 7], [9, 9, 9]]
SETTINGS = [
    {"no_repeat_ngram_size": 2, "repetition_penalty": 3.0},
    {"suppress_tokens": list(range(0, 60, 2))},
    {"num_beams": 3, "length_penalty": 2.0},
    {"max_time": 0.0, "stop_strings": ["a"]},
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 60}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, eos_token_id=1, pad_token_id=None)).eval()
    for weight in made.parameters():
        weight.data.mul_(8)
    return made


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_answers_are_the_argmax_whatever_generation_config_says(model: LlamaForCausalLM, settings: dict) -> None:
    """Bug: keys that no argument overrides still acted, so eval answers "at temperature 0" were not the greedy ones."""
    model.generation_config = GenerationConfig(eos_token_id=1, **settings)
    found = generation.generate_answers(model, PROMPTS, 12, 0.0, 1.0, [1], 0, 3)
    for prompt, (answer, reason) in zip(PROMPTS, found, strict=True):
        ids: list[int] = []
        while len(ids) < 12 and 1 not in ids:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
        assert (answer, reason) == (ids, "stop" if ids[-1] == 1 else "length")


def test_a_server_gets_the_targets_files_with_its_end_tokens_alone(tmp_path: Path) -> None:
    """`transformers serve` fills what a request leaves open from that file."""
    source = tmp_path / "target"
    source.mkdir()
    (source / "generation_config.json").write_text('{"num_beams": 4, "eos_token_id": 1}')
    (source / "config.json").write_text("{}")
    for _ in range(2):  # a second run finds what the first left
        served = generation.link_target(source, tmp_path / "served", [1, 2])
    assert (served / "config.json").read_text() == "{}"
    assert (served / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'
    assert "num_beams" in (source / "generation_config.json").read_text()
