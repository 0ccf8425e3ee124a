"""P-EAGLE in check_overfit: a fresh draft of a segment's layers, trained at all depths of all positions of one row."""

import torch

from stages.families.eagle3.overfit import Eagle3Overfit
from stages.families.overfit_run import OverfitRun
from stages.families.peagle.training import PEagleObjective, Training, compute_loss
from stages.params import schema
from stages.target.manifest import TargetManifest


class PEagleOverfit(Eagle3Overfit):
    """An untrained draft."""

    objective_type, compute_loss = PEagleObjective, staticmethod(compute_loss)


def build_overfit(name: str, params: schema.Params, target: TargetManifest, device: str) -> OverfitRun:
    made = Training(params.train_draft.checkpoints[name].family).initialise(name, params, target, torch.empty(0))
    return PEagleOverfit(made, params.train_draft, device, target.logits_scale)
