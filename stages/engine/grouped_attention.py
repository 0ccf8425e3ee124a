"""Attention that reads each key once for all the queries of its group, for decoders whose attention is sdpa.

transformers repeats keys and values for every query head where a prompt has several queries, over the whole capacity: more
bytes than everything else that a pass over many prompts reads.

Letters: B prompts, G key-value heads, M queries of a prompt, T visible keys, E head width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPED_ATTENTION = "aerie_grouped"  # its name in transformers' registry


@contextmanager
def use_grouped_attention(config: PretrainedConfig) -> Iterator[None]:
    """Replace sdpa by grouped attention inside the block; other implementations are left as they are."""
    before = config._attn_implementation
    config._attn_implementation = GROUPED_ATTENTION if before == "sdpa" else before
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend_by_key_group(
    module: Any,
    query: Tensor,  # [B, heads, M, E]
    key: Tensor,  # [B, G, T, E]
    value: Tensor,
    attention_mask: Tensor | None,  # [B, 1, M, T] bool; of a class with a mask of its own [B, heads, M, T]
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [B, M, heads, E]. The heads of a group become additional queries of one head."""
    groups, width = key.shape[1], query.shape[2]
    unknown = any(others.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "sliding_window"))
    if attention_mask is None or attention_mask.shape[1] != 1 or query.shape[1] == groups or unknown:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    rows = query.unflatten(1, (groups, -1)).flatten(2, 3)  # [B, G, heads / G * M, E]
    mask = attention_mask.repeat(1, 1, rows.shape[2] // width, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    out = out.unflatten(2, (-1, width)).flatten(1, 2).transpose(1, 2)
    return out.contiguous(), None  # as transformers' sdpa returns it: some classes view it


AttentionInterface.register(GROUPED_ATTENTION, _attend_by_key_group)
