"""EAGLE-3 in check_overfit: a copy of e000 that learns one row.

Letters: V vocabulary, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stages.draft.checkpoint import locate_checkpoint
from stages.families.draft_files import LoadedDraft
from stages.families.eagle3.files import Files
from stages.families.overfit_run import OverfitRun
from stages.hidden_states.format import HiddenStatesRow
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.params.families import EAGLE3
from stages.target.manifest import TargetManifest
from stages.training import ttt
from stages.training.packed_rows import LossOutput


class Eagle3Overfit(OverfitRun):
    """A copy of a checkpoint."""

    objective_type: type[ttt.TrainingObjective] = ttt.TrainingObjective
    compute_loss: Callable[..., LossOutput] = staticmethod(ttt.compute_loss)

    def __init__(self, loaded: LoadedDraft, settings: TrainDraft, device: str, logits_scale: float):
        super().__init__(loaded, device)
        self.num_steps, self.vocabulary = settings.ttt_steps, self.draft.t2d.bool()
        weights = settings.ttt_decay, settings.mask, settings.loss
        self.objective = self.objective_type(settings.ttt_steps, *weights, logits_scale=logits_scale)

    def generate_losses(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Iterator[Tensor]:
        pack = ttt.TrainingPack.from_rows([row], self.num_steps, self.objective.loss_mask).to(self.device)
        while True:
            yield self.compute_loss(self.draft, pack, embedding, head, self.objective).total_loss

    @torch.no_grad()
    def count_accepted(self, row: HiddenStatesRow, embedding: Tensor, head: Tensor) -> Sequence[int]:
        """Count argmax matches with the target, at the positions that serving drafts from."""
        pack = ttt.TrainingPack.from_rows([row], self.num_steps, "aligned").to(self.device)
        result = self.compute_loss(self.draft, pack, embedding, head, self.objective_type(self.num_steps))
        return ttt.count_chain_accepted(result, pack).tolist()


def build_overfit(name: str, params: schema.Params, target: TargetManifest, device: str) -> OverfitRun:
    loaded = Files(EAGLE3).read(locate_checkpoint(name), f"init_draft@{name}", target, torch.empty(0))
    return Eagle3Overfit(loaded, params.train_draft, device, target.logits_scale)
