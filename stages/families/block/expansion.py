"""Expansion of a block: the candidates of a tree from the logits of a block's slots, without a further draft forward.

The slots of dflash are independent given the context, so a path's probability is the product of its slots'; with a Markov head
or a candidate selector a node's children have the slot's logits after the node's own token. Replay expands many positions at
once, the engine one block of each prompt.

Letters: N positions, H hidden, S num_steps, K topk, M num_draft_tokens, C candidates, V vocabulary.
"""

import torch
from torch import Tensor

from stages.families.block.model import BlockDraft, compute_logits
from stages.params.tree_shape import SGLANG_SCORING
from stages.trees import draft_tree
from stages.trees.draft_tree import Candidates
from stages.trees.expansion import count_logit_rows


def expand_block(
    draft: BlockDraft,
    head: Tensor,  # [V, H] the target's
    states: Tensor,  # [N, S, H] of the first S slots that draft
    anchor_tokens: Tensor,  # [N]
    topk: int,
    tree_scoring: str = SGLANG_SCORING,
) -> Candidates:
    """Return the candidates [N, C] of S levels: a node of a level's beam of K is followed by the K best tokens of the next slot.

    A tree of M - 1 nodes selected from them (`draft_tree`) is the best-first tree over all paths of K successors each, as long
    as M - 1 <= 2 K + 1; with more nodes, one that is not among its level's best K has no children, as in EAGLE's trees.
    """
    scoring = draft_tree.TREE_SCORINGS[tree_scoring]

    def score(slot: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and ids [N, M, K] of the successors of tokens [N, M]; independent slots are scored once for all M.

        Logits, as wide as the vocabulary, are of some positions at a time; all else is of all, in few kernels.
        """
        rows = 1 + (tokens.shape[1] if draft.is_conditional else 1)  # of logits, for each position
        size = max(1, count_logit_rows(len(head), states.device) // rows)
        parts = []
        for state, previous in zip(states[:, slot, None].split(size), tokens.split(size), strict=True):
            shortlist = draft.build_shortlist(compute_logits(state, head))
            logits = draft.condition_shortlist(shortlist, state, previous)  # [n, M or 1, V]
            best, indices = draft_tree.select_topk(scoring.score_logits(logits.float()), topk)
            shape = -1, tokens.shape[1], -1
            parts.append((best.expand(shape), shortlist.get_tokens(indices).expand(shape)))
        best, ids = (torch.cat(column) for column in zip(*parts, strict=True))
        return best, ids

    scores, ids = (x[:, 0] for x in score(0, anchor_tokens[:, None]))  # [N, K]
    beam, tokens, numbers = scores, ids, torch.arange(topk, device=ids.device).expand_as(ids)
    records = [(scores, ids, torch.full_like(ids, -1))]
    for step in range(1, states.shape[1]):
        own_scores, successors = score(step, tokens)  # [N, K, K]
        successors = successors.flatten(1)
        scores, beam, chosen = draft_tree.extend_beam(beam, own_scores, scoring.combine_scores)
        records.append((scores, successors, numbers.repeat_interleave(topk, dim=1)))
        tokens = torch.gather(successors, 1, chosen)
        numbers = chosen + draft_tree.get_step_range(step, topk)[0]
    return Candidates(*(torch.cat(parts, 1) for parts in zip(*records, strict=True)))
