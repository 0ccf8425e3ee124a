"""EAGLE-3's training-time test: L draft steps from every supervised position, each on the states of the earlier steps.

EAGLE-3, section 3.1, https://arxiv.org/abs/2503.01840. Step k of position p reads the embedding of token p+1+k and the state
of step k-1. Its label is the target's distribution of token p+2+k (the target's head on the last hidden state of p+1+k),
renormalised over the draft vocabulary.

Supervised positions with `loss_mask: aligned`: token p+2+k is in an assistant span and token p+1 is not before its start,
which are the positions that serving drafts from. For a span of tokens s .. e-1:

    labels of step 0: s+1 .. e-1        of step 2: s+3 .. e-1        (the target's prefill outputs token s)

`loss_mask: eagle` is the mask of the EAGLE papers, mask[p+k], which is two tokens early; it is there for comparison.

Rows are concatenated in a `TrainingPack` without padding. Step-0 keys and values are computed for every token; queries, the
rest of the layer and both heads only for positions that this step or a later one supervises. A query of step k attends to
the prefix of its own row and to its own earlier steps:

                 tokens of its row 0 .. p      own steps 1 .. k
    step 0:      1 1 1 1 . .                   -
    step 2:      1 1 1 1 . .                   1 1

The prefix mask is the same for all steps, except with a sliding window. The own steps are merged by log-sum-exp.

A row of more than `batch_tokens` is a pack alone. Backward computes its steps again instead of keeping what they computed, or one
long row would take more memory than `batch_tokens` was chosen for: at 8B shape about 0.5 instead of 1.25 MiB a token
(docs/training.md).
Dimensions as in `draft/eagle3.py`; T tokens of a pack, P query positions, L steps, N supervised pairs of (step, position),
U distinct label tokens, M image tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stages.data import row_lengths
from stages.draft.eagle3 import Eagle3Draft
from stages.params.draft_sections import TrainDraft
from stages.training import attention_mask, chunked_loss, packed_rows
from stages.training.compile_on_cuda import compile_on_cuda
from stages.training.packed_rows import LossOutput, PackedRows, PackIndex, PackRow, SupervisedPack

PADDED_SIZE = 512


@dataclass(frozen=True)
class TrainingObjective:
    """The parameters of train_draft that define the loss, and the scale of the target's logits."""

    num_steps: int  # L
    decay: float = 0.8  # the weight of step k is decay**k
    loss_mask: str = "aligned"  # aligned or eagle
    loss: str = "ce"  # one of chunked_loss.LOSSES
    batch_tokens: int = 0  # most tokens of a pack of several rows; 0: not known. Moves no result
    logits_scale: float = 1.0  # of the target's manifest
    reach_floor: float = 1.0  # weight of a step after one that missed the label
    # Whether a pack's kernels take less time than their launches: on a GPU packs are then padded to few sizes and launched as
    # graphs (captured_step.py), and the layer is not compiled
    small_packs: bool = False

    @classmethod
    def of_settings(cls, settings: TrainDraft, num_steps: int, logits_scale: float) -> Self:
        """Return the objective of settings that have batch_tokens."""
        weights = settings.ttt_decay, settings.mask, settings.loss
        return cls(num_steps, *weights, settings.batch_tokens or 0, logits_scale, settings.reach_floor)

    def build_pack(self, rows: Sequence[PackRow], _pack_index: PackIndex, pinned: bool) -> "TrainingPack":
        """Build a pack on the CPU; nothing of it is drawn, so it is the same at every index."""
        pack = TrainingPack.from_rows(rows, self.num_steps, self.loss_mask, pinned)
        pack = replace(pack, batch_tokens=self.batch_tokens)
        return pack.pad() if pinned and self.small_packs and pack.can_be_padded else pack

    def weigh_steps(self, counts: Tensor) -> Tensor:
        """Return the weight of a position of each step [L] in the loss, of which the batch has `counts` [L]."""
        return self.decay ** torch.arange(self.num_steps, device=counts.device) / counts.clamp(min=1)

    def combine_losses(self, step_loss: Sequence[float], _counts: Sequence[float]) -> float:
        """Return the sum over steps of decay**k times the mean loss of the step."""
        return sum(self.decay**k * x for k, x in enumerate(step_loss))


class PairChunk(NamedTuple):
    """Pairs [start, stop) of a pack, and the range of their labels."""

    start: int
    stop: int
    label_start: int
    label_stop: int


@dataclass(kw_only=True)
class TrainingPack(SupervisedPack):
    """Concatenated rows, and which of their positions are supervised at which step."""

    query_tokens: Tensor  # [P] int64: tokens from which the draft is unrolled, by descending number of steps
    pair_state: Tensor  # [N] int64: index into the concatenated states of all steps; sorted by label
    pair_label: Tensor  # [N] int64: index into label_tokens
    label_tokens: Tensor  # [U] int64: tokens whose last hidden state gives a label
    queries_per_step: list[int]  # L: step k runs on query_tokens[:queries_per_step[k]]
    chunks: list[PairChunk]
    batch_tokens: int = 0  # of the objective

    @property
    def is_oversized(self) -> bool:
        """Return whether it is one row of more than `batch_tokens`."""
        return len(self.ids) > self.batch_tokens > 0

    @property
    def can_be_padded(self) -> bool:
        """Return whether it is of text, supervised, and not a long row alone, whose sizes seldom come again."""
        return bool(self.chunks) and not self.is_oversized and self.rope_positions is None

    def pad(self) -> "TrainingPack":
        """Return the pack with queries and labels up to the next multiple of PADDED_SIZE, and a pair for each label and step.

        So packs of one padded size and number of tokens differ in no other size. Padding queries repeat token 0 and have no pair;
        pairs without a supervised position are of the state after the last, without weight (chunked_loss).
        """
        num_steps, num_queries = len(self.queries_per_step), len(self.query_tokens)
        size = -(-max(num_queries, len(self.label_tokens)) // PADDED_SIZE) * PADDED_SIZE
        offsets = torch.tensor(self.queries_per_step).cumsum(0)
        step = torch.searchsorted(offsets, self.pair_state, right=True)
        query = self.pair_state - nn.functional.pad(offsets, (1, 0))[step]
        pair_state = torch.full((size, num_steps), num_steps * size)
        pair_state[self.pair_label, step] = step * size + query
        at_once = max(1, chunked_loss.PAIRS_PER_CHUNK // num_steps)  # labels
        bounds = [(start, min(start + at_once, size)) for start in range(0, size, at_once)]
        return replace(
            self,
            query_tokens=nn.functional.pad(self.query_tokens, (0, size - num_queries)),
            contexts=nn.functional.pad(self.contexts, (0, size - num_queries), value=len(row_lengths.CONTEXT_EDGES)),
            pair_state=pair_state.flatten(),
            pair_label=torch.arange(size).repeat_interleave(num_steps),
            label_tokens=nn.functional.pad(self.label_tokens, (0, size - len(self.label_tokens))),
            queries_per_step=[size] * num_steps,
            chunks=[PairChunk(a * num_steps, b * num_steps, a, b) for a, b in bounds],
            padded_size=size,
        )

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[PackRow],
        num_steps: int,
        loss_mask: str,
        pinned: bool = False,
        select: Callable[[Tensor], Tensor] = lambda x: x,  # of the supervised [L, T] those that are trained
    ) -> "TrainingPack":
        """Build a pack on the CPU, in pinned memory for a GPU."""
        packed = PackedRows.concatenate(rows, pinned)
        mask = torch.cat([r.mask for r in rows])
        supervised = select(build_supervision_mask(mask, packed.row_index, num_steps, loss_mask))  # [L, T]
        # Sorted by their last supervised step, the queries of every step are a prefix of all queries.
        num_unrolled = (supervised * torch.arange(1, num_steps + 1)[:, None]).amax(0)  # [T]
        query_tokens = torch.sort(num_unrolled, descending=True, stable=True).indices[: int((num_unrolled > 0).sum())]
        queries_per_step = [int((num_unrolled > k).sum()) for k in range(num_steps)]
        state_offsets = torch.tensor([0, *queries_per_step]).cumsum(0)
        step, query = supervised[:, query_tokens].nonzero(as_tuple=True)
        label, order = torch.sort(query_tokens[query] + 1 + step, stable=True)
        label_tokens, pair_label = torch.unique_consecutive(label, return_inverse=True)
        contexts = row_lengths.assign_contexts(packed.position[query_tokens] + 2)
        return cls(
            **vars(packed),
            query_tokens=query_tokens,
            contexts=contexts.where(supervised[0, query_tokens], len(row_lengths.CONTEXT_EDGES)),
            pair_state=(state_offsets[step] + query)[order],
            pair_label=pair_label,
            label_tokens=label_tokens,
            queries_per_step=queries_per_step,
            supervised_per_step=supervised.sum(1).tolist(),
            num_candidates=int(supervised[0].sum()),
            chunks=_split_pairs(pair_label),
        )

    def without_supervision(self) -> "TrainingPack":
        """Return the same rows with no supervised position."""
        none = [0] * len(self.supervised_per_step)
        return replace(
            self, chunks=[], supervised_per_step=none, num_candidates=0, contexts=self.contexts[:0], padded_size=None
        )

    def select_step(self, step: int) -> "TrainingPack":
        """Return a pack of one step: the pairs of `step` alone."""
        num_queries = self.queries_per_step[step]
        start = sum(self.queries_per_step[:step])
        selected = (self.pair_state >= start) & (self.pair_state < start + num_queries)
        label = self.label_tokens[self.pair_label[selected]]
        label_tokens, pair_label = torch.unique_consecutive(label, return_inverse=True)
        return replace(
            self,
            query_tokens=self.query_tokens[:num_queries],
            pair_state=self.pair_state[selected] - start,
            pair_label=pair_label,
            label_tokens=label_tokens,
            queries_per_step=[num_queries],
            supervised_per_step=self.supervised_per_step[step : step + 1],
            chunks=_split_pairs(pair_label),
        )


def _split_pairs(pair_label: Tensor) -> list[PairChunk]:
    """Split the pairs, sorted by label, into chunks of PAIRS_PER_CHUNK."""
    size, count = chunked_loss.PAIRS_PER_CHUNK, len(pair_label)
    bounds = [(start, min(start + size, count)) for start in range(0, count, size)]
    return [PairChunk(a, b, int(pair_label[a]), int(pair_label[b - 1]) + 1) for a, b in bounds]


def build_supervision_mask(mask: Tensor, row_index: Tensor, num_steps: int, kind: str) -> Tensor:
    """Return [L, T] bool, whether a position is supervised at a step, from assistant tokens mask [T] and row_index [T]."""

    def shift(x: Tensor, n: int) -> Tensor:
        """Return x[p + n], or False where that token is of another row or past the end."""
        same_row = nn.functional.pad(row_index[n:], (0, min(n, len(row_index))), value=-1) == row_index
        return nn.functional.pad(x[n:], (0, min(n, len(x)))) & same_row

    supervised: list[Tensor] = []
    for k in range(num_steps):
        if kind == "eagle":
            at_step = shift(mask, k) & shift(torch.ones_like(mask), k + 2)  # the label may be outside of the span
        else:
            # All of p+1 .. p+2+k are assistant tokens.
            at_step = shift(mask, k + 2) & (supervised[-1] if supervised else shift(mask, 1))
        supervised.append(at_step)
    return torch.stack(supervised)


def compute_loss(
    draft: Eagle3Draft,
    pack: TrainingPack,
    embedding: Tensor,  # [V, H] the target's, frozen
    head: Tensor,  # [V, H] the target's, frozen
    objective: TrainingObjective,
    counts: Tensor | None = None,  # [L] supervised positions of the whole batch; None: of this pack
) -> LossOutput:
    """Compute the loss of a pack over all L steps. Total losses of the packs of a batch add up to the loss of the batch."""
    if not pack.chunks:
        return packed_rows.compute_zero_loss(draft, pack, objective.num_steps)
    is_compiled = not objective.small_packs
    states = unroll_states(draft, pack, pack.features, embedding, objective.num_steps, is_compiled)
    weights = objective.weigh_steps(pack.count_supervised() if counts is None else counts)
    output_head = chunked_loss.OutputHead(draft.normalise_output, draft.lm_head.weight, draft.d2t, draft.t2d)
    return chunked_loss.compute_chunked_loss(output_head, states, pack, head, weights, objective)


def unroll_states(
    draft: Eagle3Draft, pack: TrainingPack, features: Tensor, embedding: Tensor, num_steps: int, compiled: bool = False
) -> list[Tensor]:
    """Return the states of each step, [P_k, H], on the row's own tokens; with `compiled` on a GPU by compiled functions.

    `features` are what the draft reads of the T tokens: for EAGLE-3 the pack's, for EAGLE the last hidden states.
    """
    compute_keys_values, compute_queries, compute_queries_keys_values, finish_layer = (
        function if compiled else inspect.unwrap(function) for function in LAYER_FUNCTIONS
    )
    dtype = draft.fc.weight.dtype
    fused = draft.fuse_features(features.to(dtype))  # [T, H]
    rope_positions = draft.get_rope_positions(pack.position, pack.rope_positions)
    embed = partial(embed_tokens, pack, nn.functional.pad(pack.ids, (0, num_steps + 1)), embedding)
    keys, values = compute_keys_values(draft, embed(slice(1, len(pack.ids) + 1)), fused, rope_positions)
    attention = attention_mask.build_pack_attention(pack, keys, values, draft.config.sliding_window)
    hidden = fused.index_select(0, pack.query_tokens)  # [P, H]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    states: list[Tensor] = []

    def run_step(
        k: int, hidden: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the state [Q, H] of step k, and its own key and value [Q, G, E], which step 0 has among the prefix's."""
        tokens = pack.query_tokens[: len(hidden)]
        embeds, positions = embed(tokens + 1 + k), rope_positions[tokens] + k
        key = value = None
        if k == 0:
            residual, query = compute_queries(draft, embeds, hidden, positions)
        else:
            residual, query, key, value = compute_queries_keys_values(draft, embeds, hidden, positions)
            own_keys, own_values = [*own_keys, key], [*own_values, value]
        attended = attention.attend(query, own_keys, own_values)  # [Q, A, E]
        return finish_layer(draft, residual, attended.to(dtype)), key, value

    run = (
        partial(checkpoint, run_step, use_reentrant=False, preserve_rng_state=False) if pack.is_oversized else run_step
    )
    for k, num_queries in enumerate(pack.queries_per_step):
        own_keys, own_values = ([x[:num_queries] for x in tensors] for tensors in (own_keys, own_values))
        hidden, key, value = run(k, hidden[:num_queries], own_keys, own_values)
        if key is not None and value is not None:
            own_keys, own_values = [*own_keys, key], [*own_values, value]
        states.append(hidden)
    return states


def embed_tokens(pack: TrainingPack, ids: Tensor, embedding: Tensor, tokens: slice | Tensor) -> Tensor:
    """Return embeddings [n, H] of tokens of the pack by their index; ids [T + L + 1] is padded past the last one."""
    embeds = embedding[ids[tokens]]
    if pack.image_embeddings is None or pack.image_token_index is None or not len(pack.image_embeddings):
        return embeds
    padding = len(ids) - len(pack.image_token_index)
    index = nn.functional.pad(pack.image_token_index, (0, padding), value=-1)[tokens]  # [n]
    return torch.where(index[:, None] < 0, embeds, pack.image_embeddings[index.clamp(min=0)].to(embeds.dtype))


def count_chain_accepted(result: LossOutput, pack: TrainingPack) -> Tensor:
    """Return the accepted length of a chain from each position, [P] in row order: argmax matches before the first miss.

    On the target's temperature-0 answer this is exactly what decoding accepts, since the tokens fed so far are the draft's
    own. On a sampled answer it counts agreement with the target's argmax along it.
    """
    return result.argmax_matches.int().cumprod(0).sum(0)[pack.query_tokens.argsort()]


@compile_on_cuda
def _compute_keys_values(
    draft: Eagle3Draft, embeds: Tensor, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    return draft.compute_keys_values(draft.build_layer_input(embeds, hidden), draft.compute_rope(positions))


@compile_on_cuda
def _compute_queries(draft: Eagle3Draft, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual of the attention too."""
    layer_input = draft.build_layer_input(embeds, hidden)
    residual = draft.select_residual(hidden, layer_input)
    return residual, draft.compute_queries(layer_input, draft.compute_rope(positions))


@compile_on_cuda
def _compute_queries_keys_values(
    draft: Eagle3Draft, embeds: Tensor, hidden: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer_input, rope = draft.build_layer_input(embeds, hidden), draft.compute_rope(positions)
    residual = draft.select_residual(hidden, layer_input)
    return residual, draft.compute_queries(layer_input, rope), *draft.compute_keys_values(layer_input, rope)


_finish_layer = compile_on_cuda(Eagle3Draft.finish_layer)

# Compiling them takes 21 s on an H200, and saves 7% of a step of small packs: not worth it where a training takes minutes.
LAYER_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    _compute_keys_values,
    _compute_queries,
    _compute_queries_keys_values,
    _finish_layer,
)
