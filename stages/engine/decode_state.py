"""State of a decoding on the device, and the slot of caches and CUDA graphs that it uses.

Letters: T prompt tokens, M num_draft_tokens, R path length (num_steps + 1), H hidden, G key-value heads, E head width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, cat

from stages.engine.cuda_graphs import AsyncReadback, CudaGraphRunner
from stages.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from stages.engine.proposer import DraftingMethod, Proposer

CACHE_SIZE_MULTIPLE = 256  # tokens; capacities are whole multiples, so that few prompts need a new slot


class DecodeStep(NamedTuple):
    tokens: list[int]  # committed: accepted drafts, then the bonus token unless it was cut off
    num_accepted: int  # drafts among them


class PrefillOutput(NamedTuple):
    """A prompt in the cache."""

    hidden: Tensor  # [T, H] after the final norm
    embeds: Tensor  # [1, T, H] the decoder's inputs, image embeddings in place
    positions: Tensor | None  # [1, T, 3] rotary positions of a multimodal target
    rope_offset: int  # added to the index of every later token


class DecodeState(NamedTuple):
    """Everything that a cycle reads and changes besides keys and values. The batch engine puts [B] before each shape."""

    cache_length: Tensor  # [1] n: tokens in the cache
    num_verified: Tensor  # [1] rows that the last cycle verified, at most R
    output_length: Tensor  # [1] tokens of the answer so far: the position of the next
    next_tokens: Tensor  # [R] the token after each verified row; after the last: the bonus token
    features: Tensor  # [R, 3H]
    rope_positions: Tensor  # [R] or [R, 3]: the draft's rotary positions of these rows
    rope_offset: Tensor  # [1]
    readback: Tensor  # [1 + R] number of accepted drafts and the tokens, copied to the host


class VerifyOutput(NamedTuple):
    """Results of one verify pass."""

    target_tokens: Tensor  # [M] the target's token after each node
    hidden: Tensor  # [M, H] of each node, after the final norm
    path: Tensor  # [R] the accepted nodes, the root first; arbitrary from state.num_verified on


@dataclass
class CacheSlot:
    """Caches for one decoding at a time, and the CUDA graphs captured on them."""

    capacity: int  # tokens
    positions: Tensor  # [capacity] 0, 1, 2, ...
    all_true: Tensor  # [1, capacity] bool
    uniforms: Tensor  # [capacity] float64: token i of a sampled answer is drawn by number i
    target_cache: KVCache
    draft_keys: Tensor  # [1, capacity, G, E]
    draft_values: Tensor
    graphs: CudaGraphRunner
    readback: AsyncReadback
    states: dict[int, DecodeState]  # by R
    proposers: "dict[DraftingMethod, Proposer]"


def advance_state(state: DecodeState, tokens: Tensor, num_verified: Tensor, moved: Tensor) -> None:
    """Write a cycle's result: tokens [..., R] after the accepted rows, num_verified [..., 1], of which `moved` are new rows."""
    state.next_tokens.copy_(tokens)
    state.num_verified.copy_(num_verified)
    state.cache_length.add_(moved)
    state.output_length.add_(moved)
    state.readback.copy_(cat([num_verified - 1, state.next_tokens], dim=-1))


def compute_rope_positions(rows: Tensor, rope_offset: Tensor, like: Tensor) -> Tensor:
    """Return the rotary positions of cache rows [..., R]: [..., R], or [..., R, 3] where `like` has three axes."""
    return rows if like.ndim == rows.ndim else (rows + rope_offset)[..., None].expand(*rows.shape, 3)


def count_scratch_rows(num_steps: int, topk: int, num_draft_tokens: int) -> int:
    """Return how many cache rows behind the verified ones a cycle may write."""
    return max(num_steps + 1, num_draft_tokens, (num_steps - 1) * topk)


def round_up_capacity(tokens: int) -> int:
    return -(-tokens // CACHE_SIZE_MULTIPLE) * CACHE_SIZE_MULTIPLE


def read_step(values: list[int], end_tokens: set[int], max_tokens: int) -> tuple[DecodeStep, bool]:
    """Return the step in a readback, cut behind an end token and at `max_tokens`, and whether anything was cut off."""
    num_accepted, *tokens = values
    tokens = tokens[: num_accepted + 1]
    committed = _cut_at_end_token(tokens[:max_tokens], end_tokens)
    return DecodeStep(committed, min(num_accepted, len(committed))), len(committed) < len(tokens)


def _cut_at_end_token(tokens: list[int], end_tokens: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: index + 1]
    return tokens
