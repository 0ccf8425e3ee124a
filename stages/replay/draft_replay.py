"""Replay of a draft of any family on batches of answers: one interface over replay.py (EAGLE-3) and block_replay.py.

Letters: B rows, H hidden, V vocabulary, W traced trees, P positions of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stages.draft.block_draft import BlockDraft
from stages.draft.eagle3 import Eagle3Draft
from stages.params.tree_shape import TreeShape
from stages.replay import block_replay, replay, sampled_drafts, tree_statistics
from stages.replay.replay import ReplayBatch, ReplayCapacity, ReplayOutput
from stages.replay.sampled_drafts import ExpectedCounts
from stages.replay.tree_statistics import TreeCycles


class DraftReplay(Protocol):
    """A draft that can be replayed."""

    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        """Return how many tokens and positions fit into `memory` bytes."""
        ...

    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_positions: int, traced: Sequence[int]
    ) -> ReplayOutput:
        """Replay every tree on every answer, `num_positions` positions at once; `traced`: indices of W trees to trace."""
        ...

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_positions: int) -> TreeCycles:
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
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_positions: int, traced: Sequence[int]
    ) -> ReplayOutput:
        return replay.replay_answers(self.draft, self.embedding, batch, trees, self.tree_scoring, num_positions, traced)

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_positions: int) -> TreeCycles:
        return tree_statistics.trace_cycles(self.draft, self.embedding, batch, cycle_starts, tree, self.tree_scoring)


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
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_positions: int, traced: Sequence[int]
    ) -> ReplayOutput:
        inputs = self.draft, self.embedding, self.head, batch
        return block_replay.replay_block_answers(*inputs, trees, self.tree_scoring, num_positions, traced)

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_positions: int) -> TreeCycles:
        inputs = self.draft, self.embedding, self.head, batch
        return block_replay.trace_block_cycles(*inputs, cycle_starts, tree, self.tree_scoring, num_positions)

    def replay_sampled(
        self, batch: ReplayBatch, temperature: float, top_p: float, num_positions: int
    ) -> ExpectedCounts:
        """Return the expected counts of the chains of the first 1, 2, ... drafts, if these are sampled as the answers were."""
        inputs = self.draft, self.embedding, self.head, batch
        return sampled_drafts.replay_sampled_answers(*inputs, temperature, top_p, num_positions, self.logits_scale)
