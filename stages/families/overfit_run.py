"""The interface of check_overfit to a family of drafts: how a draft learns a row, and how far its chains get along it.

Letters: T tokens of a row, H hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stages.families.draft_files import LoadedDraft
from stages.hidden_states.format import HiddenStatesRow
from stages.trees import accept_length


class OverfitRun(ABC):
    """A fresh draft that is trained on one row, which it must overfit; its weights change."""

    num_steps: int  # drafts of a chain
    learns_own_tokens = False  # the row's own; else what the target is most likely to answer
    vocabulary: Tensor | None = None  # [V] bool, the tokens that the draft can write; None: all

    def __init__(self, loaded: LoadedDraft, device: str):
        self.loaded, self.device = loaded, device
        self.draft: Any = loaded.module.to(device)

    @torch.no_grad()
    def compute_perfect_tau(self, row: HiddenStatesRow, head: Tensor) -> float:
        """Return tau of a draft that has learned all its labels, along the row's answer; head [V, H] is the target's.

        At temperature 0 every token is the target's argmax; a sampled answer has other tokens, which no draft can predict, nor
        those outside of its vocabulary.
        """
        following = row.ids[row.prompt_length + 1 :].long().cpu()  # [T]
        matches = torch.ones_like(following, dtype=torch.bool)
        if not self.learns_own_tokens:
            last = row.last[row.prompt_length : -1].to(head.device, head.dtype)
            matches = (last @ head.T).argmax(-1).cpu() == following
            if self.vocabulary is not None:
                matches &= self.vocabulary.cpu()[following]
        windows = nn.functional.pad(matches, (0, self.num_steps)).unfold(0, self.num_steps, 1)  # [T + 1, steps]
        return accept_length.compute_chain_tau(windows[:-1].int().cumprod(1).sum(1).tolist())

    def compute_coverage(self, row: HiddenStatesRow) -> float:
        """Return the share of the answer's tokens that the draft's vocabulary has."""
        answer = row.ids[row.prompt_length :].long().cpu()
        return 1.0 if self.vocabulary is None else float(self.vocabulary.cpu()[answer].float().mean())

    def compute_trainer_tau(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> float:
        """Return tau of chains over the row's answer by the trainer's own forward."""
        return accept_length.compute_chain_tau(self.count_accepted(row, embedding, head))

    @abstractmethod
    def generate_losses(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Iterator[Tensor]:
        """Yield the loss of each step without end, one backward pass after the other."""

    @abstractmethod
    def count_accepted(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Sequence[int]:
        """Return the accepted drafts of a chain from each position of the answer, in order, by the trainer's forward."""

    def build_engine_draft(self) -> LoadedDraft:
        """Return the draft as a benchmark loads it, on the CPU in float32."""
        module = type(self.draft)(self.draft.config)
        module.load_state_dict(self.draft.state_dict())
        return replace(self.loaded, module=module)
