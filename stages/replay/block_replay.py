"""Exact replay of a block draft: what every width and every tree over its blocks accepts, from stored features.

The block at anchor a is a function of the tokens up to a and of the target's features before a: not of earlier blocks, nor of
how many drafts are verified. So one forward drafts at every place of an answer. Places are those of replay.py: the bonus tokens
y_0 .. y_{n-2} of an answer of n tokens, and no draft beyond the answer's end is accepted. From a place where j drafts are
right, a cycle accepts j and the next starts at a + j + 1 (docs/metrics.md).

    width m    a chain of the first m drafts accepts min(j, m), for every m up to the block: engines serve these
    tree       candidates of the same block. The slots of dflash are independent given the context, so a path's probability is
               the product of its slots'; with a Markov head a node's children have the slot's logits and the bias of the
               node's own token. A tree costs no further draft forward. No engine serves trees of blocks.

Another block size needs another forward: slots see the number of mask tokens.

Letters: S tokens of a pack, B answers, L places of all answers, D drafts of a block, N places of a batch, K topk, G widths or
trees, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stages.draft.block_draft import BlockDraft
from stages.params.tree_shape import TreeShape
from stages.replay.oracle_bounds import choose_integer_type
from stages.replay.replay import PlaceTables, ReplayOutput, WalkCounts, walk_cycles
from stages.trees.block_expansion import check_block_tree, expand_block
from stages.trees.expansion import MAX_INTERMEDIATE_ELEMENTS


class AnswerPlaces(NamedTuple):
    """The places of packed answers: the anchors of their cycles."""

    anchors: Tensor  # [L] indices into the pack
    following: Tensor  # [L, D] the answer's tokens after each anchor, -1 past its end
    counts: Tensor  # [B] places of each answer

    @classmethod
    def build(cls, ids: Tensor, starts: Tensor, ends: Tensor, num_drafts: int) -> "AnswerPlaces":
        """Find the places of answers ids[starts:ends]: ids [S] of the pack, starts and ends [B] indices into it."""
        counts = (ends - 1 - starts).clamp(min=0)
        offsets = counts.cumsum(0) - counts
        index = torch.arange(int(counts.sum()), device=ids.device)
        anchors = index + (starts - offsets).repeat_interleave(counts)
        after = anchors[:, None] + 1 + torch.arange(num_drafts, device=ids.device)
        is_inside = after < ends.repeat_interleave(counts)[:, None]
        return cls(anchors, torch.where(is_inside, ids[after.clamp(max=len(ids) - 1)], -1), counts)


@torch.inference_mode()
def compute_place_states(
    draft: BlockDraft,
    embedding: Tensor,  # [V, H] the target's
    ids: Tensor,  # [S] of packed rows
    features: Tensor,  # [S, K*H]
    positions: Tensor,  # [S] in their rows
    documents: Tensor,  # [S] row of each token
    anchors: Tensor,  # [L]
    anchors_per_batch: int = 64,
) -> Tensor:
    """Return the drafting states [L, D, H] of the blocks at all anchors."""
    context = draft.project_context(features[None], positions[None])
    parts = [
        draft.select_drafting_slots(draft.forward_pack(embedding, ids, positions, documents, some, context))
        for some in anchors.split(anchors_per_batch)
    ]
    return torch.cat(parts)


def count_accepted(drafts: Tensor, following: Tensor) -> Tensor:
    """Return [L] how many leading drafts [L, D] are the answer's following tokens [L, D]."""
    return (drafts == following).cumprod(1).sum(1)


def replay_widths(drafts: Tensor, places: AnswerPlaces) -> WalkCounts:
    """Walk the chains of the first 1, 2, ... D drafts [L, D] over the answers; G = D."""
    num_drafts = drafts.shape[1]
    accepted = torch.nn.functional.pad(count_accepted(drafts, places.following), (0, 1))  # [L + 1]
    widths = torch.arange(1, num_drafts + 1, device=drafts.device)[:, None]
    by_width = torch.minimum(accepted, widths).to(choose_integer_type(num_drafts))  # [D, L + 1]
    return walk_cycles(by_width, widths.to(by_width.dtype).expand_as(by_width), places.counts, num_drafts)


def compute_histogram(walk: WalkCounts) -> Tensor:
    """Return [B, G, D + 1] the cycles that accepted 0, 1, ... D drafts."""
    reaching = torch.cat([walk.cycles[..., None], walk.cycles_reaching_depth], -1)
    return reaching - torch.nn.functional.pad(walk.cycles_reaching_depth, (0, 1))


@torch.inference_mode()
def replay_block_trees(
    draft: BlockDraft,
    head: Tensor,  # [V, H] the target's
    states: Tensor,  # [L, D, H] of `compute_place_states`
    anchor_tokens: Tensor,  # [L]
    places: AnswerPlaces,
    trees: Sequence[TreeShape],
    tree_scoring: str = "sglang",  # a key of TREE_SCORINGS
) -> ReplayOutput:
    """Replay trees over the blocks of all places. Raises ValueError for a tree that can't be built from such blocks."""
    for tree in trees:
        check_block_tree(tree, draft.config.vocab_size, draft.config.num_drafts)
    tables = PlaceTables(trees, len(states), tree_scoring, states.device)
    elements = MAX_INTERMEDIATE_ELEMENTS[states.device.type]
    for topk in tables.topks:
        nodes = tables.num_steps + (topk if draft.markov_head is not None else 0)  # whose logits are held at once
        size = max(1, elements // (nodes * draft.config.vocab_size))
        for start in range(0, len(states), size):
            here = slice(start, min(start + size, len(states)))
            logits = states[here, : tables.num_steps] @ head.T
            candidates = expand_block(logits, anchor_tokens[here], draft.markov_head, topk, tree_scoring)
            tables.fill_places(here, topk, candidates, places.following[here, : tables.num_steps])
    return tables.walk(places.counts)
