"""Replay of a draft of any family on batches of answers: one interface over replay.py (EAGLE-3) and block_replay.py.

Letters: B rows, T tokens, K feature layers, H hidden, W traced trees, P places of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.draft.block_draft import BlockDraft
from stages.draft.eagle3 import Eagle3Draft, MultimodalFeatures
from stages.hidden_states.format import HiddenStatesRow
from stages.params.tree_shape import TreeShape
from stages.replay import block_replay, replay, sampled_drafts, tree_statistics
from stages.replay.replay import ReplayCapacity, ReplayOutput
from stages.replay.sampled_drafts import ExpectedCounts
from stages.replay.tree_statistics import TreeCycles


@dataclass(frozen=True)
class ReplayBatch:
    """Rows of hidden states, padded on the right."""

    names: list[str]
    ids: Tensor  # [B, T] prompt and answer
    features: Tensor  # [B, T, K*H]
    starts: Tensor  # [B] index of each answer's first token
    ends: Tensor  # [B] index after its last
    multimodal: MultimodalFeatures | None
    last: Tensor | None = None  # [B, T, H] after the final norm, where it is asked for

    @classmethod
    def collate(cls, rows: list[HiddenStatesRow], device: torch.device, keeps_last: bool = False) -> "ReplayBatch":
        return cls(
            [r.id for r in rows],
            pad_sequence([r.ids.to(torch.int64) for r in rows], batch_first=True).to(device),
            pad_sequence([r.features for r in rows], batch_first=True).to(device),
            torch.tensor([r.prompt_length for r in rows], device=device),
            torch.tensor([len(r.ids) for r in rows], device=device),
            _collate_multimodal(rows, device),
            pad_sequence([r.last for r in rows], batch_first=True).to(device) if keeps_last else None,
        )


class DraftReplay(Protocol):
    """A draft that can be replayed."""

    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        """Return how many tokens and places fit into `memory` bytes."""
        ...

    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_places: int, traced: Sequence[int]
    ) -> ReplayOutput:
        """Replay every tree on every answer, `num_places` places at once; `traced`: indices of W trees to trace."""
        ...

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_places: int) -> TreeCycles:
        """Return every cycle of one tree; cycle_starts [B, P] bool of `replay`."""
        ...


@dataclass(frozen=True)
class Eagle3Replay:
    """An EAGLE-3 draft."""

    draft: Eagle3Draft
    embedding: Tensor  # [V, H] the target's
    tree_scoring: str  # a key of TREE_SCORINGS

    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        return replay.compute_capacity(self.draft, trees, memory)

    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_places: int, traced: Sequence[int]
    ) -> ReplayOutput:
        given = self.draft, self.embedding, batch.ids, batch.features, batch.starts, batch.ends
        return replay.replay_answers(*given, trees, batch.multimodal, self.tree_scoring, num_places, traced)

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_places: int) -> TreeCycles:
        given = self.draft, self.embedding, batch.ids, batch.features, batch.starts, batch.ends
        return tree_statistics.trace_cycles(*given, cycle_starts, tree, batch.multimodal, self.tree_scoring)


@dataclass(frozen=True)
class BlockReplay:
    """A block draft, of a text target."""

    draft: BlockDraft
    embedding: Tensor  # [V, H] the target's
    head: Tensor  # [V, H] the target's
    tree_scoring: str  # a key of TREE_SCORINGS
    logits_scale: float = 1.0  # of the target's manifest

    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        return block_replay.compute_block_capacity(self.draft, trees, memory)

    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_places: int, traced: Sequence[int]
    ) -> ReplayOutput:
        given = self.draft, self.embedding, self.head, batch.ids, batch.features, batch.starts, batch.ends
        return block_replay.replay_block_answers(*given, trees, self.tree_scoring, num_places, traced)

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_places: int) -> TreeCycles:
        given = self.draft, self.embedding, self.head, batch.ids, batch.features, batch.starts, batch.ends
        return block_replay.trace_block_cycles(*given, cycle_starts, tree, self.tree_scoring, num_places)

    def replay_sampled(self, batch: ReplayBatch, temperature: float, top_p: float, num_places: int) -> ExpectedCounts:
        """Return the expected counts of the chains of the first 1, 2, ... drafts, if these are sampled as the answers were."""
        assert batch.last is not None, "collated with keeps_last"
        given = self.draft, self.embedding, self.head, batch.ids, batch.features, batch.last, batch.starts, batch.ends
        return sampled_drafts.replay_sampled_answers(*given, temperature, top_p, num_places, self.logits_scale)


def _collate_multimodal(rows: list[HiddenStatesRow], device: torch.device) -> MultimodalFeatures | None:
    """Collate the rows' multimodal features; None for a text target."""
    positions, pictured, visual = zip(
        *((r.positions, r.image_token_mask, r.image_embeddings) for r in rows), strict=True
    )
    if positions[0] is None:
        return None
    positions, pictured = (pad_sequence(list(t), batch_first=True) for t in (positions, pictured))
    return MultimodalFeatures(positions.to(device), pictured.to(device), torch.cat(visual).to(device))
