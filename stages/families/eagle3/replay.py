"""EAGLE-3 on stored hidden states: replay/replay.py, with a draft.

Letters: B rows, V vocabulary, H hidden, P positions of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft
from stages.families.draft_files import LoadedDraft
from stages.families.draft_replay import DraftReplay
from stages.params.tree_shape import TreeShape
from stages.replay import replay, tree_statistics
from stages.replay.replay import ReplayBatch, ReplayCapacity, ReplayOutput
from stages.replay.tree_statistics import TreeCycles
from stages.target.manifest import TargetManifest


@dataclass
class Eagle3Replay(DraftReplay):
    """An EAGLE-3 draft, replayed."""

    draft: Eagle3Draft
    embedding: Tensor  # [V, H] the target's
    tree_scoring: str  # a key of TREE_SCORINGS

    def __post_init__(self) -> None:
        self.num_tokens, self.sliding_window = self.draft.config.draft_vocab_size, self.draft.config.sliding_window

    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        return replay.compute_capacity(self.draft, trees, memory)

    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_positions: int, traced: Sequence[int]
    ) -> ReplayOutput:
        return replay.replay_answers(self.draft, self.embedding, batch, trees, self.tree_scoring, num_positions, traced)

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_positions: int) -> TreeCycles:
        return tree_statistics.trace_cycles(self.draft, self.embedding, batch, cycle_starts, tree, self.tree_scoring)


def build_replay(
    draft: LoadedDraft, embedding: Tensor, head: Tensor, target: TargetManifest, tree_scoring: str
) -> DraftReplay:
    assert isinstance(draft.module, Eagle3Draft)
    return Eagle3Replay(draft.module, embedding, tree_scoring)
