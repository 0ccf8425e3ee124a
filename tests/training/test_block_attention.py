"""FlexAttention of block drafts gives what the dense mask gives."""

import pytest
import torch

from stages.draft.block_draft import build_block_mask, build_dense_attention
from stages.training import attention_mask, block_attention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("anchors", [[2], [0, 3, 40, 41, 139], [*range(60, 100)]])
def test_flex_attention_equals_a_dense_mask(anchors: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, as no GPU is here; its gradients, which flex attention has on a GPU alone, are compared by nobody."""
    monkeypatch.setattr(attention_mask, "FLEX_PAD_MULTIPLE", 128)
    monkeypatch.setattr(attention_mask, "_compile_static", lambda function: function)
    size, index = 4, torch.tensor(anchors)
    documents = torch.arange(3).repeat_interleave(torch.tensor([40, 1, 99]))  # anchor 40 is a document of its own
    draw = torch.Generator().manual_seed(len(anchors))
    query = torch.randn(1, len(anchors) * size, 4, 16, generator=draw)
    keys, values = torch.randn(2, 1, len(documents) + len(anchors) * size, 2, 16, generator=draw)
    dense = build_dense_attention(build_block_mask(index, documents, size)[None])(query, keys, values)
    flex = block_attention._build_flex_attention(index, documents, size)(query, keys, values)
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-6)
