"""The interface of check_overfit to a family of drafts: how a draft learns a row, and how far its chains get along it.

Letters: T tokens of a row, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from stages.draft.eagle3 import Eagle3Draft
from stages.engine import forced_decode
from stages.hidden_states.format import HiddenStatesRow
from stages.params.draft_sections import TrainDraft
from stages.training import ttt
from stages.trees import accept_length


class OverfitRun(ABC):
    """A fresh draft that is trained on one row, which it must overfit; its weights change."""

    draft: nn.Module
    feature_layers: list[int]  # of the target, that the draft reads
    num_steps: int  # drafts of a chain
    learns_own_tokens = False  # the row's own; else what the target is most likely to answer
    vocabulary: Tensor | None = None  # [V] bool, the tokens that the draft can write; None: all

    def compute_perfect_tau(self, row: HiddenStatesRow, head: Tensor) -> float:
        """Return tau of a draft that has learned all its labels, along the row's answer; head [V, H] is the target's."""
        answer = slice(row.prompt_length, None)
        if self.learns_own_tokens:
            return forced_decode.compute_chain_tau([True] * (len(row.ids[answer]) - 1), self.num_steps)
        last = row.last[answer].to(head.device, head.dtype)
        return forced_decode.compute_perfect_tau(row.ids[answer], last, head, self.num_steps, self.vocabulary)

    def compute_coverage(self, row: HiddenStatesRow) -> float:
        """Return the share of the answer's tokens that the draft's vocabulary has."""
        answer = row.ids[row.prompt_length :].long().cpu()
        return 1.0 if self.vocabulary is None else float(self.vocabulary.cpu()[answer].float().mean())

    def compute_trainer_tau(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> float:
        """Return tau of chains over the row's answer by the trainer's own forward."""
        accepted = self.count_accepted(row, embedding, head)
        position, total, cycles = 0, 0, 0
        while position < len(accepted):
            total, cycles, position = total + accepted[position], cycles + 1, position + accepted[position] + 1
        return accept_length.compute_tau(np.array([total]), np.array([cycles]))

    @abstractmethod
    def generate_losses(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Iterator[Tensor]:
        """Yield the loss of each step without end, one backward pass after the other."""

    @abstractmethod
    def count_accepted(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Sequence[int]:
        """Return the accepted drafts of a chain from each position of the answer, in order, by the trainer's forward."""

    @abstractmethod
    def build_engine_draft(self) -> nn.Module:
        """Return the draft as a benchmark loads it, on the CPU in float32."""


class Eagle3Overfit(OverfitRun):
    """A copy of the checkpoint with this config.json and these tensors."""

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        feature_layers: list[int],
        settings: TrainDraft,
        device: str,
        logits_scale: float,
    ):
        self.draft: Eagle3Draft = Eagle3Draft.from_checkpoint(config, tensors).to(device)
        self.config, self.feature_layers, self.num_steps = config, feature_layers, settings.ttt_steps
        self.vocabulary = tensors["t2d"].bool()
        weights = settings.ttt_decay, settings.mask, settings.loss
        self.objective = ttt.TrainingObjective(settings.ttt_steps, *weights, logits_scale=logits_scale)
        self.device = device

    def generate_losses(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Iterator[Tensor]:
        pack = ttt.TrainingPack.from_rows([row], self.num_steps, self.objective.loss_mask).to(self.device)
        while True:
            yield ttt.compute_loss(self.draft, pack, embedding, head, self.objective).total_loss

    def count_accepted(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Sequence[int]:
        """Count argmax matches with the target, at the positions that serving drafts from.

        Gradients are on, though none is computed: without them a GPU would compile every function once more.
        """
        pack = ttt.TrainingPack.from_rows([row], self.num_steps, "aligned").to(self.device)
        result = ttt.compute_loss(self.draft, pack, embedding, head, ttt.TrainingObjective(self.num_steps))
        return ttt.count_chain_accepted(result, pack).tolist()

    def build_engine_draft(self) -> Eagle3Draft:
        return Eagle3Draft.from_checkpoint(self.config, self.draft.state_dict())
