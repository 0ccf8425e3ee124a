"""The interface of check_overfit to a family of drafts: how a draft learns a row, and how far its chains get along it.

Letters: T tokens of a row, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from stages.engine import forced_decode
from stages.families.family import get_part
from stages.hidden_states.format import HiddenStatesRow
from stages.params import schema
from stages.params.families import EAGLE3
from stages.params.section import ROOT_CHECKPOINT
from stages.target.manifest import TargetManifest
from stages.trees import accept_length


class OverfitRun(ABC):
    """A fresh draft that is trained on one row, which it must overfit; its weights change."""

    draft: nn.Module
    feature_layers: list[int]  # of the target, that the draft reads
    num_steps: int  # drafts of a chain
    is_compiled = False  # on a GPU; so few steps end before
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
    def build_engine_draft(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the draft as a benchmark loads it, on the CPU in float32, and its config.json."""


def build_overfit(name: str, params: schema.Params, target: TargetManifest, device: str) -> OverfitRun:
    """Return a copy of e000, or the untrained draft of the segment `name`. Raises ValueError where it can't be built."""
    facts = EAGLE3 if name == ROOT_CHECKPOINT else params.train_draft.checkpoints[name].family
    return cast(OverfitRun, get_part(facts, "overfit", "build_overfit")(name, params, target, device))
