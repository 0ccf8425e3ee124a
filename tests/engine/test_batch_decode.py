"""Prompts decoded together say what each says alone, by transformers' own search and by the engine for one prompt."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.engine import slot_pool
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.engine.sampling import SamplingParams
from stages.params.tree_shape import TreeShape
from stages.target import loading, multimodal
from stages.target.manifest import TargetManifest
from tests.built_engines import build_engine
from tests.engine.test_decode import build_small_engine, sample_by_transformers
from tests.target.multimodal_documents import TAPPED, TOKEN, documents, load
from tests.target.test_multimodal_forward import random_draft
from tests.target.test_target_forward import manifest_of, save_random_model

pytestmark = pytest.mark.usefixtures("one_thread")

TREES: list[TreeShape | None] = [None, TreeShape(4, 1, 5), TreeShape(3, 3, 8), TreeShape(2, 3, 13), TreeShape(5, 4, 16)]
WIDE = TreeShape(2, 24, 60)  # so wide that a random draft is accepted now and then
VOCAB, END, MOST = 12, 7, 16


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    from tests.engine import test_decode

    return test_decode.model.__wrapped__()


@pytest.fixture
def engine(execution: str, model: PreTrainedModel) -> Engine:
    return build_small_engine(execution, model)


def make_requests(count: int = 9, **more: Any) -> list[DecodeRequest]:
    """Ragged prompts and length limits; some answers are over with their first token."""
    draws = random.Random(5)
    lengths, limits = [1, 2, 30, 7, 110, 4, 4, 11, 50], [MOST, MOST, 12, 1, MOST, 2, MOST, 11, MOST]
    prompts = [[draws.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [DecodeRequest(p, m, **more) for p, m in zip(prompts[:count], limits, strict=False)]


def steps(updates: Any, count: int) -> list[list[DecodeStep]]:
    found: list[list[DecodeStep]] = [[] for _ in range(count)]
    for some in updates:
        for number, step in some:
            if step is not None:
                found[number].append(step)
    return found


def decode_alone(engine: Engine, ask: DecodeRequest, tree: TreeShape | None) -> list[DecodeStep]:
    prompt, most, pictures, how = ask
    return list(
        engine.decode_plain(prompt, most, pictures, how)
        if tree is None
        else engine.decode_speculative(prompt, most, tree, pictures, how)
    )


def join_answers(found: list[list[DecodeStep]]) -> list[list[int]]:
    return [[token for step in some for token in step.tokens] for some in found]


def search_greedily(model: PreTrainedModel, ask: DecodeRequest, end: int = END) -> list[int]:
    """transformers' own greedy search; asked once, since it takes longer than all else here."""
    key = id(model), tuple(ask.prompt), ask.max_new_tokens, end
    if key not in SEARCHED:
        SEARCHED[key] = model, _search_by_transformers(model, ask, end)
    return SEARCHED[key][1]


SEARCHED: dict[Any, tuple[PreTrainedModel, list[int]]] = {}  # with the model, lest another gets its id


def _search_by_transformers(model: PreTrainedModel, ask: DecodeRequest, end: int) -> list[int]:
    ids = torch.tensor([ask.prompt])
    given: dict[str, Tensor] = {}
    if multimodal.is_multimodal(model):
        given["mm_token_type_ids"] = (ids == TOKEN).int()
    if ask.images is not None:
        given |= {"pixel_values": ask.images.pixel_values, "image_grid_thw": ask.images.image_grid_thw}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=ask.max_new_tokens, do_sample=False, eos_token_id=end,
        pad_token_id=0, **given,
    )  # fmt: skip
    return out[0, len(ask.prompt) :].tolist()


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_together_as_alone(engine: Engine, model: PreTrainedModel, tree: TreeShape | None) -> None:
    """Step by step, for fewer slots than prompts and more; ends inside a cycle, at an end token, at a first token."""
    one = [decode_alone(engine, ask, tree) for ask in make_requests()]
    assert join_answers(one) == [search_greedily(model, ask) for ask in make_requests()]
    # One slot for all differs from alone in its queue only, and a slot for each is the same to every tree.
    for slots in (1, 3, 20) if tree is None else (3, 20) if tree == TREES[-1] else (3,):
        assert steps(engine.decode_batch(make_requests(), slots, tree), 9) == one
    assert tree is None or sum(step.num_accepted for some in one for step in some) > 3


def test_drawn_answers_are_their_own_numbers(engine: Engine, model: PreTrainedModel) -> None:
    """Each of another seed; in turns with greedy ones, whose recorded passes are others."""
    for temperature, top_p, top_k in [(0.7, 0.9, 5), (6.0, 1.0, None)]:
        some = [
            ask._replace(max_new_tokens=MOST, sampling=SamplingParams(temperature, top_p, top_k, seed))
            for seed, ask in enumerate(make_requests(5))
        ]
        expected = [sample_by_transformers(model, ask.prompt, ask.sampling)[:MOST] for ask in some if ask.sampling]
        for tree in (None, TreeShape(5, 4, 16)):
            assert join_answers(steps(engine.decode_batch(some, 3, tree), 5)) == expected
            assert join_answers(steps(engine.decode_batch(make_requests(5), 3, tree), 5)) == [
                search_greedily(model, ask) for ask in make_requests(5)
            ]
    mixed = [some[0], make_requests(1)[0]]
    with pytest.raises(
        ValueError, match=r"share temperature, top-p, top-k and how drafts are sampled; decode others apart"
    ):
        list(engine.decode_batch(mixed, 2, None))


@pytest.fixture(scope="module")
def moe_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, TargetManifest]:
    folder = tmp_path_factory.mktemp("moe")
    save_random_model(folder, "qwen3 moe", False)
    return loading.load_target(str(folder), "float32", "cpu"), manifest_of(folder)


def test_experts_route_each_token_as_alone(execution: str, moe_target: tuple[PreTrainedModel, TargetManifest]) -> None:
    model, made = moe_target
    engine = build_engine(model, [5], made.feature_layers, random_draft(made).requires_grad_(False))
    draws = random.Random(2)
    some = [DecodeRequest([draws.randrange(7, 80) for _ in range(length)], 16) for length in (3, 17, 9, 30)]
    for tree in (None, WIDE):
        together = steps(engine.decode_batch(some, 3, tree), 4)
        assert tree is None or together == [
            decode_alone(engine, ask, tree) for ask in some
        ]  # plainly a step is a token
        assert join_answers(together) == [search_greedily(model, ask, 5) for ask in some]
    assert sum(step.num_accepted for one in together for step in one) > 2


@pytest.fixture(scope="module", params=["qwen3 vl", "qwen2.5 vl"])
def multimodal_target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, TargetManifest]:
    """The same for every way, so that transformers' own search is asked once."""
    folder = tmp_path_factory.mktemp("vl")
    return load(folder, request.param), manifest_of(folder)


def test_pictures_of_one_are_not_seen_by_another(
    execution: str, multimodal_target: tuple[PreTrainedModel, TargetManifest]
) -> None:
    """Each prompt has its own pictures, or none, and its own way of counting positions."""
    model, made = multimodal_target
    engine = build_engine(model, [5], TAPPED, random_draft(made).requires_grad_(False))
    some = [DecodeRequest(ids.tolist(), 24, shown) for ids, shown in documents()]
    for tree in (None, WIDE):
        together = steps(engine.decode_batch(some, 3, tree), 4)
        assert tree is None or together == [
            decode_alone(engine, ask, tree) for ask in some
        ]  # plainly a step is a token
        assert join_answers(together) == [search_greedily(model, ask, 5) for ask in some]
    assert sum(step.num_accepted for one in together for step in one) > 2


def test_what_cannot_be_decoded_is_told_before_the_first_token(
    engine: Engine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of the prompts, too; a tree; a cache of 3 slots of 256 rows, 1,280 bytes each as in test_decode."""
    long = [*make_requests(3), DecodeRequest([1] * 500, 20)]
    with pytest.raises(ValueError, match=r"may take 520 tokens, the target holds 512 \(max_position_embeddings\)"):
        next(engine.decode_batch(long, 2, None))
    with pytest.raises(ValueError, match=r"t3_2_99 has 98 nodes under the root, expected at most"):
        next(engine.decode_batch(make_requests(), 2, TreeShape(3, 2, 99)))
    monkeypatch.setattr(slot_pool, "measure_free_memory", lambda _: 3 * 256 * 1280 - 1)
    with pytest.raises(ValueError, match=r"keys and values of 768 tokens take [\d.]+ [KM]iB"):
        next(engine.decode_batch(make_requests(), 3, TreeShape(3, 3, 8)))
    monkeypatch.setattr(slot_pool, "measure_free_memory", lambda _: 3 * 256 * 1280)
    assert next(engine.decode_batch(make_requests(), 3, TreeShape(3, 3, 8))) == [(0, None), (1, None), (2, None)]
