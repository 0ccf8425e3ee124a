"""Speculative decoding says what plain decoding says, token for token, in float32, for any draft; drawn from one seed, too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.data import conversations
from stages.draft import eagle3_checkpoint
from stages.draft.eagle3 import Eagle3Draft
from stages.draft.eagle3_config import DraftConfig
from stages.engine.decode import Engine
from stages.engine.sampling import SamplingParams
from stages.families.eagle import EagleDraft, EagleMethod
from stages.families.lookahead import LookaheadMethod
from stages.families.medusa import MedusaDraft, MedusaMethod
from stages.families.ngram import PromptLookupMethod
from stages.families.static_tree import StaticTree, select_best_branches
from stages.params.tree_shape import TreeShape
from stages.target import loading, manifest
from tests.engines import build_engine as assemble_engine

TREES = [(1, 1, 2), (5, 1, 6), (8, 2, 16), (8, 3, 16), (5, 4, 16), (10, 3, 32), (8, 2, 8)]
ROOM = 40
DRAWN = SamplingParams(0.7, 0.95, 50, seed=0)


@pytest.fixture(scope="module")
def prompts(small_run: Path) -> list[list[int]]:
    """Half of the eval split."""
    table = conversations.read_table(small_run / "data/sampled/eval", conversations.SAMPLED_SCHEMA, "sample_target")
    return table["prompt_ids"].to_list()[:3]


@pytest.fixture(scope="module")
def model(small_run: Path):
    return loading.load_target(str(small_run / "artifacts/target"), "float32", "cpu")


@pytest.fixture(scope="module")
def engines(small_run: Path, model) -> dict[str, Engine]:
    return {name: build_engine(small_run, model, name) for name in ("e000", "e003")}


def build_engine(small_run: Path, model, name: str) -> Engine:
    draft = Eagle3Draft.from_checkpoint(*eagle3_checkpoint.read_eagle3_draft(small_run / "drafts" / name, "init_draft"))
    made = manifest.read_manifest(small_run / "artifacts/target")
    return assemble_engine(model, made.eos_token_ids, made.feature_layers, draft.requires_grad_(False))


def join_tokens(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def plain_answers(engines, prompts) -> list[list[int]]:
    """What plain decoding says to each prompt. No draft has a part in it."""
    return [join_tokens(engines["e003"].decode_plain(prompt, ROOM)) for prompt in prompts]


@pytest.fixture(scope="module")
def plain_sampled_answers(engines, prompts) -> list[list[int]]:
    """Likewise, drawn: each answer by the seed of its number."""
    return [
        join_tokens(engines["e003"].decode_plain(p, ROOM, sampling=DRAWN._replace(seed=n)))
        for n, p in enumerate(prompts)
    ]


def test_plain_decoding_is_transformers_own_greedy_search(small_run: Path, prompts, plain_answers) -> None:
    made = manifest.read_manifest(small_run / "artifacts/target")
    reference = AutoModelForCausalLM.from_pretrained(small_run / "artifacts/target").eval()
    for prompt, answer in zip(prompts, plain_answers, strict=True):
        out = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=ROOM,
            do_sample=False,
            eos_token_id=made.eos_token_ids,
            pad_token_id=0,
        )
        assert answer == out[0, len(prompt) :].tolist()


# A trained draft, and a random one, whose trees other tests cover: tests/engine/test_decode.py.


@pytest.mark.parametrize("tree", [(5, 1, 6), (8, 3, 16)], ids=lambda t: "t{}_{}_{}".format(*t))
def test_drawn_answers_are_those_of_plain_decoding_from_the_same_seed(
    engines, prompts, plain_sampled_answers, tree
) -> None:
    accepted = 0
    for seed, (prompt, answer) in enumerate(zip(prompts, plain_sampled_answers, strict=True)):
        drawn = DRAWN._replace(seed=seed)
        steps = list(engines["e003"].decode_speculative(prompt, ROOM, TreeShape(*tree), sampling=drawn))
        assert join_tokens(steps) == answer
        accepted += sum(step.num_accepted for step in steps)
    assert accepted > 5, "nothing is accepted, so nothing is tested"


@pytest.fixture(scope="module")
def methods(small_run: Path, model) -> dict[str, Any]:
    """Untrained EAGLE and Medusa, of e000's shapes, and those that need no draft."""
    made, tensors = eagle3_checkpoint.read_eagle3_draft(small_run / "drafts/e000", "init_draft")
    table, head, cpu = model.get_input_embeddings().weight, model.get_output_embeddings().weight, torch.device("cpu")
    static = StaticTree.from_paths(select_best_branches([[0.6, 0.2, 0.1]] * 4, 11), cpu)
    sizes = DraftConfig.from_json(made)
    eagle = EagleDraft.initialise(replace(sizes, draft_vocab_size=sizes.vocab_size), head, seed=1).requires_grad_(False)
    heads = {
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
    }
    medusa = MedusaDraft.initialise(heads | {"heads": 4}, head, tensors["d2t"], tensors["t2d"]).requires_grad_(False)
    return {
        "eagle": EagleMethod(eagle, table, static, "sglang"),
        "eagle2": EagleMethod(eagle, table, TreeShape(5, 2, 8), "sglang"),
        "medusa": MedusaMethod(medusa, static, table.shape[1], table.shape[0]),
        "lookahead": LookaheadMethod(5, 4, 5, cpu),
        "ngram": PromptLookupMethod(3, 1, 8, cpu),
    }


def test_margin_is_the_gap_between_the_two_best_logits(engines, model, prompts) -> None:
    logits = model(torch.tensor([prompts[0]])).logits[0].sort(descending=True).values
    for num_output in (0, 1, 3):
        split = len(prompts[0]) - num_output
        assert engines["e000"].measure_margin(prompts[0][:split], prompts[0][split:]) == pytest.approx(
            (logits[-1, 0] - logits[-1, 1]).item(), abs=1e-4
        )
