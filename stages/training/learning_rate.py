"""The learning rate of each optimizer step: a linear warm-up, then constant, or falling to zero at a horizon.

The horizon is a number of epochs from e000, not those of a segment: e003 and e009 have the same schedule, so that nine epochs
straight and six after e003 are bit for bit the same.
"""

import math
from dataclasses import dataclass
from typing import Literal

from stages.params.draft_sections import TrainDraft
from stages.training.packs import plan_epoch


@dataclass(frozen=True)
class LearningRateSchedule:
    """After the warm-up as transformers' get_cosine_schedule_with_warmup and get_linear_schedule_with_warmup."""

    kind: Literal["constant", "cosine", "linear"]
    peak: float
    warmup_steps: int
    total_steps: int | None  # of the horizon; None where the rate is constant

    def get_rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        if self.total_steps is None or step < self.warmup_steps:
            return self.peak * min(1.0, (step + 1) / max(1, self.warmup_steps))
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.peak * (1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def plan_schedule(lengths: list[int], settings: TrainDraft) -> LearningRateSchedule:
    """Return the schedule of training on rows of these lengths: its horizon is counted in the steps of its epochs.

    Raises:
        ValueError: where the warm-up takes the whole horizon.
    """
    total = None
    if settings.horizon_epochs is not None:
        total = sum(len(plan_epoch(lengths, settings, epoch)) for epoch in range(settings.horizon_epochs))
        if settings.warmup_steps >= total:
            raise ValueError(
                f"train_draft.warmup_steps is {settings.warmup_steps}, expected fewer than the {total} steps of "
                f"horizon_epochs {settings.horizon_epochs}; lower it, or set schedule: constant and horizon_epochs: null"
            )
    return LearningRateSchedule(settings.schedule, settings.learning_rate, settings.warmup_steps, total)
