"""Static trees: the same branches in every cycle, chosen once from how often each guess was right.

Medusa (https://arxiv.org/abs/2401.10774, section 2.3.3) and EAGLE (https://arxiv.org/abs/2401.15077) decode with such trees.
A branch is a path of ranks: (0, 2) is the third likeliest token after the likeliest one. It is right as often as all
its guesses are, and `accuracy[d][r]` says how often rank r at depth d + 1 is, so a tree of the branches with the greatest
products has, were depths independent, the greatest expected accept length.

    accuracy [[.6, .2], [.5, .1]], four nodes:     (0,) .6    (0, 0) .30    (1,) .2    (1, 0) .10

Letters: M nodes, the root counted; S depth; K ranks.
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
    """The `count` branches with the greatest products, or all where there are fewer; by depth, then rank.

    A branch's product is at most its parent's, and those that tie come shallow first: so none comes without its parent.
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
    """The n branches of one depth; Q of them go on."""

    above: Tensor  # [n] which of the branches that went on, one depth above, each continues
    rank: Tensor  # [n]
    inner: Tensor  # [Q] which go on


@dataclass(frozen=True)
class StaticTree:
    """Branches as what a cycle needs; node 0 is the root, the others are in the order of `paths`."""

    paths: list[RankPath]
    ranks: Tensor  # [M-1] of each drafted node among its siblings-to-be
    parents: Tensor  # [1, M]
    sees: Tensor  # [1, M, M]
    depths: Tensor  # [1, M]
    levels: list[TreeLevel]

    @classmethod
    def of(cls, paths: list[RankPath], device: torch.device) -> "StaticTree":
        """`paths` as `select_best_branches` gives them."""
        number = {(): 0} | {path: place for place, path in enumerate(paths, 1)}
        parents = torch.tensor([[0, *(number[path[:-1]] for path in paths)]], device=device)
        sees = trees.build_ancestor_mask(parents)
        ranks = torch.tensor([path[-1] for path in paths], device=device)
        return cls(paths, ranks, parents, sees, sees.sum(-1) - 1, _build_levels(paths, device))

    @property
    def steps(self) -> int:
        return max(map(len, self.paths))

    @property
    def nodes(self) -> int:
        return len(self.paths) + 1

    @property
    def widest(self) -> int:
        """How many guesses are asked for at most."""
        return max(path[-1] for path in self.paths) + 1

    def tree(self, tokens: Tensor) -> trees.DraftTree:
        """With tokens [M-1]."""
        nodes = torch.arange(len(tokens), device=tokens.device)[None]
        return trees.DraftTree(nodes, tokens[None], self.parents, self.sees, self.depths)


def _build_levels(paths: list[RankPath], device: torch.device) -> list[TreeLevel]:
    levels: list[TreeLevel] = []
    above: dict[RankPath, int] = {(): 0}
    for depth in range(1, max(map(len, paths)) + 1):
        here = [path for path in paths if len(path) == depth]
        going_on = {path[:-1] for path in paths if len(path) == depth + 1}
        inner = [slot for slot, path in enumerate(here) if path in going_on]
        columns = [above[path[:-1]] for path in here], [path[-1] for path in here], inner
        levels.append(TreeLevel(*(torch.tensor(column, dtype=torch.int64, device=device) for column in columns)))
        above = {here[slot]: number for number, slot in enumerate(inner)}
    return levels
