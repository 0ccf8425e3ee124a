"""EAGLE-3's training: every segment starts from e000 or one trained from it, by the training-time test (training/ttt.py).

Its head is the target's rows of the draft's vocabulary, and stays so: trained, it accepts 4% less of new answers, and takes half
of the draft's weights, moments and gradients (docs/training.md).
"""

from dataclasses import replace

import torch
from torch import Tensor

from stages.draft.eagle3 import Eagle3Draft
from stages.families.draft_files import LoadedDraft
from stages.families.draft_training import DraftTraining
from stages.params.draft_sections import TrainDraft
from stages.params.families import Segment
from stages.training import ttt
from stages.training.packed_rows import PackObjective
from stages.training.trainer import ComputeLoss

MOST_SMALL_TOKENS = 8192  # of 16,384 the kernels take longer than their launches, of any draft


class Training(DraftTraining):
    """EAGLE-3's objective."""

    tables: tuple[str, ...] = ("lm_head",)

    def freeze(self, draft: LoadedDraft, head: Tensor, train_head: bool | None, logits_scale: float) -> None:
        assert isinstance(draft.module, Eagle3Draft)
        own, given = draft.module.lm_head.weight, head[draft.module.t2d] * logits_scale
        is_the_targets = torch.equal(own.bfloat16(), given.bfloat16())  # a draft may be stored so
        if train_head is False and not is_the_targets:
            raise ValueError(
                "params.yaml: train_draft.train_head is false, but the head of the draft to go on from is not the target's "
                "rows; expected null or true: it was trained"
            )
        own.requires_grad_(not is_the_targets if train_head is None else train_head)

    def build_objective(
        self, draft: LoadedDraft, segment: Segment, settings: TrainDraft, logits_scale: float
    ) -> tuple[PackObjective, ComputeLoss]:
        objective = ttt.TrainingObjective.of_settings(settings, settings.ttt_steps, logits_scale)
        return replace(objective, small_packs=(settings.batch_tokens or 0) <= MOST_SMALL_TOKENS), ttt.compute_loss
