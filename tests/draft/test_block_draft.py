"""The block draft's two forms against one slot at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stages.families.block.model import BlockContext, BlockDraft, build_block_mask
from tests.draft.slow_block_draft import (
    CONFIG,
    METHOD_OPTIONS,
    block_states,
    draft_logits,
    greedy_block,
    random_block_draft,
)

LENGTHS = (9, 6, 11)
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
every_method = pytest.mark.parametrize("method", METHOD_OPTIONS)


def make_documents(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and features of the documents."""
    generator = torch.Generator().manual_seed(seed)
    width = len(CONFIG.feature_layers) * CONFIG.hidden_size
    ids = [torch.randint(CONFIG.vocab_size - 1, (n,), generator=generator) for n in LENGTHS]
    return ids, [torch.randn(n, width, generator=generator, dtype=torch.float64) for n in LENGTHS]


ANCHORS = [(0, 1), (0, 4), (0, 8), (1, 3), (2, 0), (2, 7), (2, 10)]  # (document, position), at both ends too


@every_method
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_packed_blocks_equal_slow_ones(method: str, chunk: int) -> None:
    """Hidden states, logits and confidences of every anchor of packed documents, in chunks of anchors."""
    draft, embedding, head = random_block_draft(1, **METHOD_OPTIONS[method])
    ids, features = make_documents(2)
    lengths = torch.tensor(LENGTHS)
    documents = torch.arange(3).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    anchors = torch.tensor([sum(LENGTHS[:d]) + p for d, p in ANCHORS])
    context = draft.project_context(torch.cat(features)[None], positions[None])
    parts = [
        draft.forward_pack(embedding, torch.cat(ids), positions, documents, anchor_chunk, context)
        for anchor_chunk in anchors.split(chunk)
    ]
    hidden = torch.cat(parts)
    previous = torch.randint(20, (len(ANCHORS), draft.config.num_drafts), generator=torch.Generator().manual_seed(3))
    states = draft.select_drafting_slots(hidden)
    logits = draft.compute_logits(states, previous, head)
    for row, (d, p) in enumerate(ANCHORS):
        expected = block_states(draft, embedding, ids[d].tolist(), features[d], p)
        torch.testing.assert_close(hidden[row], torch.stack(expected), **TIGHT)
        slow = draft_logits(draft, expected, head, previous[row].tolist())
        torch.testing.assert_close(logits[row], torch.stack(slow), **TIGHT)


@every_method
def test_cached_blocks_equal_slow_ones(method: str) -> None:
    """Requests of different lengths; the context is written in pieces, over rows of garbage."""
    draft, embedding, head = random_block_draft(4, **METHOD_OPTIONS[method])
    ids, features = make_documents(5)
    prompts, anchors = (3, 2, 4), (5, 5, 10)
    c, generator = draft.config, torch.Generator().manual_seed(6)
    shape = c.num_hidden_layers, 3, 16, c.num_key_value_heads, c.head_dim
    cache = BlockContext(*(torch.randn(shape, dtype=embedding.dtype, generator=generator).unbind() for _ in "kv"))
    for request, (prompt, anchor) in enumerate(zip(prompts, anchors, strict=True)):
        request_cache = BlockContext(*(tuple(x[request : request + 1] for x in side) for side in cache))
        for start, stop in ((0, prompt), (prompt, anchor)):  # a view of the cache: written in place
            position = torch.arange(start, stop)[None]
            request_cache.write(draft.project_context(features[request][None, start:stop], position), position)
    tokens = torch.stack([ids[d][a] for d, a in enumerate(anchors)])
    hidden = draft.forward_cached(embedding, tokens, torch.tensor(anchors), cache)
    drafts = draft.draft_greedily(draft.select_drafting_slots(hidden), tokens, head)
    for d, a in enumerate(anchors):
        expected = block_states(draft, embedding, ids[d].tolist(), features[d], a)
        torch.testing.assert_close(hidden[d], torch.stack(expected), **TIGHT)
        assert drafts[d].tolist() == greedy_block(draft, embedding, head, ids[d].tolist(), features[d], a)


def test_the_block_mask_equals_a_mask_by_hand() -> None:
    mask = build_block_mask(torch.tensor([2, 4]), torch.zeros(6, dtype=torch.int64), 3)
    first = [1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    second = [1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert mask.int().tolist() == [first] * 3 + [second] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dflash3"}, "method is 'dflash3', expected one of dflash, dflash2, dspark"),
        ({"mask_token_id": 23}, "mask_token_id is 23, expected a row"),
        ({"feature_layers": (1, 3, 2)}, "strictly increasing"),
        ({"markov_rank": 2}, "expected none for dflash"),
        (METHOD_OPTIONS["dflash2"] | {"conv_group_size": 3}, "expected a divisor of the hidden size 16"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockDraft(replace(CONFIG, **changes))
