"""A block draft on stored hidden states, padded rows of answers: exact_replay.py, and sampled_replay.py for sampled drafts.

Letters: B rows, V vocabulary, H hidden, P positions of an answer, L of all answers, D drafts of a block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.families.block import exact_replay
from stages.families.block.exact_replay import AnswerPositions, ReplayPack, compute_anchor_states
from stages.families.block.expansion import expand_block
from stages.families.block.model import BlockDraft
from stages.families.block.sampled_replay import replay_sampled_drafts
from stages.families.draft_files import LoadedDraft
from stages.families.draft_replay import DraftReplay, ExpectedCounts
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch, ReplayCapacity, ReplayOutput, count_candidate_bytes, count_table_bytes
from stages.replay.tree_statistics import TreeCycles, describe_cycles
from stages.target.manifest import TargetManifest
from stages.trees.draft_tree import Candidates
from stages.trees.expansion import MAX_INTERMEDIATE_ELEMENTS


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
        c, size = self.draft.config, self.draft.fc.weight.element_size()
        cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        numbers = (2 * len(c.feature_layers) + 2 + c.num_drafts) * c.hidden_size + cached  # features, last, c, states
        token = numbers * size + count_table_bytes(trees)
        layer = 8 * c.hidden_size + 3 * c.intermediate_size + 6 * c.num_attention_heads * c.head_dim
        per_position = c.block_size * layer * size + count_candidate_bytes(trees)
        return ReplayCapacity(max(1, memory // 2 // token), max(1, memory // 2 // per_position))

    @torch.inference_mode()
    def replay(
        self, batch: ReplayBatch, trees: Sequence[TreeShape], num_positions: int, traced: Sequence[int]
    ) -> ReplayOutput:
        num_drafts = self.count_drafts(trees)
        positions = self._find_positions(batch, num_drafts)
        states = self._compute_states(batch, positions.anchors, num_positions, num_drafts)
        return exact_replay.replay_block_trees(
            self.draft, self.head, states, positions, trees, self.tree_scoring, num_positions, traced
        )

    @torch.inference_mode()
    def trace(self, batch: ReplayBatch, cycle_starts: Tensor, tree: TreeShape, num_positions: int) -> TreeCycles:
        """Return the cycles of one tree, row by row: a block is drafted again at every anchor of a cycle."""
        row, position = cycle_starts.nonzero(as_tuple=True)  # [C]
        num_drafts = self.count_drafts([tree])
        positions = self._find_positions(batch, num_drafts)
        index = (positions.counts.cumsum(0) - positions.counts)[row] + position
        states = self._compute_states(batch, positions.anchors[index], num_positions, num_drafts)[:, : tree.num_steps]
        anchor_tokens, following = positions.anchor_tokens[index], positions.following[index, : tree.num_steps]
        groups = zip(states.split(num_positions), anchor_tokens.split(num_positions), strict=True)
        expanded = [expand_block(self.draft, self.head, *group, tree.topk, self.tree_scoring) for group in groups]
        columns = zip(*((c.scores, c.tokens, c.parents) for c in expanded), strict=True)
        candidates = Candidates(*(torch.cat(column) for column in columns))
        return describe_cycles(row, position, candidates, following, tree, self.tree_scoring)

    @torch.inference_mode()
    def replay_sampled(
        self, batch: ReplayBatch, temperature: float, top_p: float, num_positions: int
    ) -> ExpectedCounts:
        """Return the expected counts of the chains of the first 1, 2, ... drafts, if these are sampled as the answers were."""
        assert batch.last is not None, "collated with keeps_last"
        num_drafts = self.draft.config.num_drafts
        positions = self._find_positions(batch, num_drafts)
        states = self._compute_states(batch, positions.anchors, num_positions, num_drafts)
        last = batch.last.flatten(0, 1)[positions.anchors]
        return replay_sampled_drafts(
            self.draft, self.head, states, last, positions, temperature, top_p, self.logits_scale
        )

    def count_drafts(self, trees: Sequence[TreeShape]) -> int:
        """Return how many drafts a pass makes: the whole block."""
        return self.draft.config.num_drafts

    def _find_positions(self, batch: ReplayBatch, num_drafts: int) -> AnswerPositions:
        """Find the positions of padded rows; anchors are indices into the flattened rows."""
        ids = batch.ids
        row_starts = torch.arange(len(ids), device=ids.device) * ids.shape[1]  # [B] index of each row's first token
        bounds = row_starts, row_starts + batch.starts, row_starts + batch.ends
        return AnswerPositions.build(ids.flatten(), *bounds, num_drafts)

    def _compute_states(self, batch: ReplayBatch, anchors: Tensor, num_positions: int, num_drafts: int) -> Tensor:
        """Return the drafting states [L, D, H] of the blocks at anchors [L], ascending indices into the flattened rows.

        Each row is a pack of its own, so that no anchor is compared with the context of other rows.
        """
        ids, features = batch.ids, batch.features
        num_rows, length = ids.shape
        bounds = torch.arange(num_rows + 1, device=ids.device) * length
        offsets = torch.searchsorted(anchors, bounds).tolist()
        parts = [features.new_zeros(0, num_drafts, self.draft.config.hidden_size)]
        for row, (i, j) in enumerate(pairwise(offsets)):
            if i < j:
                row_anchors = anchors[i:j] - row * length
                size = int(row_anchors[-1]) + 1  # tokens up to the last anchor
                parts.append(
                    self.draft_row(ids[row, :size], features[row, :size], row_anchors, num_positions, num_drafts)
                )
        return torch.cat(parts)

    def draft_row(self, ids: Tensor, features: Tensor, anchors: Tensor, num_positions: int, num_drafts: int) -> Tensor:
        """Return the drafting states [R, D, H] at anchors [R] of one row, ids [S] and features [S, K*H]."""
        chunk = min(num_positions, self.count_anchors_per_batch(len(ids), self.draft.config.block_size))
        pack = ReplayPack(ids, features, torch.arange(len(ids), device=ids.device), torch.zeros_like(ids))
        return compute_anchor_states(self.draft, self.embedding, pack, anchors, chunk)

    def count_anchors_per_batch(self, num_tokens: int, num_slots: int) -> int:
        """Return how many anchors, each attending to a context of `num_tokens`, keep the attention logits of a layer within
        MAX_INTERMEDIATE_ELEMENTS: R blocks of B slots have R B (S + R B) logits a head.
        """
        per_head = MAX_INTERMEDIATE_ELEMENTS[self.embedding.device.type] // self.draft.config.num_attention_heads
        rows = (math.sqrt(num_tokens**2 + 4 * per_head) - num_tokens) / 2  # R B
        return max(1, int(rows) // num_slots)


def build_replay(
    draft: LoadedDraft, embedding: Tensor, head: Tensor, target: TargetManifest, tree_scoring: str
) -> DraftReplay:
    assert isinstance(draft.module, BlockDraft)
    return BlockReplay(draft.module, embedding, head, tree_scoring, target.logits_scale)
