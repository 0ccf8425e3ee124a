"""Static trees: the same branches in every cycle, chosen once by the measured accuracy of each guess.

Medusa (https://arxiv.org/abs/2401.10774, section 2.3.3) and EAGLE (https://arxiv.org/abs/2401.15077) decode with such trees.
A branch is a path of ranks: (0, 2) is the third likeliest token after the likeliest one. `accuracy[d][r]` is the frequency
with which rank r at depth d + 1 is right. If depths were independent, the tree of the branches with the greatest products
would have the greatest expected accept length.

    accuracy [[.6, .2], [.5, .1]], four nodes:     (0,) .6    (0, 0) .30    (1,) .2    (1, 0) .10

Letters: M num_draft_tokens (the root counted); S depth; K ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stages.trees import draft_tree as trees

RankPath = tuple[int, ...]


def select_best_branches(accuracy: Sequence[Sequence[float]], count: int) -> list[RankPath]:
    """Return the `count` branches with the greatest products, at most all, ordered by depth, then rank.

    A branch's product is at most its parent's, and ties are broken by depth, so each branch comes with its parent.
    """
    found: list[RankPath] = []
    open_: list[tuple[float, int, RankPath]] = []

    def offer(path: RankPath, product: float) -> None:
        if len(path) < len(accuracy):
            for rank, share in enumerate(accuracy[len(path)]):
                heapq.heappush(open_, (-product * share, len(path) + 1, (*path, rank)))

    offer((), 1.0)
    while open_ and len(found) < count:
        product, _, path = heapq.heappop(open_)
        found.append(path)
        offer(path, -product)
    return sorted(found, key=lambda path: (len(path), path))


class TreeLevel(NamedTuple):
    """The n branches of one depth; Q of them continue."""

    parent: Tensor  # [n] index of each branch's parent among the branches that continue, one depth above
    rank: Tensor  # [n]
    continues: Tensor  # [Q] indices of the branches that continue


@dataclass(frozen=True)
class StaticTree:
    """Branches as the tensors of a cycle; node 0 is the root, the others are in the order of `paths`."""

    paths: list[RankPath]
    ranks: Tensor  # [M-1] of each drafted node among its siblings
    parents: Tensor  # [1, M]
    ancestor_mask: Tensor  # [1, M, M]
    depths: Tensor  # [1, M]
    levels: list[TreeLevel]

    @classmethod
    def from_paths(cls, paths: list[RankPath], device: torch.device) -> "StaticTree":
        """Return the tree of paths in the order of `select_best_branches`."""
        number = {(): 0} | {path: index for index, path in enumerate(paths, 1)}
        parents = torch.tensor([[0, *(number[path[:-1]] for path in paths)]], device=device)
        mask = trees.build_ancestor_mask(parents)
        ranks = torch.tensor([path[-1] for path in paths], device=device)
        return cls(paths, ranks, parents, mask, mask.sum(-1) - 1, _build_levels(paths, device))

    @property
    def num_steps(self) -> int:
        return max(map(len, self.paths))

    @property
    def num_draft_tokens(self) -> int:
        return len(self.paths) + 1

    @property
    def num_ranks(self) -> int:
        """Return how many guesses a step needs at most."""
        return max(path[-1] for path in self.paths) + 1

    def with_tokens(self, tokens: Tensor) -> trees.DraftTree:
        """Return the tree with tokens [M-1]."""
        nodes = torch.arange(len(tokens), device=tokens.device)[None]
        return trees.DraftTree(nodes, tokens[None], self.parents, self.ancestor_mask, self.depths)


def _build_levels(paths: list[RankPath], device: torch.device) -> list[TreeLevel]:
    levels: list[TreeLevel] = []
    above: dict[RankPath, int] = {(): 0}
    for depth in range(1, max(map(len, paths)) + 1):
        here = [path for path in paths if len(path) == depth]
        with_children = {path[:-1] for path in paths if len(path) == depth + 1}
        continues = [index for index, path in enumerate(here) if path in with_children]
        columns = [above[path[:-1]] for path in here], [path[-1] for path in here], continues
        levels.append(TreeLevel(*(torch.tensor(column, dtype=torch.int64, device=device) for column in columns)))
        above = {here[index]: number for number, index in enumerate(continues)}
    return levels
