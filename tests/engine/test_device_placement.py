"""A copy of a target on several cards: who lies where, and that nothing else changes. Cards stand in for each other here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.engine import device_placement
from stages.engine.decode_state import DecodeRequest
from stages.engine.memory_estimate import MemoryEstimate, estimate_memory
from stages.engine.sampling import SamplingParams
from stages.params.tree_shape import TreeShape
from stages.params.units import format_bytes
from stages.target import loading
from tests.built_engines import build_engine
from tests.engine.test_decode import draft
from tests.target.test_target_forward import save_random_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("rest", "blocks", "count", "expected"),
    [
        (0, [1] * 6, 2, [0, 0, 0, 1, 1, 1]),
        (2, [1] * 6, 2, [0, 0, 1, 1, 1, 1]),
        (0, [4, 1, 1, 1, 1], 2, [0, 1, 1, 1, 1]),
        (1, [1] * 8, 3, [0, 0, 1, 1, 1, 2, 2, 2]),
    ],
)
def test_blocks_are_dealt_in_order_and_evenly(rest: int, blocks: list[int], count: int, expected: list[int]) -> None:
    assert device_placement.assign_blocks(rest, blocks, count) == expected


@pytest.fixture
def model(tmp_path: Path) -> Any:
    save_random_model(tmp_path, "qwen3", False)
    return loading.load_target(str(tmp_path), "float32", "cpu")


def test_a_model_that_was_placed_says_what_it_said(model: Any) -> None:
    prompt = [11, 7, 42, 30, 9]
    before = [list(build_engine(model, [5], []).decode_plain(prompt, 12)), model(torch.tensor([prompt])).logits]
    blocks = list(model.get_decoder().layers)
    device_placement.place_model(model, ["cpu", "cpu", "cpu"])
    assert list(model.get_decoder().layers) == blocks
    assert list(build_engine(model, [5], []).decode_plain(prompt, 12)) == before[0]
    assert torch.equal(model(torch.tensor([prompt])).logits, before[1])


def test_memory_is_said_as_it_is_taken() -> None:
    """Keys and values to the byte, in one prompt's room and in many's; what passes make grows with what they are over."""
    from tests.engine import test_decode

    model = test_decode.model.__wrapped__()
    engine, tree = build_engine(model, [7], [1, 2, 3], draft()), TreeShape(5, 4, 16)
    estimated = estimate_memory(engine, 100, 3, tree)
    assert estimated.cache_tokens == 3 * 256 and estimated.cache == estimated.cache_tokens * 1280
    asks = [DecodeRequest([1] * 60, 40)] * 4
    list(engine.decode_batch(asks, 3, tree))
    (slots,) = engine.slots.idle
    kept = slots.target_cache.nbytes + slots.draft_keys.nbytes + slots.draft_values.nbytes
    assert kept == estimated.cache
    assert estimated.target == sum(p.nbytes for p in [*model.parameters(), *model.buffers()])
    assert str(estimated).endswith(format_bytes(estimated.total)) and "768 tokens" in str(estimated)
    less = [
        estimate_memory(engine, 100, 1, None),
        estimate_memory(engine, 100, 64, tree),
        estimate_memory(engine, 100, 64, tree, samples=True),
    ]
    assert less[0].activations < less[1].activations < less[2].activations
    assert estimate_memory(engine, 200, 1, None).activations > less[0].activations
    estimated.check(estimated.cache + estimated.activations, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"are needed beside the weights, cpu has \S+ \S+ left \(\S+ \S+ of the target"
    ):
        estimated.check(estimated.cache + estimated.activations - 1, torch.device("cpu"))
    assert MemoryEstimate(1 << 30, 0, 1 << 29, 7, 0).total == 3 << 29
    how = SamplingParams(0.7, 0.9, 5, 1)
    assert list(engine.decode_batch([ask._replace(sampling=how) for ask in asks], 3, tree))
