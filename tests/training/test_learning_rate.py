"""Schedules are transformers' after the warm-up, and depend on the horizon, not on the segment."""

from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from stages.params.draft_sections import TrainDraft
from stages.training.packs import plan_epoch
from stages.training.trainer import LearningRateSchedule, plan_schedule

LENGTHS = [(37 * n) % 90 + 5 for n in range(200)]


def settings(**changes: Any) -> TrainDraft:
    keys = {
        "checkpoints": {"e003": {"from": "e000", "epochs": 3}, "e009": {"from": "e003", "epochs": 6}}, "ttt_steps": 2,
        "ttt_decay": 0.8, "mask": "aligned", "loss": "ce", "dtype": "float32", "learning_rate": 0.01, "warmup_steps": 7,
        "schedule": "constant", "horizon_epochs": None, "weight_decay": 0.0, "grad_clip": 0.5, "batch_tokens": 400,
        "packs_per_step": 1, "processes": 1, "parallel": "ddp", "report_to": [], "run_name": None, "seed": 5,
    }  # fmt: skip
    return TrainDraft.model_validate(keys | changes)


@pytest.mark.parametrize(
    ("kind", "make"), [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_after_the_warm_up_the_rate_is_that_of_transformers(kind: Any, make: Any) -> None:
    schedule = LearningRateSchedule(kind, 0.01, 7, 120)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    expected = make(optimizer, num_warmup_steps=7, num_training_steps=120)
    for step in range(120):
        if step >= 7:
            assert schedule.get_rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        expected.step()
    assert [schedule.get_rate(step) for step in (0, 5, 6)] == pytest.approx([0.01 / 7, 0.06 / 7, 0.01])
    assert schedule.get_rate(120) == schedule.get_rate(500) == pytest.approx(0.0, abs=1e-18)


def test_the_horizon_is_counted_in_the_steps_of_its_epochs() -> None:
    for horizon in (9, 12):
        found = settings(schedule="cosine", horizon_epochs=horizon)
        steps = sum(len(plan_epoch(LENGTHS, found, epoch)) for epoch in range(horizon))
        assert plan_schedule(LENGTHS, found).total_steps == steps
    with pytest.raises(
        ValueError, match=r"warmup_steps is 9000, expected fewer than the \d+ steps of horizon_epochs 9"
    ):
        plan_schedule(LENGTHS, settings(schedule="linear", horizon_epochs=9, warmup_steps=9000))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "cosine"}, "schedule is cosine and horizon_epochs null, expected null for constant and a number"),
        ({"horizon_epochs": 9}, "schedule is constant and horizon_epochs 9, expected null for constant"),
        (
            {"schedule": "linear", "horizon_epochs": 8},
            "checkpoints.e009 is of 9 epochs from e000, expected at most horizon",
        ),
    ],
)
def test_a_horizon_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)
