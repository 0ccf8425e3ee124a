"""The interface of train_draft to a family of drafts."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from stages.families.draft_files import LoadedDraft
from stages.hidden_states.reader import HiddenStatesReader
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.params.families import DraftFamily, Segment
from stages.target.manifest import TargetManifest
from stages.training.packed_rows import PackObjective
from stages.training.trainer import ComputeLoss, Trainer


class DraftTraining(ABC):
    """How a family's drafts begin, and what they learn."""

    tables: tuple[str, ...] = ()  # parts of the names of matrices with a row for each token, which AdamW trains

    def __init__(self, facts: DraftFamily):
        self.facts = facts

    def initialise(self, name: str, params: schema.Params, target: TargetManifest, head: Tensor) -> LoadedDraft:
        """Return the untrained draft of the segment `name`, with the sizes of e000; `head` [V, H] is the target's.

        Raises ValueError where it can't be built.
        """
        raise AssertionError(f"a draft of {self.facts.title} starts from e000 itself")

    def freeze(  # noqa: B027 - most families train all that they have
        self, draft: LoadedDraft, head: Tensor, train_head: bool | None, logits_scale: float
    ) -> None:
        """Ask for no gradient of weights that are not trained; head [V, H] is the target's.

        Raises ValueError where the draft's own head is not the target's and train_head is False.
        """

    def is_table(self, name: str) -> bool:
        return any(part in name for part in self.tables)

    @abstractmethod
    def build_objective(
        self, draft: LoadedDraft, segment: Segment, settings: TrainDraft, logits_scale: float
    ) -> tuple[PackObjective, ComputeLoss]:
        """Return what is learned, and the function that computes its loss."""

    def complete_config(
        self, draft: LoadedDraft, weights: dict[str, Tensor], trainer: Trainer, rows: HiddenStatesReader
    ) -> dict[str, Any]:
        """Return the config.json of a trained draft: what is measured with its weights on training rows goes there."""
        return draft.config
