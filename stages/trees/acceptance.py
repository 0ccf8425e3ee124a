"""Acceptance: the path of a tree that the target's own tokens follow.

Letters: N trees, M nodes, S num_steps.
"""

import torch
from torch import Tensor

from stages.trees.draft_tree import DraftTree


def find_accepted_path(tree: DraftTree, target_tokens: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Return the path [N, S+1] of node indices that each target accepts, root first, and its length [N], at least 1.

    target_tokens [N, M]: the target's token after each node. A node is accepted if its token is the target's token after its
    parent, and its ancestors are accepted. Siblings carry different tokens, so the accepted nodes are a chain. Entries after
    the path's last node are 0.
    """
    n, m = target_tokens.shape
    rejected = tree.tokens != torch.gather(target_tokens, 1, tree.parents[:, 1:])  # [N, M-1]
    accepted = ~(tree.ancestor_mask[:, :, 1:] & rejected[:, None]).any(-1)  # [N, M]
    column = torch.where(
        accepted, tree.depths, num_steps + 1
    )  # [N, M]; the last column collects the others and is cut off
    path = column.new_zeros(n, num_steps + 2).scatter_(1, column, torch.arange(m, device=column.device).expand(n, m))
    return path[:, : num_steps + 1], accepted.sum(-1)
