"""Prompts decoded together say what each says alone, by transformers' own search and by the engine for one prompt."""

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.draft.eagle3 import Eagle3Draft
from stages.engine import slot_pool, target_runner
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, DecodeStep
from stages.engine.kv_cache import KVCache
from stages.engine.sampling import SamplingParams
from stages.engine.target_runner import TargetRunner
from stages.params.tree_shape import TreeShape
from stages.target import loading, multimodal
from stages.target.manifest import TargetManifest
from tests.engine.test_decode import FakeCudaGraphs, FakeReadback, draft, sample_by_transformers
from tests.engines import build_engine
from tests.target.multimodal_documents import TAPPED, TOKEN, documents, load
from tests.target.test_multimodal_forward import random_draft
from tests.target.test_target_forward import manifest_of, save_random_model

pytestmark = pytest.mark.usefixtures("one_thread")

TREES: list[TreeShape | None] = [None, TreeShape(4, 1, 5), TreeShape(3, 3, 8), TreeShape(5, 4, 16)]
WIDE = TreeShape(2, 24, 60)  # so wide that a random draft is accepted now and then
VOCAB, END, MOST = 12, 7, 16


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    from tests.engine import test_decode

    return test_decode.model.__wrapped__()


@pytest.fixture(params=["called", "played", "in blocks"])
def execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU, as a GPU plays what it recorded of transformers' own modules, and there in few kernels."""
    if request.param != "called":
        monkeypatch.setattr(slot_pool, "CudaGraphRunner", FakeCudaGraphs)
        monkeypatch.setattr(slot_pool, "AsyncReadback", FakeReadback)
    if request.param == "played":
        monkeypatch.setattr(TargetRunner, "_build_fused_decoder", lambda *_: None)
    return request.param


@pytest.fixture
def engine(execution: str, model: PreTrainedModel) -> Engine:
    made = build_engine(model, [END], [1, 2, 3], draft())
    assert (made.target.fused_decoder is not None) == (execution == "in blocks")
    if execution == "played":
        made.drafter.fused_draft = None
    return made


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
    assert tree is None or sum(step.num_accepted for some in one for step in some) > 5


def test_a_slot_is_taken_again_when_its_answer_ends(engine: Engine, model: PreTrainedModel) -> None:
    """In order; three are under way as long as any wait, and never more."""
    for tree in (None, TreeShape(3, 3, 8)):
        left = [len(search_greedily(model, ask)) for ask in make_requests()]
        started_numbers: list[int] = []
        for updates in engine.decode_batch(make_requests(), 3, tree):
            started_numbers += [number for number, step in updates if step is None]
            under_way = [number for number in started_numbers if left[number]]
            assert len(under_way) <= 3 and (len(started_numbers) == 9 or under_way)
            for number, step in updates:
                left[number] -= len(step.tokens) if step else 0
        assert started_numbers == list(range(9)) and not any(left)
    assert not engine.slots.idle[-1].active_mask.any()


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


def test_every_token_in_turn_as_the_end(engine: Engine, model: PreTrainedModel) -> None:
    for end in (0, 10):
        engine.end_tokens = {end}
        expected = [search_greedily(model, ask, end) for ask in make_requests()]
        for tree in (None, TreeShape(5, 4, 16)):
            assert join_answers(steps(engine.decode_batch(make_requests(), 4, tree), 9)) == expected


@pytest.mark.parametrize(
    "options", [{"sliding_window": 6}, {"fc_norm": True, "norm_output": True, "qk_norm": True}], ids=str
)
def test_every_option_of_a_draft(execution: str, model: PreTrainedModel, options: dict[str, Any]) -> None:
    engine = build_engine(model, [END], [1, 2, 3], draft(**options))
    assert steps(engine.decode_batch(make_requests(6), 4, TreeShape(5, 3, 12)), 6) == [
        decode_alone(engine, ask, TreeShape(5, 3, 12)) for ask in make_requests(6)
    ]


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


def test_room_is_kept_for_as_many_again(engine: Engine) -> None:
    kept = []
    for slots, tree in ((3, TreeShape(5, 4, 16)), (3, None), (2, None)):
        list(engine.decode_batch(make_requests(), slots, tree))
        kept.append(engine.slots.idle[-1])
    assert kept[0] is kept[1] is not kept[2]
    engine.slots.reserve_length(300)
    list(engine.decode_plain([1, 2, 3], 4))
    assert engine.slots.idle[-1].capacity >= 300  # so that the longest prompt finds it


def test_room_goes_before_more_is_taken(model: PreTrainedModel) -> None:
    """Not when Python next looks for circles: twice the room would be needed meanwhile."""
    engine = build_engine(model, [END], [1, 2, 3], draft())
    gc.collect()
    gc.disable()
    try:
        for decode in (
            lambda slots: engine.decode_batch(make_requests(), slots, TreeShape(5, 4, 16)),
            lambda _: engine.decode_plain([1, 2], 4),
        ):
            list(decode(2))
            held = engine.slots.idle[-1].target_cache
            tensors = [weakref.ref(tensor) for tensor in held.tensors.values()]
            engine.slots.idle, held = [], None
            assert all(tensor() is None for tensor in tensors)
    finally:
        gc.enable()


def test_a_pass_is_recorded_once_for_a_tree_and_a_temperature(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pool, "CudaGraphRunner", FakeCudaGraphs)
    monkeypatch.setattr(slot_pool, "AsyncReadback", FakeReadback)
    engine = build_engine(model, [END], [1, 2, 3], draft())
    wide, narrow = TreeShape(5, 4, 16), TreeShape(3, 3, 8)
    for tree in (wide, None, wide, narrow):
        list(engine.decode_batch(make_requests(), 3, tree))
    methods = engine.get_tree_method(wide), None, engine.get_tree_method(narrow)
    expected = {(method, None, False) for method in methods}
    assert set(engine.slots.idle[-1].graphs.recorded) == expected


def test_slots_write_and_move_rows_as_stores_of_their_own() -> None:
    """Against a store for each."""
    cpu, draws = torch.device("cpu"), torch.Generator().manual_seed(0)
    shapes = [((2, 4, cpu), (2, 4, cpu)), ((1, 4, cpu), (1, 8, cpu))]
    slots, apart = (
        KVCache(shapes, 10, torch.float32, torch.device("cpu"), num_slots=3),
        [KVCache(shapes, 10, torch.float32, torch.device("cpu")) for _ in range(3)],
    )
    starts = torch.arange(3)[:, None] * 10
    for seen in (6, 10):
        slot_indices = torch.stack([torch.randperm(seen, generator=draws)[:4] for _ in range(3)])  # [B, M]
        cache = slots.bind(starts + slot_indices, seen)
        single_caches = [store.bind(row, seen) for store, row in zip(apart, slot_indices, strict=True)]
        for number, both in enumerate(shapes):
            new = [torch.randn(3, g, 4, e, generator=draws) for g, e, _ in both]
            found = cache.layers[number].update(*new)
            for slot in range(3):
                expected = single_caches[slot].layers[number].update(*(x[slot : slot + 1] for x in new))
                assert all(torch.equal(a[slot : slot + 1], b) for a, b in zip(found, expected, strict=True))
        target_rows = torch.stack([torch.randperm(10, generator=draws)[:4] for _ in range(3)])
        slots.move_rows((starts + slot_indices).flatten(), (starts + target_rows).flatten())
        for store, source, to in zip(apart, slot_indices, target_rows, strict=True):
            store.move_rows(source, to)
        for slot, store in enumerate(apart):
            one = slots.view_slot(slot, writes_tail=False)
            assert all(torch.equal(one.tensors[shape], store.tensors[shape]) for shape in store.tensors)
    assert slots.nbytes == sum(store.nbytes for store in apart)


def test_grouped_attention_is_that_of_repeated_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head by head, each with the keys of its group; what it doesn't know goes transformers' own way.

    Bug: its memory was in another order than transformers' own, and a class that views it (AFMoE) failed with several prompts.
    """
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, rows, 8, generator=draws) for heads, rows in ((6, 5), (2, 11), (2, 11)))
    mask = torch.rand(3, 1, 5, 11, generator=draws) < 0.6
    mask[..., 0] = True
    out, _ = target_runner._attend_by_key_group(None, q, k, v, mask, scaling=0.3)
    assert out.is_contiguous()
    for head in range(6):
        scores = (q[:, head] @ k[:, head // 3].mT * 0.3).masked_fill(~mask[:, 0], -torch.inf)
        torch.testing.assert_close(out[:, :, head], scores.softmax(-1) @ v[:, head // 3])
    given: list[dict[str, Any]] = []  # transformers 5.17 and 5.23 treat softcap differently
    monkeypatch.setattr(target_runner, "sdpa_attention_forward", lambda *_, **others: given.append(others))
    target_runner._attend_by_key_group(None, q, k, v, mask, scaling=0.3, softcap=30.0)
    target_runner._attend_by_key_group(None, q, k, v, mask.repeat(1, 6, 1, 1), scaling=0.3)  # a mask for each head
    assert given == [{"scaling": 0.3, "softcap": 30.0}, {"scaling": 0.3}]


def test_passes_leave_the_attention_as_it_was(engine: Engine) -> None:
    before = engine.decoder.config._attn_implementation
    updates = engine.decode_batch(make_requests(3), 2, TreeShape(3, 3, 8))
    next(updates)
    updates.close()
    list(engine.decode_batch(make_requests(3), 2, TreeShape(3, 3, 8)))
    assert engine.decoder.config._attn_implementation == before == "sdpa"


def test_a_draft_is_not_needed_to_decode_plainly(execution: str, model: PreTrainedModel) -> None:
    engine = build_engine(model, [END], [])
    assert join_answers(steps(engine.decode_batch(make_requests(), 4, None), 9)) == [
        search_greedily(model, ask) for ask in make_requests()
    ]
    assert isinstance(draft(), Eagle3Draft)
