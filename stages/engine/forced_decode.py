"""Accept length of the torch engine along a given answer (teacher-forced decoding), for check_overfit.

A training row may be sampled above temperature 0, or written by another model. Left alone, the engine would decode another
answer, for which an overfitted draft was not trained; so each token of the target is replaced by that of the row. All else is
what a benchmark runs: prefill, captured features, the draft's cache, expansion, verification, cache compaction.

Dimensions: H hidden.
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
