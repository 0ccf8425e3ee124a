"""Medusa's trees: the heads are independent of each other, so the tree is static and all its tokens are guessed at once.

Verification is the engine's lossless one; the paper's typical acceptance is not implemented.

Letters: K heads, H hidden, D draft vocabulary, M num_draft_tokens.
"""

import torch
from torch import Tensor

from stages.engine.decode_state import CacheSlots, DecodeState, PrefillOutput, VerifyOutput
from stages.engine.proposer import DraftingMethod, Proposer
from stages.methods.medusa import MedusaDraft
from stages.methods.static_tree import StaticTree
from stages.trees import draft_tree as trees


class MedusaMethod(DraftingMethod):
    """Trained Medusa heads and a static tree.

    Raises ValueError where heads, tree and target do not fit each other.
    """

    def __init__(self, medusa: MedusaDraft, tree: StaticTree, hidden_size: int, vocab_size: int):
        c = medusa.config
        if (c["vocab_size"], c["hidden_size"]) != (vocab_size, hidden_size):
            raise ValueError(
                f"these Medusa heads are for a target of {c['vocab_size']} tokens and width {c['hidden_size']}; this target has "
                f"{vocab_size} and {hidden_size}; train heads for it"
            )
        if tree.num_steps > c["heads"]:
            raise ValueError(
                f"the tree is {tree.num_steps} deep, expected at most {c['heads']}: a Medusa head guesses one depth; lower the "
                "depth, or train more heads (train_draft.checkpoints)"
            )
        self.medusa, self.tree = medusa, tree
        self.num_steps, self.num_draft_tokens = tree.num_steps, tree.num_draft_tokens
        self.weight_bytes = sum(x.nbytes for x in medusa.state_dict().values())
        self.num_parameters = sum(x.numel() for x in medusa.parameters())

    def build_proposer(self, capacity: int) -> "MedusaProposer":
        return MedusaProposer(self)


class MedusaProposer(Proposer):
    """Proposes from the hidden state of the last verified token."""

    def __init__(self, method: MedusaMethod):
        weight = method.medusa.outs[0].weight
        self.method, self.hidden = method, weight.new_zeros(1, weight.shape[1])
        self.graph_tensors = [self.hidden]

    def start(self, slot: CacheSlots, prompt: list[int], prefill: PrefillOutput, state: DecodeState) -> None:
        self.hidden.copy_(prefill.hidden[-1:])

    def propose(self, slots: CacheSlots, state: DecodeState, visible_length: int) -> tuple[trees.DraftTree, Tensor]:
        medusa, static = self.method.medusa, self.method.tree
        ranked = trees.select_topk(medusa.logits(self.hidden).float(), static.num_ranks)[1]  # [K, num_ranks]
        tokens = medusa.to_target(ranked[static.depths[0, 1:] - 1, static.ranks])  # [M-1]
        roots = state.next_tokens.gather(1, state.num_verified - 1)  # [1, 1]
        return static.with_tokens(tokens), torch.cat([roots, tokens[None]], dim=1)

    def update(self, state: DecodeState, output: VerifyOutput) -> None:
        last = output.path.gather(1, state.num_verified - 1)  # [1, 1]
        self.hidden.copy_(output.hidden[0, last[0]])

    def count_state_bytes(self, slots: CacheSlots) -> int:
        return self.hidden.nbytes
