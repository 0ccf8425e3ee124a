"""EAGLE-3 in check_overfit: a copy of e000 that learns one row.

Letters: V vocabulary, H hidden.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stages.draft.eagle3 import Eagle3Draft
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.overfit_run import OverfitRun
from stages.hidden_states.format import HiddenStatesRow
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.target.manifest import TargetManifest
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

    @torch.no_grad()
    def count_accepted(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Sequence[int]:
        """Count argmax matches with the target, at the positions that serving drafts from."""
        pack = ttt.TrainingPack.from_rows([row], self.num_steps, "aligned").to(self.device)
        result = ttt.compute_loss(self.draft, pack, embedding, head, ttt.TrainingObjective(self.num_steps))
        return ttt.count_chain_accepted(result, pack).tolist()

    def build_engine_draft(self) -> tuple[nn.Module, dict[str, Any]]:
        return Eagle3Draft.from_checkpoint(self.config, self.draft.state_dict()), self.config


def build_overfit(name: str, params: schema.Params, target: TargetManifest, device: str) -> OverfitRun:
    config, tensors = eagle3_checkpoint.read_root_draft()
    layers = eagle3_checkpoint.read_feature_layers(config, target.num_layers)
    return Eagle3Overfit(config, tensors, layers, params.train_draft, device, target.logits_scale)
