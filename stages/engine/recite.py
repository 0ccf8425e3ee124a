"""How long the chains are that the torch engine accepts along a given answer.

A training row may be drawn above temperature 0, or be other words than the target's; the engine alone would soon decode
another answer, which a draft that knows this row by heart does not know. So each of the target's choices is given. All else
is what a benchmark runs: prefill, the features that it captures, the draft's cache, expansion, verification, moving.

Letters: T tokens of an answer, M nodes, H hidden, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.draft.eagle3 import Eagle3Draft
from stages.engine.decode import Engine
from stages.engine.sampling import TokenSampler
from stages.target.multimodal import ImagePatchesProtocol
from stages.trees import acceptance


class ReciteEngine(Engine):
    """An engine whose target says a given answer. Raises ValueError as `Engine`."""

    def __init__(self, model: PreTrainedModel, feature_layers: list[int], draft: Eagle3Draft, answer: Sequence[int]):
        super().__init__(model, [], feature_layers, draft)
        self.answer = torch.tensor(answer, device=self.device)

    def _sample(self, sampler: TokenSampler, hidden: Tensor, indices: Tensor) -> Tensor:
        return self.answer[indices.clamp(max=len(self.answer) - 1)]


def chain_tau(
    engine: ReciteEngine, prompt: list[int], num_steps: int, pictures: ImagePatchesProtocol | None = None
) -> float:
    """Return the accept length of chains of `num_steps` drafts along the answer. Raises ValueError where it doesn't fit."""
    cycles = [*engine.decode_speculative(prompt, len(engine.answer), num_steps, 1, num_steps + 1, pictures)][1:]
    return acceptance.compute_tau(np.array([step.num_accepted for step in cycles]), np.ones(len(cycles)))


@torch.no_grad()
def perfect_tau(answer: Tensor, last: Tensor, head: Tensor, num_steps: int) -> float:
    """Return the accept length of a draft that always guesses the target's likeliest token, along an answer [T].

    last [T, H]: the target's last hidden state at each of its tokens; head [V, H]. An answer at temperature 0 has the
    likeliest token everywhere, one that was drawn has others here and there, which nobody can guess.
    """
    likeliest = (last[:-1] @ head.T).argmax(-1)
    guessed = (likeliest.cpu() == answer[1:].cpu()).tolist()  # of the answer's second token, its third, ...
    bonus, accepted, cycles = 0, 0, 0
    while bonus < len(guessed):
        chain = guessed[bonus : bonus + num_steps]
        taken = chain.index(False) if False in chain else len(chain)
        bonus, accepted, cycles = bonus + taken + 1, accepted + taken, cycles + 1
    return acceptance.compute_tau(np.array(accepted), np.array(cycles))
