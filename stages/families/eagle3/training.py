"""EAGLE-3's training: every segment starts from e000 or one trained from it, by the training-time test (training/ttt.py)."""

from stages.families.draft_training import DraftTraining
from stages.families.family import LoadedDraft
from stages.params.draft_sections import TrainDraft
from stages.params.families import Segment
from stages.training import ttt
from stages.training.packed_rows import PackObjective
from stages.training.trainer import ComputeLoss


class Training(DraftTraining):
    """EAGLE-3's objective."""

    def build_objective(
        self, draft: LoadedDraft, segment: Segment, settings: TrainDraft, logits_scale: float
    ) -> tuple[PackObjective, ComputeLoss]:
        return ttt.TrainingObjective.of_settings(settings, settings.ttt_steps, logits_scale), ttt.compute_loss
