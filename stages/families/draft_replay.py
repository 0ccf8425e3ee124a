"""The interface of replay_trees to a family of drafts: a draft on batches of answers.

Letters: B rows, H hidden, V vocabulary, W traced trees, P positions of an answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch, ReplayCapacity, ReplayOutput
from stages.replay.tree_statistics import TreeCycles


class ExpectedCounts(NamedTuple):
    """Expected counts of each answer and of the chains of the first 1, 2, ... D drafts (G = D), float64."""

    accepted: Tensor  # [B, G] drafts
    cycles: Tensor  # [B, G] verify cycles
    cycles_reaching_depth: Tensor  # [B, G, D] cycles that accept at least d + 1 drafts


class DraftReplay(ABC):
    """A draft that can be replayed."""

    num_tokens: int  # of its vocabulary
    sliding_window: int | None = None
    most_steps: int | None = None  # of a tree: the drafts of a block; None: any

    @abstractmethod
    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        """Return how many tokens and positions fit into `memory` bytes."""

    @abstractmethod
    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_positions: int, traced: Sequence[int]
    ) -> ReplayOutput:
        """Replay every tree on every answer, `num_positions` positions at once; `traced`: indices of W trees to trace."""

    @abstractmethod
    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_positions: int) -> TreeCycles:
        """Return every cycle of one tree; cycle_starts [B, P] bool of `replay`."""

    def replay_sampled(
        self, batch: ReplayBatch, temperature: float, top_p: float, num_positions: int
    ) -> ExpectedCounts:
        """Return the expected counts of the chains of the first 1, 2, ... drafts, if these are sampled as the answers were.

        Only of a family whose drafts can be sampled (params/families.py).
        """
        raise NotImplementedError
