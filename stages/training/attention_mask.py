"""Attention of a pack's queries: to tokens of their own row up to their position, and to their own earlier steps.

The prefix mask is the same for all TTT steps, unless a sliding window moves with them. On a GPU, FlexAttention over the whole
pack returns output and log-sum-exp without storing anything of size T x T, and `merge_own_steps` adds the own steps to it,
which equals one softmax over both. On a CPU that one softmax is computed on rows padded to one length.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stages.draft.eagle3 import attend_prefix_and_ancestors
from stages.training.compile_on_cuda import compile_on_cuda, is_on_gpu

MAX_ATTENTION_LOGITS = 1 << 27  # of a step on a CPU, stored for the gradient


def build_pack_attention(
    pack: Any, keys: Tensor, values: Tensor, window: int | None = None
) -> "_FlexPackAttention | _PaddedPackAttention":
    """Build the attention of a ttt.TrainingPack with keys and values [T, G, E], on the pack's device.

    Its `attend` returns [Q, A, E] for query [Q, A, E] of the first Q query tokens and S own keys and values, each [Q, G, E].
    A window includes the query's own position: step k of position p attends to tokens after p + k - window.
    """
    return (_FlexPackAttention if is_on_gpu((pack.ids,)) else _PaddedPackAttention).build(pack, keys, values, window)


def merge_own_steps(
    out: Tensor, lse: Tensor, query: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """Add S own keys and values, each [Q, G, E], to the attention output [Q, A, E] and log-sum-exp [Q, A] of the prefix."""
    keys, values = torch.stack(own_keys), torch.stack(own_values)  # [S, Q, G, E]
    width = query.shape[-1]
    if query.is_cuda and width & (width - 1) == 0:
        from stages.training.attention_triton import MergeOwnSteps  # triton is installed with CUDA builds of torch only

        return MergeOwnSteps.apply(out, lse, query, keys, values)
    return _merge_own_steps_torch(out, lse, query, keys, values)


@compile_on_cuda
def _merge_own_steps_torch(out: Tensor, lse: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    groups, width = keys.shape[2], query.shape[-1]
    grouped = query.float().unflatten(1, (groups, -1))  # [Q, G, R, E], R query heads per key head
    scores = (grouped * keys.float()[:, :, :, None]).sum(-1) / math.sqrt(width)  # [S, Q, G, R]
    prefix_lse = lse.unflatten(1, (groups, -1))  # [Q, G, R]
    merged_lse = torch.logaddexp(prefix_lse, torch.logsumexp(scores, dim=0))
    own_part = ((scores - merged_lse).exp()[..., None] * values.float()[:, :, :, None]).sum(0)  # [Q, G, R, E]
    prefix_part = (prefix_lse - merged_lse).exp()[..., None] * out.float().unflatten(1, (groups, -1))
    return (prefix_part + own_part).flatten(1, 2)


@dataclass
class _PaddedPackAttention:
    """Attention over rows padded to one length: B rows of at most K tokens and M queries."""

    keys: Tensor  # [B, K, G, E]; padding repeats some token
    values: Tensor  # [B, K, G, E]
    queries: Tensor  # [B, M] indices into query_tokens; padding repeats some query
    mask: Tensor  # [B, M, K] bool
    distance: Tensor | None  # [B, M, K] from the token to the query, where there is a window
    window: int
    output_index: Tensor  # [P] index of each query's output in [B * M]

    @classmethod
    def build(cls, pack: Any, keys: Tensor, values: Tensor, window: int | None) -> "_PaddedPackAttention":
        num_rows = int(pack.row_index[-1]) + 1
        tokens, is_token, _ = _tabulate_by_row(pack.row_index, num_rows)
        queries, is_query, output_index = _tabulate_by_row(pack.row_index[pack.query_tokens], num_rows)
        distance = pack.position[pack.query_tokens][queries][..., None] - pack.position[tokens][:, None]
        mask = is_token[:, None] & (distance >= 0)
        mask[..., 0] = True  # a softmax over nothing would be NaN for padding queries
        query_distance = None if window is None else distance.masked_fill(~is_query[..., None], 0)
        by_row = _gather_rows(keys, tokens), _gather_rows(values, tokens)
        return cls(*by_row, queries, mask, query_distance, window or 0, output_index)

    def attend(self, query: Tensor, own_keys: list[Tensor], own_values: list[Tensor]) -> Tensor:
        missing = len(self.output_index) - len(query)

        def by_row(x: Tensor) -> Tensor:
            return _gather_rows(nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)), self.queries)

        own_k, own_v = (by_row(torch.stack(x, 1)) if x else None for x in (own_keys, own_values))  # [B, M, S, G, E]
        mask = self.mask
        if self.distance is not None:
            mask = mask & (self.distance + len(own_keys) < self.window)
        inputs = by_row(query), mask, own_k, own_v  # [B, M, ...]
        at_once = max(1, MAX_ATTENTION_LOGITS // (query.shape[1] * mask.shape[2] * len(mask)))
        if mask.shape[1] <= at_once:
            out = self._attend_queries(*inputs)
        else:  # the logits of long rows are computed again for the gradient, a part at a time
            parts = zip(*(x.split(at_once, 1) for x in inputs if x is not None), strict=True)
            out = torch.cat([checkpoint(self._attend_queries, *part, use_reentrant=False) for part in parts], 1)
        return _gather_rows(out.flatten(0, 1), self.output_index[: len(query)])

    def _attend_queries(
        self, query: Tensor, mask: Tensor, own_k: Tensor | None = None, own_v: Tensor | None = None
    ) -> Tensor:  # [B, M, A, E]
        return attend_prefix_and_ancestors(query, self.keys, self.values, mask, own_k, own_v)


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] along the first dimension; its gradient is cheaper on a CPU than that of indexing."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


def _tabulate_by_row(row_index: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group items by row_index [n]: item indices [B, K], valid cells [B, K] bool, and the flat cell of each item [n]."""
    order = torch.sort(row_index, stable=True).indices
    counts = torch.bincount(row_index, minlength=num_rows)
    table = nn.utils.rnn.pad_sequence(list(order.split(counts.tolist())), batch_first=True)
    is_item = torch.arange(table.shape[1], device=counts.device) < counts[:, None]
    cell = torch.empty_like(row_index)
    cell[order] = is_item.flatten().nonzero()[:, 0]
    return table, is_item, cell


FLEX_BLOCK_SIZE = 128
MAX_STATIC_SHAPES = 64
FLEX_PAD_MULTIPLE = 4096  # packs are padded to multiples of this


@dataclass
class _FlexPackAttention:
    """FlexAttention over a whole pack, padded so that few sizes are compiled, each of which takes some 20 s."""

    build_mask: Callable[[int], Any]  # step -> BlockMask
    keys: Tensor  # [1, G, T, E], T rounded up
    values: Tensor

    @classmethod
    def build(cls, pack: Any, keys: Tensor, values: Tensor, window: int | None) -> "_FlexPackAttention":
        """Pad queries to T as well; padding queries are masked out of every block.

        All packs up to the pack's `batch_tokens` have one size, also those at an epoch's end that are far from full: blocks of
        padding are skipped.
        """
        size = -(-max(len(pack.ids), pack.batch_tokens) // FLEX_PAD_MULTIPLE) * FLEX_PAD_MULTIPLE
        key_padding, query_padding = size - len(pack.row_index), size - len(pack.query_tokens)
        key_row = nn.functional.pad(pack.row_index, (0, key_padding), value=-1).int()
        key_position = nn.functional.pad(pack.position, (0, key_padding)).int()
        query_row = nn.functional.pad(pack.row_index[pack.query_tokens], (0, query_padding), value=-2).int()
        query_position = nn.functional.pad(pack.position[pack.query_tokens], (0, query_padding)).int()
        by_head = arrange_by_head(keys, size), arrange_by_head(values, size)
        build = functools.partial(_build_block_mask, query_row, query_position, key_row, key_position)
        if window is None:
            mask = build()
            return cls(lambda _step: mask, *by_head)
        return cls(lambda step: build(query_position + (step + 1 - window)), *by_head)

    def attend(self, query: Tensor, own_keys: list[Tensor], own_values: list[Tensor]) -> Tensor:
        count = len(query)
        mask = self.build_mask(len(own_keys))
        out, lse = run_flex_attention(arrange_by_head(query, self.keys.shape[2]), self.keys, self.values, mask)
        out, lse = out[0].transpose(0, 1)[:count], lse[0].transpose(0, 1)[:count]
        # Cloned, since `out` is a view and the result of a later step is not: the compiler would compile finish_layer for each.
        return merge_own_steps(out, lse, query, own_keys, own_values) if own_keys else out.clone()


def arrange_by_head(x: Tensor, size: int) -> Tensor:
    """Pad x [n, heads, E] to `size` and return it as [1, heads, size, E]."""
    padded = x if len(x) == size else nn.functional.pad(x, (0, 0, 0, 0, 0, size - len(x)))
    return padded.transpose(0, 1)[None]


@functools.cache
def _compile_static(function: Callable) -> Callable:
    import torch._dynamo

    # Packs of more sizes than the limit, 8, would be computed uncompiled, and flex attention then stores all scores.
    torch._dynamo.config.recompile_limit = max(MAX_STATIC_SHAPES, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=False)


def _build_block_mask(
    query_row: Tensor, query_position: Tensor, key_row: Tensor, key_position: Tensor, first: Tensor | None = None
) -> Any:
    """Build the BlockMask of tokens of the query's row up to its position and, where given, from position `first` on."""

    def is_prefix(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (query_row[q] == key_row[k]) & (key_position[k] <= query_position[q])

    def is_in_window(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return is_prefix(_b, _h, q, k) & (key_position[k] >= first[q])  # type: ignore[index]

    return build_flex_mask(is_prefix if first is None else is_in_window, len(key_row), len(key_row), query_row.device)


def build_flex_mask(mask_mod: Callable[..., Tensor], num_queries: int, num_keys: int, device: torch.device) -> Any:
    """Build FlexAttention's BlockMask of `mask_mod`, whose sizes are multiples of FLEX_BLOCK_SIZE.

    Only the count of visible pairs is compiled, which never stores a mask of Q x K. torch's compiled `create_block_mask` also
    compiles the sort of the blocks, 150 s of ptxas (torch 2.11 on an H200); uncompiled, these few small kernels take 1 ms.
    """
    from torch.nn.attention.flex_attention import BlockMask

    visible = _compile_static(_count_visible_pairs)(mask_mod, num_queries, num_keys, device)  # [Q / block, K / block]
    is_full = visible == FLEX_BLOCK_SIZE**2
    partial_blocks, full_blocks = (_order_blocks(blocks) for blocks in ((visible > 0) & ~is_full, is_full))
    lengths = num_queries, num_keys
    return BlockMask.from_kv_blocks(
        *partial_blocks, *full_blocks, BLOCK_SIZE=FLEX_BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=lengths
    )


def _count_visible_pairs(
    mask_mod: Callable[..., Tensor], num_queries: int, num_keys: int, device: torch.device
) -> Tensor:
    """Return the visible pairs of each block of queries and keys, [Q / block, K / block] int32."""
    queries, keys, zero = (torch.arange(n, device=device) for n in (num_queries, num_keys, 1))
    visible = mask_mod(zero, zero, queries[:, None], keys[None])  # [Q, K]
    blocks = visible.unflatten(1, (-1, FLEX_BLOCK_SIZE)).unflatten(0, (-1, FLEX_BLOCK_SIZE))
    return blocks.sum((1, 3), dtype=torch.int32)


def _order_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return [1, 1, Q / block] how many key blocks each query block has, and [1, 1, Q / block, K / block] them first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def run_flex_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """Return output [1, A, Q, E] and log-sum-exp [1, A, Q]; query [1, A, Q, E], keys and values [1, G, K, E]."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    attend = _compile_static(flex_attention)
    out, aux = attend(query, keys, values, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse
