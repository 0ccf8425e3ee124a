"""Targets whose class multiplies or divides its logits: prepare_target measures by what, and later stages compute with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from stages import prepare_target
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.engine import sampling
from stages.engine.sampling import SamplingParams
from stages.engines import torch_engine
from stages.families import draft_decoding
from stages.families import eagle as eagle_method
from stages.families import medusa as medusa_method
from stages.families.draft_files import LoadedDraft
from stages.families.eagle import EagleDraft
from stages.families.medusa import MedusaDraft
from stages.params import schema
from stages.params.families import EAGLE3
from stages.params.tree_shape import TreeShape
from stages.runtime import distributed
from stages.target import head_check, loading, manifest
from stages.training import ttt
from tests.built_engines import build_engine
from tests.conftest import edit_params
from tests.draft.slow_draft import CONFIG, scatter
from tests.engine.test_sampling import warp_logits
from tests.target.pinned_targets import LLAMA, pinned
from tests.training.test_ttt import make_row

SHAPE = LLAMA | {"pad_token_id": 0}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
SCALED: dict[str, tuple[str, dict[str, Any], float]] = {  # class, its config, what it multiplies its logits by
    "llama": ("Llama", {}, 1.0),
    "granite": ("Granite", {"logits_scaling": 8.0, "embedding_multiplier": 3.0}, 1 / 8),
    "granite of no power of two": ("Granite", {"logits_scaling": 13.37}, 1 / 13.37),
    "granite moe": ("GraniteMoe", {"logits_scaling": 6.0, "num_local_experts": 2, "num_experts_per_tok": 1}, 1 / 6),
    "cohere 2": ("Cohere2", {"logit_scale": 0.3, "sliding_window": 64}, 0.3),
    "minicpm3": ("MiniCPM3", {**MLA, "num_key_value_heads": 4, "dim_model_base": 20}, 20 / 32),
}
every_scale = pytest.mark.parametrize("name", SCALED)


def build(name: str, **more: Any) -> PreTrainedModel:
    kind, config, _ = SCALED[name]
    made: Any = getattr(transformers, f"{kind}Config")(**SHAPE | config | more)
    model = AutoModelForCausalLM.from_config(made)
    scatter(model, 0.3, 1)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def compare(folder: Path, model: PreTrainedModel) -> head_check.HeadDifference:
    """Save the model and compare as prepare_target does."""
    model.save_pretrained(folder)
    tables = model.get_input_embeddings().weight.float(), model.get_output_embeddings().weight.float()
    return head_check.compare_head(head_check.load_first_block(str(folder), False), *tables)


@every_scale
def test_the_factor_is_measured_exactly(tmp_path: Path, name: str) -> None:
    """In float32, whatever the weights are stored in."""
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        found = compare(tmp_path / str(number), build(name).to(dtype))
        assert found.agrees and found.same_choice
        assert found.scale == pytest.approx(SCALED[name][2], rel=1e-7 if "13.37" not in name else 1e-6)


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 30.0])
def test_a_cap_is_no_factor(tmp_path: Path, amplitude: float) -> None:
    """Nor where the logits of the tokens that are compared are too small for a cap to show."""
    model = transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SHAPE, head_dim=8, final_logit_softcapping=30.0)
    )
    scatter(model, 0.3, 1)
    model.tie_weights()
    model.get_decoder().norm.weight.data.fill_(amplitude - 1)  # Gemma's norm multiplies by 1 + weight
    found = compare(tmp_path, model.requires_grad_(False))
    assert not found.agrees and found.scale == 1 and found.same_head


# In later stages

HOT = 0.7


def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "granite") -> Path:
    """A target that prepare_target has made, with a workload above temperature 0; -> its folder."""
    folder = pinned(tmp_path, monkeypatch, build(name))
    workloads = schema.load_params().model_dump(by_alias=True)["benchmark"]["workloads"]
    workloads["eval"]["temperature"] = HOT
    edit_params(tmp_path, {"benchmark": {"workloads": workloads}, "time_cycles": {"context": 16}})
    prepare_target.main()
    return folder


def draw(model: PreTrainedModel, prompt: list[int], count: int, seed: int) -> list[int]:
    """Draw an answer from transformers' own logits."""
    ids, uniforms = list(prompt), sampling.draw_uniforms(seed, count)
    for number in range(count):
        logits: Tensor = model(torch.tensor([ids])).logits[:, -1]
        ids.append(int(sampling.draw_tokens(warp_logits(logits, HOT, 0.9, None), uniforms[number : number + 1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["granite", "minicpm3"])
def test_the_torch_engine_draws_what_transformers_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Bug: it drew by logits without the factor, and such workloads were refused."""
    folder = prepare(tmp_path, monkeypatch, name)
    draft = Eagle3Draft(DraftConfig(
        hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=301,
        draft_vocab_size=301, max_position_embeddings=64, rms_norm_eps=1e-6, rope={"rope_theta": 1e4, "rope_type": "default"},
    ))  # fmt: skip
    scatter(draft, 0.3, 2)
    loaded = LoadedDraft(EAGLE3, draft.requires_grad_(False), {}, [1, 3, 5])
    monkeypatch.setattr(draft_decoding, "load_draft", lambda *_: loaded)
    params = schema.load_params()
    workload = params.benchmark.workloads["eval"]
    engine = torch_engine.load_engine(params, workload, "e000", distributed.RankContext(0, 1, "cpu"))
    engine.end_tokens = set()
    model, prompt = loading.load_target(str(folder), "float32", "cpu"), [3, 1, 4, 1, 5]
    differing = 0
    for seed in range(4):
        how, expected = SamplingParams(HOT, 0.9, None, seed), draw(model, prompt, 24, seed)
        plain = [t for step in engine.decode_plain(prompt, 24, sampling=how) for t in step.tokens]
        in_trees = engine.decode_speculative(prompt, 24, TreeShape(3, 2, 6), sampling=how)
        assert plain == expected and [t for step in in_trees for t in step.tokens] == expected
        unscaled = build_engine(model, [], [1, 3, 5]).decode_plain(prompt, 24, sampling=how)
        differing += [t for step in unscaled for t in step.tokens] != expected
    assert differing, "the comparison says nothing"


def test_other_factors_than_the_measured_one_are_refused_where_tokens_are_drawn(tmp_path: Path) -> None:
    model = build("granite")
    head_check.check_drawn_logits(model, 0.0, 1.0)
    head_check.check_drawn_logits(model, HOT, 1 / 8)
    with pytest.raises(ValueError, match=r"GraniteForCausalLM caps .* than by 1: .* temperature 0, found 0\.7"):
        head_check.check_drawn_logits(model, HOT, 1.0)


# Drafts that share the target's head


def test_eagles_logits_have_the_factor_and_medusas_begin_with_it() -> None:
    """Bug: EAGLE's own logits and its labels were the head's alone, and so were the scores of EAGLE-2's trees."""
    generator = torch.Generator().manual_seed(1)
    head, embedding, state = (torch.randn(n, 16, generator=generator) for n in (23, 23, 5))
    config = replace(CONFIG, vocab_size=23, draft_vocab_size=23)
    eagles = [EagleDraft.initialise(config, weight, 1, scale) for weight, scale in ((head, 0.25), (head / 4, 1.0))]
    torch.testing.assert_close(eagles[0].logits(state), eagles[1].logits(state))
    row = make_row(2, 12, [(3, 12)])
    pack, found = ttt.TrainingPack.from_rows([row], 1, "aligned"), []
    for eagle, weight, scale in zip(eagles, (head, head / 4), (0.25, 1.0), strict=True):
        objective = ttt.TrainingObjective(1, logits_scale=scale)
        loss = eagle_method.compute_loss(eagle, pack, embedding, weight, objective).total_loss
        found.append([loss, *torch.autograd.grad(loss, list(eagle.parameters()))])
    torch.testing.assert_close(*found)
    shape = {"hidden_size": 16, "vocab_size": 23, "draft_vocab_size": 23, "heads": 2}
    all_ids = torch.zeros(23, dtype=torch.int64), torch.ones(23).bool()
    medusa = MedusaDraft.initialise(shape, head, *all_ids, 0.25)
    torch.testing.assert_close(medusa.logits(state[:1]), (state[:1] @ head.T / 4).repeat(2, 1))
    losses = [
        medusa_method.compute_loss(medusa, ttt.TrainingPack.from_rows([row], 2, "aligned"), embedding, weight, objective)
        for weight, objective in (
            (head, ttt.TrainingObjective(2, logits_scale=0.25)), (head / 4, ttt.TrainingObjective(2))
        )
    ]  # fmt: skip
    torch.testing.assert_close(losses[0].loss_per_step, losses[1].loss_per_step)


def test_margins_are_of_the_targets_own_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the margin where two answers differ, which tells rounding from a defect, was computed from unscaled logits."""
    folder = prepare(tmp_path, monkeypatch)
    model = loading.load_target(str(folder), "float32", "cpu")
    first, second = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1].topk(2).values.tolist()
    engine = build_engine(model, [], [], logits_scale=manifest.read_manifest().logits_scale)
    assert engine.measure_margin([3, 1, 4], [1, 5]) == pytest.approx(first - second, rel=1e-4)
