"""Accept length of the torch engine along a given answer (teacher-forced decoding), for check_overfit.

A training row may be sampled above temperature 0, or written by another model. Left alone, the engine would decode another
answer, for which an overfitted draft was not trained; so each token of the target is replaced by that of the row. All else is
what a benchmark runs: prefill, captured features, the draft's cache, expansion, verification, cache compaction.

Dimensions: T tokens of an answer, H hidden, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.engine.decode import Engine
from stages.engine.proposer import Drafter
from stages.engine.sampling import TokenSampler
from stages.params.tree_shape import TreeShape
from stages.target.multimodal import ImagePatches
from stages.trees import accept_length


class ForcedDecodingEngine(Engine):
    """An engine whose target always outputs the given answer."""

    def __init__(self, model: PreTrainedModel, drafter: Drafter, answer: Sequence[int]):
        super().__init__(model, [], drafter)
        self.answer = torch.tensor(answer, device=self.device)

    def _sample(self, sampler: TokenSampler, hidden: Tensor, indices: Tensor) -> Tensor:
        return self.answer[indices.clamp(max=len(self.answer) - 1)]


def measure_chain_tau(
    engine: ForcedDecodingEngine, prompt: list[int], num_steps: int, images: ImagePatches | None = None
) -> float:
    """Return tau of chains of `num_steps` drafts along the answer. Raises ValueError where it exceeds the engine's capacity."""
    cycles = [*engine.decode_speculative(prompt, len(engine.answer), TreeShape(num_steps, 1, num_steps + 1), images)][
        1:
    ]
    return accept_length.compute_tau(np.array([step.num_accepted for step in cycles]), np.ones(len(cycles)))


@torch.no_grad()
def compute_perfect_tau(
    answer: Tensor, last: Tensor, head: Tensor, num_steps: int, known: Tensor | None = None
) -> float:
    """Return tau of a draft that always predicts the target's argmax, along an answer [T].

    last [T, H] is the target's last hidden state at each token, head [V, H]. At temperature 0 every token is the argmax;
    a sampled answer has other tokens, which no draft can predict, nor those outside of its vocabulary `known` [V].
    """
    argmax, answer = (last[:-1] @ head.T).argmax(-1).cpu(), answer.cpu().long()
    matches = argmax == answer[1:]
    if known is not None:
        matches &= known.cpu()[answer[1:]]
    return compute_chain_tau(matches.tolist(), num_steps)


def compute_chain_tau(matches: Sequence[bool], num_steps: int) -> float:
    """Return tau of chains of `num_steps` drafts, where the draft does or doesn't match an answer's second token, third, ..."""
    bonus, accepted, cycles = 0, 0, 0
    while bonus < len(matches):
        chain = matches[bonus : bonus + num_steps]
        num_accepted = chain.index(False) if False in chain else len(chain)
        bonus, accepted, cycles = bonus + num_accepted + 1, accepted + num_accepted, cycles + 1
    return accept_length.compute_tau(np.array(accepted), np.array(cycles))
