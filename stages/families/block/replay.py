"""A block draft on stored hidden states: exact_replay.py, and sampled_replay.py for sampled drafts.

Letters: B rows, V vocabulary, H hidden, P positions of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.draft.block_draft import BlockDraft
from stages.families.block import exact_replay, sampled_replay
from stages.families.draft_replay import DraftReplay, ExpectedCounts
from stages.families.family import LoadedDraft
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch, ReplayCapacity, ReplayOutput, count_candidate_bytes, count_table_bytes
from stages.replay.tree_statistics import TreeCycles
from stages.target.manifest import TargetManifest


@dataclass
class BlockReplay(DraftReplay):
    """A block draft."""

    draft: BlockDraft
    embedding: Tensor  # [V, H] the target's
    head: Tensor  # [V, H] the target's
    tree_scoring: str  # a key of TREE_SCORINGS
    logits_scale: float = 1.0  # of the target's manifest

    def __post_init__(self) -> None:
        self.num_tokens, self.most_steps = self.draft.config.vocab_size, self.draft.config.num_drafts

    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        return compute_block_capacity(self.draft, trees, memory)

    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_positions: int, traced: Sequence[int]
    ) -> ReplayOutput:
        inputs = self.draft, self.embedding, self.head, batch
        return exact_replay.replay_block_answers(*inputs, trees, self.tree_scoring, num_positions, traced)

    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_positions: int) -> TreeCycles:
        inputs = self.draft, self.embedding, self.head, batch
        return exact_replay.trace_block_cycles(*inputs, cycle_starts, tree, self.tree_scoring, num_positions)

    def replay_sampled(
        self, batch: ReplayBatch, temperature: float, top_p: float, num_positions: int
    ) -> ExpectedCounts:
        """Return the expected counts of the chains of the first 1, 2, ... drafts, if these are sampled as the answers were."""
        inputs = self.draft, self.embedding, self.head, batch
        return sampled_replay.replay_sampled_answers(*inputs, temperature, top_p, num_positions, self.logits_scale)


def compute_block_capacity(draft: BlockDraft, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
    """Return how many tokens and positions fit into `memory` bytes, half of it for each."""
    c, size = draft.config, draft.fc.weight.element_size()
    cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    numbers = (2 * len(c.feature_layers) + 2 + c.num_drafts) * c.hidden_size + cached  # features, last, c, states
    token = numbers * size + count_table_bytes(trees)
    layer = 8 * c.hidden_size + 3 * c.intermediate_size + 6 * c.num_attention_heads * c.head_dim
    per_position = c.block_size * layer * size + count_candidate_bytes(trees)
    return ReplayCapacity(max(1, memory // 2 // token), max(1, memory // 2 // per_position))


def build_replay(
    draft: LoadedDraft, embedding: Tensor, head: Tensor, target: TargetManifest, tree_scoring: str
) -> DraftReplay:
    assert isinstance(draft.module, BlockDraft)
    return BlockReplay(draft.module, embedding, head, tree_scoring, target.logits_scale)
