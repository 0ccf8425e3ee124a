"""Exact replay of a block draft: what every width and every tree over its blocks accepts, from stored features.

The block at anchor a is a function of the tokens up to a and of the target's features before a: not of earlier blocks, nor of
how many drafts are verified. So one forward drafts at every position of an answer. Positions are those of replay.py: the bonus
tokens y_0 .. y_{n-2} of an answer of n tokens, and no draft beyond the answer's end is accepted. From a position where j drafts
are right, a cycle accepts j and the next starts at a + j + 1 (docs/metrics.md).

    width m    a chain of the first m drafts accepts min(j, m), for every m up to the block: engines serve the whole
    tree       candidates of the same block. The slots of dflash are independent given the context, so a path's probability is
               the product of its slots'; with a Markov head or a candidate selector a node's children have the slot's
               logits after the node's own token. A tree costs no further draft forward. No engine serves trees of blocks.

Another block size needs another forward: slots see the number of mask tokens.

Letters: S tokens of a pack, B answers, L positions of all answers, D drafts of a block, N positions of a batch, K topk, G widths
or trees, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stages.families.block.expansion import expand_block
from stages.families.block.model import BlockDraft
from stages.params.tree_shape import SGLANG_SCORING, TreeShape
from stages.replay.replay import PositionTables, ReplayOutput, mark_cycle_starts


class AnswerPositions(NamedTuple):
    """The positions of packed answers: the anchors of their cycles."""

    anchors: Tensor  # [L] indices into the pack
    anchor_tokens: Tensor  # [L]
    following: Tensor  # [L, D] the answer's tokens after each anchor, -1 past its end
    counts: Tensor  # [B] positions of each answer
    prompt_lengths: Tensor  # [B] tokens of its row before it

    @classmethod
    def build(cls, ids: Tensor, row_starts: Tensor, starts: Tensor, ends: Tensor, num_drafts: int) -> "AnswerPositions":
        """Find the positions of answers ids[starts:ends] of rows from row_starts on: [B] indices into ids [S] of the pack."""
        counts = (ends - 1 - starts).clamp(min=0)
        offsets = counts.cumsum(0) - counts
        index = torch.arange(int(counts.sum()), device=ids.device)
        anchors = index + (starts - offsets).repeat_interleave(counts)
        draft_positions = anchors[:, None] + 1 + torch.arange(num_drafts, device=ids.device)
        is_inside = draft_positions < ends.repeat_interleave(counts)[:, None]
        following = torch.where(is_inside, ids[draft_positions.clamp(max=len(ids) - 1)], -1)
        return cls(anchors, ids[anchors], following, counts, starts - row_starts)


class ReplayPack(NamedTuple):
    """Rows end to end in one sequence."""

    ids: Tensor  # [S]
    features: Tensor  # [S, K*H]
    positions: Tensor  # [S] in their rows
    documents: Tensor  # [S] row of each token


@torch.inference_mode()
def compute_anchor_states(
    draft: BlockDraft,
    embedding: Tensor,  # [V, H] the target's
    pack: ReplayPack,
    anchors: Tensor,  # [L] indices into the pack
    anchors_per_batch: int = 64,
) -> Tensor:
    """Return the drafting states [L, D, H] of the blocks at all anchors."""
    context = draft.project_context(pack.features[None], pack.positions[None])
    parts = [
        draft.select_drafting_slots(
            draft.forward_pack(embedding, pack.ids, pack.positions, pack.documents, chunk, context)
        )
        for chunk in anchors.split(anchors_per_batch)
    ]
    return torch.cat(parts)


@torch.inference_mode()
def replay_block_trees(
    draft: BlockDraft,
    head: Tensor,  # [V, H] the target's
    states: Tensor,  # [L, D, H] of `compute_anchor_states`
    positions: AnswerPositions,
    trees: Sequence[TreeShape],
    tree_scoring: str = SGLANG_SCORING,  # a key of TREE_SCORINGS
    positions_per_batch: int = 1024,  # see `BlockReplay.compute_capacity`
    traced: Sequence[int] = (),  # indices of W trees whose cycle starts are returned too
) -> ReplayOutput:
    """Replay trees over the blocks of all positions. Raises ValueError for a tree that can't be built from such blocks."""
    for tree in trees:
        draft.check_tree(tree)
    tables = PositionTables(trees, len(states), tree_scoring, states.device)
    for start in range(0, len(states), positions_per_batch):
        batch = slice(start, min(start + positions_per_batch, len(states)))
        for topk in tables.topks:
            inputs = states[batch, : tables.num_steps], positions.anchor_tokens[batch]
            candidates = expand_block(draft, head, *inputs, topk, tree_scoring)
            tables.fill_positions(batch, topk, candidates, positions.following[batch, : tables.num_steps])
    output = tables.walk(positions.counts, positions.prompt_lengths)
    if not traced:
        return output
    return output._replace(cycle_starts=mark_cycle_starts(tables.accepted[list(traced)], positions.counts))
