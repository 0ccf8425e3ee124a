"""Targets whose layers see a sliding window of tokens, all of them or some: hidden states and answers far beyond it."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.engine import tree_masks
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest
from stages.params.tree_shape import TreeShape
from stages.target import generation, head_check, hooks, packed_forward
from tests import built_engines
from tests.draft.slow_draft import scatter
from tests.engine import fake_cuda_graphs
from tests.engine.test_sampling import join_tokens
from tests.target.pinned_targets import LLAMA

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, ROOM, TAPPED = 16, 20, [1, 3, 5]
SHAPE = LLAMA | {"pad_token_id": 0, "max_position_embeddings": 256, "num_hidden_layers": 6, "sliding_window": WINDOW}
SOME = {"use_sliding_window": True, "max_window_layers": 3}  # layers from the fourth on
EXPERTS = {"num_experts_per_tok": 1, "num_local_experts": 2}
BY_TYPE = {"layer_types": ["sliding_attention", "full_attention"] * 3}
CLASSES: dict[str, dict[str, Any]] = {
    "Mistral": {}, "Mixtral": EXPERTS, "Phi3": {}, "Phimoe": EXPERTS, "Ministral": BY_TYPE | {"head_dim": 8},
    "Gemma3Text": {"head_dim": 8}, "Qwen2": SOME, "Qwen3": SOME | {"head_dim": 8}, "Olmo3": {}, "Exaone4": {},
    "SmolLM3": BY_TYPE | {"use_sliding_window": True},
}  # fmt: skip
every_class = pytest.mark.parametrize("name", CLASSES)


@cache
def build(name: str, window: int = WINDOW) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**SHAPE | CLASSES[name] | {"sliding_window": window})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    scatter(model, 0.3, 1)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def draw_ids(length: int) -> torch.Tensor:
    return torch.randint(2, 301, (length,), generator=torch.Generator().manual_seed(length))


PROMPTS = [draw_ids(length).tolist() for length in (10, 29, 4)]


@cache
def build_engine(name: str) -> Engine:
    draft = Eagle3Draft(DraftConfig(
        hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=301,
        draft_vocab_size=301, max_position_embeddings=256, rms_norm_eps=1e-6, rope={"rope_theta": 1e4, "rope_type": "default"},
    ))  # fmt: skip
    scatter(draft, 0.3, 2)
    return built_engines.build_engine(build(name), [], TAPPED, draft.requires_grad_(False))


def generate(name: str, prompt: list[int]) -> list[int]:
    return list(generate_once(name, tuple(prompt)))


@cache
def generate_once(name: str, prompt: tuple[int, ...]) -> list[int]:
    return generation.generate_answers(build(name), [list(prompt)], ROOM, 0.0, 1.0, [], 0, 0)[0][0]


@every_class
def test_hidden_states_are_transformers_own(name: str) -> None:
    model, documents = build(name), [draw_ids(length) for length in (40, 29, 7)]
    own = [model(ids[None], output_hidden_states=True).hidden_states for ids in documents]
    wide = build(name, 200)(documents[0][None], output_hidden_states=True).hidden_states
    assert (wide[-1] - own[0][-1]).abs().max() > 0.5, "the window changes nothing"
    lengths, parts = [len(ids) for ids in documents], dict[int, torch.Tensor]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a class is padded
        packs = packed_forward.supports_packing(model)
    with hooks.tap_residual_streams(model, TAPPED, lambda part, stream: parts.__setitem__(part, stream)):
        last = packed_forward.forward_documents(model, torch.cat(documents), lengths, packs)
    torch.testing.assert_close(last, torch.cat([states[-1][0] for states in own]), atol=1e-4, rtol=1e-4)
    for part, layer in enumerate(TAPPED):
        expected = torch.cat([states[layer][0] for states in own])
        torch.testing.assert_close(packed_forward.unpad_stream(parts[part], lengths), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Mistral", "Phimoe", "Gemma3Text", "SmolLM3"])
def test_answers_are_transformers_own(name: str) -> None:
    """Bug: the torch engine refused such lengths, so no graph could run with Gemma 3 and answers of 512 tokens."""
    engine, expected = build_engine(name), [generate(name, prompt) for prompt in PROMPTS]
    unlimited = built_engines.build_engine(build(name, 200), [], [])
    assert [join_tokens(unlimited.decode_plain(prompt, ROOM)) for prompt in PROMPTS] != expected or name == "Phimoe"
    # The first prompt passes the window as it grows.
    assert join_tokens(engine.decode_plain(PROMPTS[0], ROOM)) == expected[0]
    for tree in ((5, 3, 12), (8, 1, 9)):
        assert join_tokens(engine.decode_speculative(PROMPTS[0], ROOM, TreeShape(*tree))) == expected[0]
    for shape in (None, TreeShape(3, 2, 6)):
        answers: list[list[int]] = [[] for _ in PROMPTS]
        for updates in engine.decode_batch([DecodeRequest(prompt, ROOM, None, None) for prompt in PROMPTS], 2, shape):
            for number, step in updates:
                answers[number] += step.tokens if step else []
        assert answers == expected


@pytest.mark.parametrize("name", ["Gemma3Text"])
def test_recorded_passes_are_of_lengths_within_the_window_or_beyond_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU: the fused kernels, which know no window, run within it alone, though both lengths share slots."""
    fake_cuda_graphs.install(monkeypatch)
    engine = built_engines.build_engine(build(name), [], TAPPED, build_engine(name).drafter.draft)
    assert (engine.target.fused_decoder is not None) == (name != "Gemma3Text")
    short = [ids[:4] for ids in PROMPTS]
    for prompts, room in ((short, 10), (PROMPTS, ROOM), (short, 10)):
        expected = [generate(name, prompt)[:room] for prompt in prompts]
        for tree in (None, TreeShape(5, 3, 12)):
            alone = [
                engine.decode_speculative(prompt, room, tree) if tree else engine.decode_plain(prompt, room)
                for prompt in prompts
            ]
            assert [join_tokens(steps) for steps in alone] == expected
            answers: list[list[int]] = [[] for _ in prompts]
            requests = [DecodeRequest(prompt, room, None, None) for prompt in prompts]
            for updates in engine.decode_batch(requests, 2, tree):
                for number, step in updates:
                    answers[number] += step.tokens if step else []
            assert answers == expected
    keys = [key for slots in engine.slots.idle for key in slots.graphs.recorded]
    assert {exceeds for _, _, exceeds in keys} == {False, True}


@every_class
def test_one_block_computes_trees_beyond_its_window_and_not_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """So prepare_target finds a class whose layers the engine's masks do not reach."""
    build(name).save_pretrained(tmp_path)
    block = head_check.load_first_block(str(tmp_path), False)
    assert tree_masks.explain_tree_mask_failure(block) is None
    monkeypatch.setattr(tree_masks, "build_layer_masks", lambda _config, mask, *_: mask)
    assert "tokens of a tree have other hidden states than each alone" in str(
        tree_masks.explain_tree_mask_failure(block)
    )
