"""The overfit gate of EAGLE-3's draft: a copy of e000, by the training-time test."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft
from stages.hidden_states.format import HiddenStatesRow
from stages.overfit.overfit_run import OverfitRun
from stages.params.draft_sections import TrainDraft
from stages.training import ttt


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
