"""Attention of block rows over a pack: the context before their anchor, and their own block (drawn in draft/block_draft.py).

On a GPU, FlexAttention skips tiles of which no row sees anything, and stores no mask of Q x (S + Q), which 512 blocks of 16 on
16k tokens make 200 MB. On a CPU the dense mask.
Dimensions: S tokens of a pack, R anchors, B slots of a block, Q = R*B block rows, A attention heads, G key-value heads, E width.
"""

import torch
from torch import Tensor, nn

from stages.draft.block_draft import BlockAttention, build_block_mask, build_dense_attention
from stages.training import attention_mask


def build_block_attention(anchors: Tensor, documents: Tensor, block_size: int) -> BlockAttention:
    """Return the attention of the blocks at anchors [R] into packed documents [S], on the pack's device."""
    if not documents.is_cuda:
        return build_dense_attention(build_block_mask(anchors, documents, block_size)[None])
    return _build_flex_attention(anchors, documents, block_size)


def _build_flex_attention(anchors: Tensor, documents: Tensor, block_size: int) -> BlockAttention:
    """Return FlexAttention over [S context rows | Q block rows], padded; padding is masked out."""
    num_tokens, num_queries = len(documents), len(anchors) * block_size
    num_padded_queries, num_padded_keys = _round_up(num_queries), _round_up(num_tokens + num_queries)
    block = torch.arange(num_queries, device=anchors.device) // block_size  # [Q]

    def pad(x: Tensor, size: int, value: int) -> Tensor:
        return nn.functional.pad(x, (0, size - len(x)), value=value).int()

    query_block, query_anchor = pad(block, num_padded_queries, -2), pad(anchors[block], num_padded_queries, -1)
    query_document = pad(documents[anchors[block]], num_padded_queries, -2)
    key_document = pad(documents, num_padded_keys, -1)
    key_block = pad(nn.functional.pad(block, (num_tokens, 0), value=-1), num_padded_keys, -1)

    def is_visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_context = (key_document[k] == query_document[q]) & (k < query_anchor[q])
        return in_context | (key_block[k] == query_block[q])

    mask = attention_mask.build_flex_mask(is_visible, num_padded_queries, num_padded_keys, anchors.device)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        sizes = num_padded_queries, num_padded_keys, num_padded_keys
        q, k, v = (attention_mask.arrange_by_head(x[0], n) for x, n in zip((query, keys, values), sizes, strict=True))
        out, _ = attention_mask.run_flex_attention(q, k, v, mask)
        return out.transpose(1, 2)[:, :num_queries]

    return attend


def _round_up(size: int) -> int:
    return -(-size // attention_mask.FLEX_PAD_MULTIPLE) * attention_mask.FLEX_PAD_MULTIPLE
