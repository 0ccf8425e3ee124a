"""The learning rate over the steps of a training, and what null keys of train_draft stand for: packs by rows, rates."""

import math
from dataclasses import dataclass
from typing import Literal

from stages.params.draft_sections import FEWEST_BATCH_TOKENS, TrainDraft
from stages.training.optimizer import OptimizerSettings
from stages.training.packs import plan_epoch

WARMUP_STEPS = 10
FEWEST_STEPS = 50  # of fewer a draft learns next to nothing (docs/training.md)
MOST_EPOCHS = 20  # that are advised in place of more rows


@dataclass(frozen=True)
class LearningRateSchedule:
    """After the warm-up as transformers' get_linear_schedule_with_warmup and its cosine; step 0, there of rate 0, trains."""

    kind: Literal["constant", "cosine", "linear"]
    warmup_steps: int
    total_steps: int | None  # of the horizon; None where the rate is constant

    def get_share(self, step: int) -> float:
        """Return the share of the peak rates at step `step`, counted from 0."""
        if self.total_steps is None or step < self.warmup_steps:
            return min(1.0, (step + 1) / max(1, self.warmup_steps))
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def plan_schedule(lengths: list[int], settings: TrainDraft, horizon_epochs: int | None) -> LearningRateSchedule:
    """Return the schedule of training on rows of these lengths: its horizon is counted in the steps of its epochs.

    Raises:
        ValueError: where the warm-up takes the whole horizon.
    """
    warmup = settings.warmup_steps
    if settings.schedule == "constant" or horizon_epochs is None:
        return LearningRateSchedule("constant", WARMUP_STEPS if warmup is None else warmup, None)
    total = sum(len(plan_epoch(lengths, settings, epoch)) for epoch in range(horizon_epochs))
    if warmup is None:
        warmup = min(WARMUP_STEPS, total // 10)
    elif warmup >= total:
        raise ValueError(
            f"train_draft.warmup_steps is {warmup}, expected fewer than the {total} steps of {horizon_epochs} epochs on "
            f"{len(lengths)} rows; lower it, or set null"
        )
    return LearningRateSchedule(settings.schedule, warmup, total)


def explain_few_steps(
    lengths: list[int], settings: TrainDraft, warmup_steps: int, step: int, epochs: range
) -> str | None:
    """Return that a training at `step` has too few steps by the end of `epochs`, and the key to change; None if it has enough.

    The report repeats it where the draft accepts little.
    """
    assert settings.batch_tokens is not None, "fill_batch_tokens comes first"
    tokens, pack, least = sum(lengths), settings.batch_tokens, max(FEWEST_STEPS, warmup_steps + 1)
    steps = step + len(epochs) * tokens // (pack * settings.packs_per_step)  # of full packs: the fewest
    if steps < least:
        steps = step + sum(len(plan_epoch(lengths, settings, epoch)) for epoch in epochs)
    if steps >= least:
        return None
    within = f", all within the warm-up of {warmup_steps}" if steps <= warmup_steps else ""
    found = f"only {steps} optimizer step{'s' * (steps != 1)} in all{within}, where {least} or more train a draft"
    if steps >= FEWEST_STEPS:
        return f"{found}: lower train_draft.warmup_steps, or set null"
    if settings.packs_per_step > 1:
        return f"{found}: set train_draft.packs_per_step to 1"
    smallest = max(FEWEST_BATCH_TOKENS, 2 ** math.ceil(math.log2(max(lengths))))  # as TrainDraft.choose_batch_tokens
    wanted = 2 ** int(math.log2(len(epochs) * tokens / (least - step)))
    if smallest <= wanted < pack:
        return f"{found}: lower train_draft.batch_tokens from {pack} to {wanted}"
    if (more := math.ceil((least - step) * pack / tokens)) <= MOST_EPOCHS:
        return f"{found}: raise `epochs` of its checkpoint from {len(epochs)} to {more}"
    return f"{found}: train on more rows than these {len(lengths)}, and set train_draft.batch_tokens to null"


def fill_batch_tokens(settings: TrainDraft, lengths: list[int]) -> TrainDraft:
    """Return the settings with batch_tokens, by rows of these lengths where it is null."""
    return settings.model_copy(update={"batch_tokens": settings.choose_batch_tokens(sum(lengths), max(lengths))})


def choose_optimizer(settings: TrainDraft) -> OptimizerSettings:
    """Return the rates and decays of train_draft; null rates are those that trained best (docs/training.md)."""
    if settings.optimizer == "adamw":
        return OptimizerSettings(settings.learning_rate or 3e-4, settings.weight_decay)
    return OptimizerSettings(
        settings.learning_rate or 1e-3, settings.weight_decay, settings.muon_learning_rate, settings.muon_weight_decay
    )
