"""State of a decoding on the device, and the slots of caches and CUDA graphs that it uses.

Letters: B prompts decoded together, T prompt tokens, M num_draft_tokens, R path length (num_steps + 1),
H hidden, G key-value heads, E head width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, cat

from stages.engine.cuda_graphs import AsyncReadback, CudaGraphRunner
from stages.engine.kv_cache import KVCache
from stages.engine.sampling import SamplingParams
from stages.target.multimodal import ImagePatches

if TYPE_CHECKING:
    from stages.engine.proposer import DraftingMethod, Proposer


class DecodeRequest(NamedTuple):
    """A prompt, and how to answer it."""

    prompt: list[int]
    max_new_tokens: int
    images: ImagePatches | None = None
    sampling: SamplingParams | None = None

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the prompt and the longest answer."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(eq=False)
class ActiveRequest:
    """The request that a slot is decoding."""

    request_index: int
    prompt_length: int
    max_new_tokens: int
    num_read: int = 1  # tokens that the host has read
    num_launched: int = 0  # passes launched and not read
    finished: bool = False

    @property
    def needs_pass(self) -> bool:
        """Return whether another pass may bring a token."""
        return self.num_read + self.num_launched < self.max_new_tokens


ActiveSlots = list[ActiveRequest | None]  # by slot; None: idle


CACHE_SIZE_MULTIPLE = 256  # tokens; capacities are whole multiples, so that few prompts need a new slot


class DecodeStep(NamedTuple):
    tokens: list[int]  # committed: accepted drafts, then the bonus token unless it was cut off
    num_accepted: int  # drafts among them


RequestUpdate = tuple[int, DecodeStep | None]  # index of the request; None: its prefill begins


class PrefillOutput(NamedTuple):
    """A prompt in the cache."""

    hidden: Tensor  # [T, H] after the final norm
    embeds: Tensor  # [1, T, H] the decoder's inputs, image embeddings in place
    positions: Tensor | None  # [1, T, 3] rotary positions of a multimodal target
    rope_offset: int  # added to the index of every later token
    features: Tensor | None  # [T, 3H] of the proposer's feature layers


class DecodeState(NamedTuple):
    """Everything that a pass over B prompts reads and changes besides keys and values."""

    cache_length: Tensor  # [B, 1] n: tokens in the cache
    num_verified: Tensor  # [B, 1] rows that the last cycle verified, at most R
    output_length: Tensor  # [B, 1] tokens of the answer so far: the position of the next
    next_tokens: Tensor  # [B, R] the token after each verified row; after the last: the bonus token
    features: Tensor  # [B, R, 3H]
    rope_positions: Tensor  # [B, R] or [B, R, 3]: the draft's rotary positions of these rows
    rope_offset: Tensor  # [B, 1]
    readback: Tensor  # [B, 1 + R] number of accepted drafts and the tokens, copied to the host

    def view_slots(self, start: int, stop: int) -> "DecodeState":
        return DecodeState(*(tensor[start:stop] for tensor in self))


class VerifyOutput(NamedTuple):
    """Results of one verify pass."""

    target_tokens: Tensor  # [B, M] the target's token after each node
    hidden: Tensor  # [B, M, H] of each node, after the final norm
    path: Tensor  # [B, R] the accepted nodes, the root first; arbitrary from state.num_verified on


@dataclass(eq=False)
class CacheSlots:
    """Caches for B prompts decoded together, and the CUDA graphs captured on them."""

    capacity: int  # tokens of a slot
    has_dynamic_shapes: bool  # shapes of a pass may depend on values: one slot and no CUDA graphs
    positions: Tensor  # [capacity] 0, 1, 2, ...
    numbers: Tensor  # [B, 1] 0, 1, 2, ...
    starts: Tensor  # [B, 1] first cache row of each slot
    active_mask: Tensor | None  # [B, 1] bool; None for one slot: a pass only runs while it is active
    all_true: Tensor  # [1, 1, capacity] bool
    lone_roots: Tensor  # [B, 1, 1] bool: ancestor masks of trees of one node
    uniforms: Tensor  # [B, capacity] float64: token i of a sampled answer is drawn by number i
    temperatures: Tensor  # [B] float32 of each answer, 0: greedy; where they are not one for all
    draft_uniforms: Tensor  # [B, capacity, 2] float64: of the draft of token i, the number that draws it and its coin
    target_cache: KVCache
    draft_keys: Tensor  # [B, capacity, G, E]
    draft_values: Tensor
    graphs: CudaGraphRunner
    readback: AsyncReadback
    states: dict[int, DecodeState]  # by R
    proposers: "dict[DraftingMethod, Proposer]"
    views: "list[CacheSlots]"  # of each slot, where there are several
    exceeds_window: bool = False  # a prompt and its answer may be longer than the target's sliding window

    @property
    def num_slots(self) -> int:
        return len(self.numbers)

    def view_slot(self, index: int) -> "CacheSlots":
        """Return one slot as slots that share memory with these."""
        return self.views[index] if self.views else self

    def locate_rows(self, rows: Tensor) -> Tensor:
        """Return the cache rows of rows [B, *] that are counted in each slot."""
        return self.starts[: len(rows)] + rows if self.num_slots > 1 else rows

    def free_slots(self, state: DecodeState, slots: slice) -> None:
        """Reset slots to one cached token, so that the rows which passes write for them stay inside their capacity."""
        if self.active_mask is not None:
            self.active_mask[slots] = False
            state.cache_length[slots] = 1
            state.num_verified[slots] = 1
            state.output_length[slots] = 0

    def move_slot(self, source: int, target: int, length: int, state: DecodeState) -> None:
        """Move the first `length` rows of a slot, and its state, to another slot."""
        rows = self.positions[:length]
        self.target_cache.move_rows(self.starts[source] + rows, self.starts[target] + rows)
        for tensor in (
            self.draft_keys,
            self.draft_values,
            self.uniforms,
            self.temperatures,
            self.draft_uniforms,
            *state,
        ):
            tensor[target] = tensor[source]


def advance_state(state: DecodeState, tokens: Tensor, num_verified: Tensor, moved: Tensor) -> None:
    """Write a cycle's result: tokens [B, R] after the accepted rows, num_verified [B, 1], of which `moved` [B, 1] are new."""
    state.next_tokens.copy_(tokens)
    state.num_verified.copy_(num_verified)
    state.cache_length.add_(moved)
    state.output_length.add_(moved)
    state.readback.copy_(cat([num_verified - 1, state.next_tokens], dim=1))


def compute_rope_positions(rows: Tensor, rope_offset: Tensor, like: Tensor) -> Tensor:
    """Return the rotary positions of cache rows [B, R]: [B, R], or [B, R, 3] where `like` has three axes."""
    return rows if like.ndim == rows.ndim else (rows + rope_offset)[..., None].expand(*rows.shape, 3)


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
