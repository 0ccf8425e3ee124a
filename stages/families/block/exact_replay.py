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

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from stages.draft.block_draft import BlockDraft
from stages.families.block.expansion import check_block_tree, expand_block
from stages.params.tree_shape import SGLANG_SCORING, TreeShape
from stages.replay.oracle_bounds import choose_integer_type
from stages.replay.replay import PositionTables, ReplayBatch, ReplayOutput, WalkCounts, mark_cycle_starts, walk_cycles
from stages.replay.tree_statistics import TreeCycles, describe_cycles
from stages.trees.draft_tree import Candidates
from stages.trees.expansion import MAX_INTERMEDIATE_ELEMENTS, count_logit_rows


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


def count_accepted(drafts: Tensor, following: Tensor) -> Tensor:
    """Return [L] how many leading drafts [L, D] are the answer's following tokens [L, D]."""
    return (drafts == following).cumprod(1).sum(1)


def replay_chains(drafts: Tensor, positions: AnswerPositions) -> WalkCounts:
    """Walk the chains of the first 1, 2, ... D drafts [L, D] over the answers; G = D."""
    num_drafts = drafts.shape[1]
    accepted = torch.nn.functional.pad(count_accepted(drafts, positions.following), (0, 1))  # [L + 1]
    widths = torch.arange(1, num_drafts + 1, device=drafts.device)[:, None]
    by_width = torch.minimum(accepted, widths).to(choose_integer_type(num_drafts))  # [D, L + 1]
    return walk_cycles(by_width, widths.to(by_width.dtype).expand_as(by_width), positions.counts, num_drafts)[0]


def compute_histogram(walk: WalkCounts) -> Tensor:
    """Return [B, G, D + 1] the cycles that accepted 0, 1, ... D drafts."""
    reaching = torch.cat([walk.cycles[..., None], walk.cycles_reaching_depth], -1)
    return reaching - torch.nn.functional.pad(walk.cycles_reaching_depth, (0, 1))


@torch.inference_mode()
def replay_block_trees(
    draft: BlockDraft,
    head: Tensor,  # [V, H] the target's
    states: Tensor,  # [L, D, H] of `compute_anchor_states`
    positions: AnswerPositions,
    trees: Sequence[TreeShape],
    tree_scoring: str = SGLANG_SCORING,  # a key of TREE_SCORINGS
    positions_per_batch: int | None = None,  # None: `count_logit_rows`
    traced: Sequence[int] = (),  # indices of W trees whose cycle starts are returned too
) -> ReplayOutput:
    """Replay trees over the blocks of all positions. Raises ValueError for a tree that can't be built from such blocks."""
    for tree in trees:
        check_block_tree(tree, draft.config.vocab_size, draft.config.num_drafts, draft.config.selector_top_k)
    tables = PositionTables(trees, len(states), tree_scoring, states.device)
    for topk in tables.topks:
        inputs = states[:, : tables.num_steps], positions.anchor_tokens, topk, tree_scoring, positions_per_batch
        for batch, candidates in _expand_positions(draft, head, *inputs):
            tables.fill_positions(batch, topk, candidates, positions.following[batch, : tables.num_steps])
    output = tables.walk(positions.counts, positions.prompt_lengths)
    if not traced:
        return output
    return output._replace(cycle_starts=mark_cycle_starts(tables.accepted[list(traced)], positions.counts))


def _expand_positions(
    draft: BlockDraft,
    head: Tensor,
    states: Tensor,  # [L, S, H] those of the first num_steps drafts
    anchor_tokens: Tensor,
    topk: int,
    tree_scoring: str,
    positions_per_batch: int | None,
) -> Iterator[tuple[slice, Candidates]]:
    """Yield the candidates of batches of positions (`count_logit_rows`)."""
    nodes = states.shape[1] + (topk if draft.is_conditional else 0)  # whose logits are held at once
    size = count_logit_rows(draft.config.vocab_size, states.device) // nodes
    size = max(1, size if positions_per_batch is None else min(size, positions_per_batch))
    for start in range(0, max(1, len(states)), size):  # of no positions, a batch of none
        batch = slice(start, min(start + size, len(states)))
        batch_states = states[batch]
        yield batch, expand_block(batch_states @ head.T, batch_states, anchor_tokens[batch], draft, topk, tree_scoring)


# Padded rows of answers, as the replay of EAGLE-3 takes them


@torch.inference_mode()
def replay_block_answers(
    draft: BlockDraft,
    embedding: Tensor,  # [V, H] the target's
    head: Tensor,  # [V, H] the target's
    answers: ReplayBatch,
    trees: Sequence[TreeShape],
    tree_scoring: str = SGLANG_SCORING,  # a key of TREE_SCORINGS
    positions_per_batch: int = 1024,  # see `replay.compute_block_capacity`
    traced: Sequence[int] = (),  # indices of W trees whose cycle starts are returned too
) -> ReplayOutput:
    """Replay every tree on every answer. Raises ValueError for a tree that can't be built from such blocks."""
    positions = find_positions(answers, draft.config.num_drafts)
    states = compute_row_states(draft, embedding, answers, positions.anchors, positions_per_batch)
    return replay_block_trees(draft, head, states, positions, trees, tree_scoring, positions_per_batch, traced)


@torch.inference_mode()
def trace_block_cycles(
    draft: BlockDraft,
    embedding: Tensor,  # [V, H] the target's
    head: Tensor,  # [V, H] the target's
    answers: ReplayBatch,
    cycle_starts: Tensor,  # [B, P] bool: ReplayOutput.cycle_starts of this tree
    tree: TreeShape,
    tree_scoring: str = SGLANG_SCORING,  # a key of TREE_SCORINGS
    positions_per_batch: int = 1024,
) -> TreeCycles:
    """Return the cycles of one tree, row by row: a block is drafted again at every anchor of a cycle."""
    row, position = cycle_starts.nonzero(as_tuple=True)  # [C]
    positions = find_positions(answers, draft.config.num_drafts)
    index = (positions.counts.cumsum(0) - positions.counts)[row] + position
    states = compute_row_states(draft, embedding, answers, positions.anchors[index], positions_per_batch)
    inputs = states[:, : tree.num_steps], positions.anchor_tokens[index], tree.topk, tree_scoring, positions_per_batch
    parts = [candidates for _, candidates in _expand_positions(draft, head, *inputs)]
    columns = zip(*((c.scores, c.tokens, c.parents) for c in parts), strict=True)
    candidates = Candidates(*(torch.cat(column) for column in columns))
    return describe_cycles(row, position, candidates, positions.following[index, : tree.num_steps], tree, tree_scoring)


def find_positions(answers: ReplayBatch, num_drafts: int) -> AnswerPositions:
    """Find the positions of padded rows; anchors are indices into the flattened rows."""
    ids = answers.ids
    row_starts = torch.arange(len(ids), device=ids.device) * ids.shape[1]  # [B] index of each row's first token
    bounds = row_starts, row_starts + answers.starts, row_starts + answers.ends
    return AnswerPositions.build(ids.flatten(), *bounds, num_drafts)


def compute_row_states(
    draft: BlockDraft, embedding: Tensor, answers: ReplayBatch, anchors: Tensor, positions_per_batch: int
) -> Tensor:
    """Return the drafting states [L, D, H] of the blocks at anchors [L], ascending indices into the flattened rows.

    Each row is a pack of its own, so that no anchor is compared with the context of other rows.
    """
    c, ids, features = draft.config, answers.ids, answers.features
    num_rows, length = ids.shape
    bounds = torch.arange(num_rows + 1, device=ids.device) * length
    offsets = torch.searchsorted(anchors, bounds).tolist()
    positions = torch.arange(length, device=ids.device)
    parts = [features.new_zeros(0, c.num_drafts, c.hidden_size)]
    for row, (i, j) in enumerate(pairwise(offsets)):
        if i < j:
            row_anchors = anchors[i:j] - row * length
            size = int(row_anchors[-1]) + 1  # tokens up to the last anchor
            chunk = min(positions_per_batch, _count_anchors_per_batch(draft, size, ids.device))
            documents = torch.zeros_like(positions[:size])
            pack = ReplayPack(ids[row, :size], features[row, :size], positions[:size], documents)
            parts.append(compute_anchor_states(draft, embedding, pack, row_anchors, chunk))
    return torch.cat(parts)


def _count_anchors_per_batch(draft: BlockDraft, num_tokens: int, device: torch.device) -> int:
    """Return how many anchors, each attending to a context of `num_tokens`, keep the attention logits of a layer within
    MAX_INTERMEDIATE_ELEMENTS: R blocks of B slots have R B (S + R B) logits a head.
    """
    c = draft.config
    per_head = MAX_INTERMEDIATE_ELEMENTS[device.type] // c.num_attention_heads
    rows = (math.sqrt(num_tokens**2 + 4 * per_head) - num_tokens) / 2  # R B
    return max(1, int(rows) // c.block_size)
