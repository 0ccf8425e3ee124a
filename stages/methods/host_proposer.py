"""Methods that look their guesses up on the host: prompt lookup and lookahead need no draft, but lists and dictionaries.

Before each cycle the host learns what the last one committed, and writes a tree of guesses where the device reads it: so
the pass over it may be recorded, while the cycle waits for one copy each way.

Letters: M nodes, the root counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.engine.decode import DecodeState, PrefillOutput, VerifyOutput
from stages.trees import draft_tree as trees

UNMATCHABLE_TOKEN = -1  # a node's token for acceptance, where no choice shall ever lead there


@dataclass
class GuessTree:
    """M - 1 nodes below the root, on the host; whatever is not set is seen by nobody and accepted never."""

    tokens: list[int]  # what the target reads
    wanted: list[int]  # what it must have chosen for the node to be accepted, or NOBODY
    parents: list[int]  # node indices, the root's 0
    depths: list[int]
    sees: Tensor  # [M, M] bool

    @classmethod
    def none(cls, nodes: int) -> "GuessTree":
        sees = torch.eye(nodes, dtype=torch.bool)
        sees[:, 0] = True
        rest = nodes - 1
        return cls([0] * rest, [UNMATCHABLE_TOKEN] * rest, [0] * rest, [1] * rest, sees)

    def put(self, node: int, parent: int, token: int) -> None:
        """A guess at `node`, below `parent`, which has been put before."""
        self.tokens[node - 1] = self.wanted[node - 1] = token
        self.parents[node - 1] = parent
        self.depths[node - 1] = (self.depths[parent - 1] if parent else 0) + 1
        self.sees[node] |= self.sees[parent]


class HostProposer:
    """A Proposer whose guesses come from `guess`."""

    def __init__(self, nodes: int, device: torch.device):
        whole = {"dtype": torch.int64, "device": device}
        self.held: list[Tensor] = []  # no pass changes what another reads
        self.context: list[int] = []  # prompt and answer
        self.ids = torch.zeros(nodes - 1, **whole)
        self.choices = torch.zeros(nodes, **whole)  # of the last cycle
        self.tree = trees.DraftTree(
            torch.arange(nodes - 1, device=device)[None],
            torch.full((1, nodes - 1), UNMATCHABLE_TOKEN, **whole),
            torch.zeros(1, nodes, **whole),
            torch.zeros(1, nodes, nodes, dtype=torch.bool, device=device),
            torch.zeros(1, nodes, **whole),
        )

    def begin(self, prompt: list[int], begun: PrefillOutput, stand: DecodeState) -> None:
        self.context = list(prompt)

    def prepare(self, stand: DecodeState) -> None:
        count, *tokens = torch.cat([stand.count, stand.tokens]).tolist()
        self.context += tokens[:count]
        found = self.guess(tokens[:count])
        self.ids.copy_(torch.tensor(found.tokens))
        self.tree.tokens[0].copy_(torch.tensor(found.wanted))
        self.tree.parents[0, 1:].copy_(torch.tensor(found.parents))
        self.tree.depths[0, 1:].copy_(torch.tensor(found.depths))
        self.tree.ancestor_mask[0].copy_(found.sees)

    def guess(self, new: list[int]) -> GuessTree:
        """What may follow `context`, whose last tokens are `new`."""
        raise NotImplementedError

    def propose(self, stand: DecodeState, seen: int) -> tuple[trees.DraftTree, Tensor]:
        return self.tree, torch.cat([stand.tokens[stand.count - 1], self.ids])

    def learn(self, stand: DecodeState, verdict: VerifyOutput) -> None:
        self.choices.copy_(verdict.choices)

    @property
    def nbytes(self) -> int:
        """Of the device's memory, and of the host's eight for each token that is kept."""
        tensors = [self.ids, self.choices, *vars(self.tree).values()]
        return sum(t.nbytes for t in tensors) + 8 * len(self.context)
