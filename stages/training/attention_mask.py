"""What the queries of a pack see of its tokens: those of their own row, up to their own place.

And its own earlier steps. The mask is one for all TTT steps, unless a window moves on with them. On a GPU it is flex
attention over the pack, so nothing of size T x T is kept; that gives, beside the mean of the values it saw, the logarithm
of the weight it saw (log-sum-exp of the scores), and `merge_own_steps` adds the own steps as one softmax over both would. Elsewhere
it is that one softmax, row by row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import attend_prefix_and_ancestors
from stages.training.compile_on_cuda import compile_on_cuda


class PackAttention(Protocol):
    def attend(self, query: Tensor, own_keys: list[Tensor], own_values: list[Tensor]) -> Tensor:
        """query [Q, A, E] of the first Q asked positions, S own keys and values, each [Q, G, E] -> [Q, A, E]."""
        ...


def build_pack_attention(pack: Any, keys: Tensor, values: Tensor, window: int | None = None) -> PackAttention:
    """The sight of a pack (see ttt.Pack) with keys and values [T, G, E], on the device where it is.

    A window counts positions, the query's own among them: step k of place p sees tokens after p + k - window.
    """
    return (_FlexPackAttention if pack.ids.is_cuda else _PaddedPackAttention).of(pack, keys, values, window)


def merge_own_steps(
    out: Tensor, lse: Tensor, query: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
) -> Tensor:
    """out [Q, A, E] and lse [Q, A] of the prefix, query [Q, A, E], S own keys and values, each [Q, G, E] -> [Q, A, E]."""
    keys, values = torch.stack(own_keys), torch.stack(own_values)  # [S, Q, G, E]
    width = query.shape[-1]
    if query.is_cuda and width & (width - 1) == 0:
        from stages.training.attention_triton import MergeOwnSteps  # needs triton, which torch brings for GPUs only

        return MergeOwnSteps.apply(out, lse, query, keys, values)
    return _merge_own_steps_torch(out, lse, query, keys, values)


@compile_on_cuda
def _merge_own_steps_torch(out: Tensor, lse: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    groups, width = keys.shape[2], query.shape[-1]
    grouped = query.float().unflatten(1, (groups, -1))  # [Q, G, R, E], R query heads a key head
    scores = (grouped * keys.float()[:, :, :, None]).sum(-1) / math.sqrt(width)  # [S, Q, G, R]
    before = lse.unflatten(1, (groups, -1))  # [Q, G, R]
    whole = torch.logaddexp(before, torch.logsumexp(scores, dim=0))
    own = ((scores - whole).exp()[..., None] * values.float()[:, :, :, None]).sum(0)  # [Q, G, R, E]
    prefix = (before - whole).exp()[..., None] * out.float().unflatten(1, (groups, -1))
    return (prefix + own).flatten(1, 2)


@dataclass
class _PaddedPackAttention:
    """Rows side by side, padded, for attention only: B rows, of at most K tokens and M queries."""

    keys: Tensor  # [B, K, G, E], any token's where a row is shorter
    values: Tensor  # [B, K, G, E]
    queries: Tensor  # [B, M] indices into asked, any where a row has fewer
    allowed: Tensor  # [B, M, K] bool
    distance: Tensor | None  # [B, M, K] from the token to the query, where there is a window
    window: int
    back: Tensor  # [P] where an asked position's answer is in [B * M]

    @classmethod
    def of(cls, pack: Any, keys: Tensor, values: Tensor, window: int | None) -> "_PaddedPackAttention":
        rows = int(pack.row[-1]) + 1
        tokens, there, _ = _tabulate_by_row(pack.row, rows)
        queries, asked, back = _tabulate_by_row(pack.row[pack.query_tokens], rows)
        distance = pack.position[pack.query_tokens][queries][..., None] - pack.position[tokens][:, None]
        allowed = there[:, None] & (distance >= 0)
        allowed[..., 0] = True  # a place nobody asked from sees something too, for its softmax's sake
        far = None if window is None else distance.masked_fill(~asked[..., None], 0)
        return cls(_gather_rows(keys, tokens), _gather_rows(values, tokens), queries, allowed, far, window or 0, back)

    def attend(self, query: Tensor, own_keys: list[Tensor], own_values: list[Tensor]) -> Tensor:
        missing = len(self.back) - len(query)

        def by_row(x: Tensor) -> Tensor:
            return _gather_rows(nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)), self.queries)

        own_k, own_v = (by_row(torch.stack(x, 1)) if x else None for x in (own_keys, own_values))  # [B, M, S, G, E]
        allowed = self.allowed
        if self.distance is not None:
            allowed = allowed & (self.distance + len(own_keys) < self.window)
        out = attend_prefix_and_ancestors(by_row(query), self.keys, self.values, allowed, own_k, own_v)  # [B, M, A, E]
        return _gather_rows(out.flatten(0, 1), self.back[: len(query)])


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first dimension, whose gradient costs a CPU less than that of indexing."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


def _tabulate_by_row(row: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Things that belong to rows, row [n] -> table [B, K] of their indices, there [B, K] bool, and each one's cell [n]."""
    order = torch.sort(row, stable=True).indices
    counts = torch.bincount(row, minlength=rows)
    slot = torch.empty_like(row)
    slot[order] = torch.arange(len(row)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    cells = max(int(counts.max()), 1)
    back = row * cells + slot
    table = torch.zeros(rows * cells, dtype=torch.int64)
    table[back] = torch.arange(len(row))
    return table.unflatten(0, (rows, cells)), torch.arange(cells) < counts[:, None], back


FLEX_BLOCK_SIZE = 128  # of flex attention; packs are padded to whole multiples of PAD, so that few shapes are compiled
FLEX_PAD_MULTIPLE = 4096


@dataclass
class _FlexPackAttention:
    mask: Callable[[int], Any]  # step -> BlockMask
    keys: Tensor  # [1, G, T, E], T rounded up
    values: Tensor

    @classmethod
    def of(cls, pack: Any, keys: Tensor, values: Tensor, window: int | None) -> "_FlexPackAttention":
        """Queries stand where all tokens do, T of them, with asked first: what is nobody's is in no block, and costs nothing."""
        size = -(-len(pack.ids) // FLEX_PAD_MULTIPLE) * FLEX_PAD_MULTIPLE
        key_row = nn.functional.pad(pack.row, (0, size - len(pack.row)), value=-1).int()
        key_place = nn.functional.pad(pack.position, (0, size - len(pack.row))).int()
        unasked = size - len(pack.query_tokens)
        query_row = nn.functional.pad(pack.row[pack.query_tokens], (0, unasked), value=-2).int()
        query_place = nn.functional.pad(pack.position[pack.query_tokens], (0, unasked)).int()
        if window is None:
            one = _build_block_mask(query_row, query_place, key_row, key_place)
            return cls(lambda _step: one, _arrange_by_head(keys, size), _arrange_by_head(values, size))

        def moving(step: int) -> Any:
            return _build_block_mask(query_row, query_place, key_row, key_place, query_place + (step + 1 - window))

        return cls(moving, _arrange_by_head(keys, size), _arrange_by_head(values, size))

    def attend(self, query: Tensor, own_keys: list[Tensor], own_values: list[Tensor]) -> Tensor:
        count = len(query)
        mask = self.mask(len(own_keys))
        out, lse = _run_flex_attention(_arrange_by_head(query, self.keys.shape[2]), self.keys, self.values, mask)
        out, lse = out[0].transpose(0, 1)[:count], lse[0].transpose(0, 1)[:count]
        return merge_own_steps(out, lse, query, own_keys, own_values) if own_keys else out


def _arrange_by_head(x: Tensor, size: int) -> Tensor:
    """[n, heads, E] -> [1, heads, size, E]."""
    whole = x if len(x) == size else nn.functional.pad(x, (0, 0, 0, 0, 0, size - len(x)))
    return whole.transpose(0, 1)[None]


_compiled_functions: dict[str, Any] = {}


def _build_block_mask(
    query_row: Tensor, query_place: Tensor, key_row: Tensor, key_place: Tensor, first: Tensor | None = None
) -> Any:
    """Who sees whom: tokens of one's row up to one's place, and from `first` of one's places on, where that is given."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (query_row[q] == key_row[k]) & (key_place[k] <= query_place[q])

    def sees_from(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(_b, _h, q, k) & (key_place[k] >= first[q])  # type: ignore[index]

    if "mask" not in _compiled_functions:
        _compiled_functions["mask"] = torch.compile(create_block_mask, dynamic=False)
    size = len(key_row)
    rule = sees if first is None else sees_from
    return _compiled_functions["mask"](
        rule, None, None, size, size, device=query_row.device, BLOCK_SIZE=FLEX_BLOCK_SIZE
    )


def _run_flex_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if "flex" not in _compiled_functions:
        _compiled_functions["flex"] = torch.compile(flex_attention, dynamic=False)
    out, aux = _compiled_functions["flex"](
        query, keys, values, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse
