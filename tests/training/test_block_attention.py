"""FlexAttention of block drafts gives what the dense mask gives."""

import pytest
import torch

from stages.families.block import objective as block_training
from stages.families.block.config import EVERYTHING, Sight
from stages.families.block.model import build_block_mask, build_dense_attention
from stages.training import attention_mask

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sight", [EVERYTHING, Sight(3, is_causal=True), Sight(9)])
@pytest.mark.parametrize("anchors", [[2], [0, 3, 40, 41, 139], [*range(60, 100)]])
def test_flex_attention_equals_a_dense_mask(anchors: list[int], sight: Sight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, as no GPU is here; its gradients, which flex attention has on a GPU alone, are compared by nobody."""
    monkeypatch.setattr(attention_mask, "FLEX_PAD_MULTIPLE", 128)
    monkeypatch.setattr(attention_mask, "_compile_static", lambda function: function)
    size, index = 4, torch.tensor(anchors)
    documents = torch.arange(3).repeat_interleave(torch.tensor([40, 1, 99]))  # anchor 40 is a document of its own
    draw = torch.Generator().manual_seed(len(anchors))
    query = torch.randn(1, len(anchors) * size, 4, 16, generator=draw)
    keys, values = torch.randn(2, 1, len(documents) + len(anchors) * size, 2, 16, generator=draw)
    dense = build_dense_attention(build_block_mask(index, documents, size, sight)[None])(query, keys, values)
    flex = block_training._build_flex_attention(index, documents, size, sight)(query, keys, values)
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-6)


def test_the_block_mask_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table of it: which blocks are seen in part and entirely, from the queries' side and from the keys'."""
    from torch.nn.attention.flex_attention import create_block_mask

    monkeypatch.setattr(attention_mask, "_compile_static", lambda function: function)
    row = torch.tensor([1, 2, 3, 4]).repeat_interleave(torch.tensor([300, 20, 448, 128]))  # 7 blocks

    def is_prefix(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (row[q] == row[k]) & (k <= q)

    expected = create_block_mask(is_prefix, None, None, 640, 896, device="cpu", BLOCK_SIZE=128)
    found = attention_mask.build_flex_mask(is_prefix, 640, 896, torch.device("cpu"))
    assert found.full_kv_num_blocks.sum() > 0 and found.kv_num_blocks.sum() > found.full_kv_num_blocks.sum()
    assert (found.seq_lengths, found.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)
    tables = [n for n in dir(expected) if n.endswith(("_num_blocks", "_indices"))]
    assert len(tables) == 8
    for name in tables:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
