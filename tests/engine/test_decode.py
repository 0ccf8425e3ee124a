"""The engine on a small random target, as a GPU runs it: fixed shapes, few kernels, one cycle ahead of what is read."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3NextConfig

from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.engine.decode import Engine
from stages.engine.sampling import SamplingParams, compute_probabilities, draw_tokens, draw_uniforms
from stages.engine.target_runner import TargetRunner
from stages.params.tree_shape import TreeShape
from tests.built_engines import build_engine
from tests.engine import fake_cuda_graphs

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, ROOM, END = 12, 24, 7


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)


def draft(**options: Any) -> Eagle3Draft:
    torch.manual_seed(4)
    config = DraftConfig(
        64, 96, 4, 2, 16, VOCAB, VOCAB, 512, 1e-6, {"rope_theta": 1e4, "rope_type": "default"}, **options
    )  # fmt: skip
    made = Eagle3Draft(config).requires_grad_(False)
    for weight in made.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return made


def build_small_engine(execution: str, model: Any) -> Engine:
    made = build_engine(model, [END], [1, 2, 3], draft())
    assert (made.target.fused_decoder is not None) == (execution == "in blocks")
    if execution == "played":
        made.drafter.fused_draft = None
    return made


@pytest.fixture
def engine(execution: str, model: Any) -> Engine:
    return build_small_engine(execution, model)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=draw).tolist() for length in (1, 2, 30)]


def sample_by_transformers(model: Any, prompt: list[int], how: SamplingParams) -> list[int]:
    """An answer token by token, from transformers' forward over the whole text; asked once."""
    key = id(model), how, tuple(prompt)
    if key not in DRAWN:
        DRAWN[key] = model, _sample_by_transformers(model, prompt, how)
    return DRAWN[key][1]


DRAWN: dict[Any, tuple[Any, list[int]]] = {}  # with the model, lest another gets its id


def _sample_by_transformers(model: Any, prompt: list[int], how: SamplingParams) -> list[int]:
    ids = list(prompt)
    for number in draw_uniforms(how.seed, ROOM):
        logits = model(torch.tensor([ids])).logits[:, -1]
        ids.append(int(draw_tokens(compute_probabilities(logits, *how[:3]), number[None])))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]


def join_tokens(steps: Any) -> list[int]:
    return [token for step in steps for token in step.tokens]


def test_an_end_token_ends_both_though_it_is_found_late(engine: Engine, model: Any) -> None:
    """Several tokens in turn as the one that ends: what is decoded past it is dropped, and the next prompt starts clean."""
    whole = {
        tuple(prompt): join_tokens(build_engine(model, [-1], [1, 2, 3]).decode_plain(prompt, ROOM))
        for prompt in prompts()
    }
    shortened = 0
    for end in range(0, VOCAB, 4):
        engine.end_tokens = {end}
        for prompt, answer in whole.items():
            cut = answer[: answer.index(end) + 1] if end in answer else answer
            shortened += cut != answer
            assert join_tokens(engine.decode_plain(list(prompt), ROOM)) == cut
            assert join_tokens(engine.decode_speculative(list(prompt), ROOM, TreeShape(5, 4, 16))) == cut
    assert shortened > 3


def test_every_way_to_run_accepts_the_same_drafts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every option of a draft, step by step."""
    for options in ({}, {"sliding_window": 6}, {"fc_norm": True, "norm_output": True, "qk_norm": True}):
        found = []
        for way in ("called", "played", "blocks"):
            with monkeypatch.context() as patch:
                if way != "called":
                    fake_cuda_graphs.install(patch)
                if way == "played":
                    patch.setattr(TargetRunner, "_build_fused_decoder", lambda *_: None)
                engine = build_engine(model, [END], [1, 2, 3], draft(**options))
                if way == "played":
                    engine.drafter.fused_draft = None
                found.append(
                    [list(engine.decode_speculative(prompt, ROOM, TreeShape(5, 3, 12))) for prompt in prompts()]
                )
        assert found[0] == found[1] == found[2]


def test_a_target_with_another_state_than_keys_and_values_is_refused() -> None:
    """Drafts that were refused could not be taken back from a linear attention."""
    config = Qwen3NextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCAB, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"Qwen3NextForCausalLM keeps state other than keys and values of its own in 3 of its 4 layers"
    ):
        build_engine(AutoModelForCausalLM.from_config(config).eval(), [], [0, 1, 2])
