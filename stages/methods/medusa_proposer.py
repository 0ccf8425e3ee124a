"""Medusa's trees: heads know nothing of each other, so a tree is a static one, and all of it is guessed at once.

Verification is the engine's, without loss; the paper's typical acceptance is not here.

Letters: K heads, H hidden, D draft vocabulary, M nodes.
"""

import torch
from torch import Tensor

from stages.engine.decode import DecodeState, PrefillOutput, VerifyOutput
from stages.methods.medusa import MedusaDraft
from stages.methods.static_tree import StaticTree
from stages.trees import draft_tree as trees


class MedusaMethod:
    """A Method: a trained Medusa's heads and a static tree. Raises ValueError where they can't belong together."""

    def __init__(self, medusa: MedusaDraft, tree: StaticTree, hidden_size: int, vocab_size: int):
        c = medusa.config
        if (c["vocab_size"], c["hidden_size"]) != (vocab_size, hidden_size):
            raise ValueError(
                f"these Medusa heads are for a target of {c['vocab_size']} tokens and width {c['hidden_size']}; this target has "
                f"{vocab_size} and {hidden_size}; train heads for it"
            )
        if tree.steps > c["heads"]:
            raise ValueError(
                f"the tree is {tree.steps} deep, expected at most {c['heads']}: a Medusa head guesses one depth; lower the "
                "depth, or train more heads (train_draft.checkpoints)"
            )
        self.medusa, self.tree, self.steps, self.nodes = medusa, tree, tree.steps, tree.nodes
        self.weights = sum(x.nbytes for x in medusa.state_dict().values())
        self.parameters = sum(x.numel() for x in medusa.parameters())

    def proposer(self, size: int) -> "MedusaProposer":
        return MedusaProposer(self)


class MedusaProposer:
    """Proposes from the hidden state of the last token that was verified."""

    def __init__(self, method: MedusaMethod):
        weight = method.medusa.outs[0].weight
        self.method, self.hidden = method, weight.new_zeros(1, weight.shape[1])
        self.held = [self.hidden]

    def begin(self, prompt: list[int], begun: PrefillOutput, stand: DecodeState) -> None:
        self.hidden.copy_(begun.hidden[-1:])

    def prepare(self, stand: DecodeState) -> None:
        """Nothing is looked up."""

    def propose(self, stand: DecodeState, seen: int) -> tuple[trees.DraftTree, Tensor]:
        medusa, static = self.method.medusa, self.method.tree
        ranked = trees.select_topk(medusa.logits(self.hidden).float(), static.widest)[1]  # [K, widest]
        tokens = medusa.to_target(ranked[static.depths[0, 1:] - 1, static.ranks])  # [M-1]
        return static.tree(tokens), torch.cat([stand.tokens[stand.count - 1], tokens])

    def learn(self, stand: DecodeState, verdict: VerifyOutput) -> None:
        self.hidden.copy_(verdict.hidden[verdict.path[stand.count - 1]])

    @property
    def nbytes(self) -> int:
        return self.hidden.nbytes
