"""P-EAGLE on stored hidden states: as a block draft (families/block/replay.py), whose slots read rows of the text instead.

Letters as in families/block/replay.py; a position p that is drafted from comes one before its anchor, the bonus token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.families.block.replay import BlockReplay
from stages.families.draft_files import LoadedDraft
from stages.families.draft_replay import DraftReplay
from stages.families.peagle.model import PEagleDraft
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayCapacity, count_candidate_bytes, count_table_bytes
from stages.target.manifest import TargetManifest


@dataclass
class PEagleReplay(BlockReplay):
    """A P-EAGLE draft; the head is its own."""

    draft: PEagleDraft

    def __post_init__(self) -> None:
        self.num_tokens = self.draft.config.draft_vocab_size

    def count_drafts(self, trees: Sequence[TreeShape]) -> int:
        return max(tree.num_steps for tree in trees)

    def compute_capacity(self, trees: Sequence[TreeShape], memory: int) -> ReplayCapacity:
        c, size, num_drafts = self.draft.config, self.draft.fc.weight.element_size(), self.count_drafts(trees)
        cached = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
        layer = 8 * c.hidden_size + 3 * c.intermediate_size + 6 * c.num_attention_heads * c.head_dim
        token = ((4 + num_drafts) * c.hidden_size + cached + layer) * size + count_table_bytes(trees)
        position = num_drafts * layer * size + count_candidate_bytes(trees)
        return ReplayCapacity(max(1, memory // 2 // token), max(1, memory // 2 // position))

    def draft_row(self, ids: Tensor, features: Tensor, anchors: Tensor, num_positions: int, num_drafts: int) -> Tensor:
        draft, table = self.draft, self.draft.choose_embedding(self.embedding)
        context = draft.read_rows(table[ids[1:]], features[:-1])
        chunk = min(num_positions, self.count_anchors_per_batch(len(ids), max(1, num_drafts - 1)))
        return torch.cat([draft.draft_from(context, part - 1, table, num_drafts) for part in anchors.split(chunk)])


def build_replay(
    draft: LoadedDraft, embedding: Tensor, head: Tensor, target: TargetManifest, tree_scoring: str
) -> DraftReplay:
    assert isinstance(draft.module, PEagleDraft)
    return PEagleReplay(draft.module, embedding, draft.module.lm_head.weight, tree_scoring)
