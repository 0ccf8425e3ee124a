"""Schedules are transformers' after the warm-up, and depend on the longest chain, not on the segment; packs follow the rows."""

import re
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from stages.params.draft_sections import TrainDraft
from stages.training.packs import plan_epoch
from stages.training.schedule import LearningRateSchedule, explain_few_steps, fill_batch_tokens, plan_schedule

LENGTHS = [(37 * n) % 90 + 5 for n in range(200)]


def settings(**changes: Any) -> TrainDraft:
    chain = {"e003": {"from": "e000", "epochs": 3}, "e009": {"from": "e003", "epochs": 6}}
    return TrainDraft.model_validate({"checkpoints": chain, "batch_tokens": 400, **changes})


@pytest.mark.parametrize(
    ("kind", "make"), [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_after_the_warm_up_the_rate_is_that_of_transformers(kind: Any, make: Any) -> None:
    schedule = LearningRateSchedule(kind, 7, 120)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    expected = make(optimizer, num_warmup_steps=7, num_training_steps=120)
    for step in range(120):
        if step >= 7:
            assert schedule.get_share(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        expected.step()
    assert [schedule.get_share(step) for step in (0, 5, 6)] == pytest.approx([1 / 7, 6 / 7, 1])
    assert schedule.get_share(120) == schedule.get_share(500) == pytest.approx(0.0, abs=1e-18)


BY_ROWS: dict[str, Any] = {"by_rows": {"from": "e000", "epochs": None}}


def test_the_horizon_is_the_end_of_a_checkpoint_counted_in_steps() -> None:
    block = {"from": "e000", "epochs": 18, "method": "dflash", "layers": 1, "block_size": 4, "anchors": 8}
    chain = {"e003": {"from": "e000", "epochs": 3}, "e009": {"from": "e003", "epochs": 6}, "dflash18": block}
    found = settings(checkpoints=chain)
    horizons = {name: segment.horizon_epochs for name, segment in found.checkpoints.items()}
    assert horizons == {"e003": 3, "e009": 9, "dflash18": 18}
    steps = sum(len(plan_epoch(LENGTHS, found, epoch)) for epoch in range(9))
    assert plan_schedule(LENGTHS, found, 9) == LearningRateSchedule("linear", 10, steps)
    assert plan_schedule(LENGTHS[:20], found, 1).warmup_steps == len(plan_epoch(LENGTHS[:20], found, 0)) // 10
    assert plan_schedule(LENGTHS, settings(schedule="constant"), None).get_share(9000) == 1
    with pytest.raises(ValueError, match=r"warmup_steps is 9000, expected fewer than the \d+ steps of 9 epochs"):
        plan_schedule(LENGTHS, settings(warmup_steps=9000), 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "constant", "horizon_epochs": 9}, "schedule is constant and horizon_epochs 9, expected null"),
        ({"horizon_epochs": 8}, "checkpoints.e009 is of 9 epochs, expected at most horizon_epochs 8"),
        ({"horizon_epochs": 8, "checkpoints": BY_ROWS}, "checkpoints.by_rows.epochs is null, expected a number"),
        (
            {"checkpoints": {"more": {"from": "by_rows", "epochs": 2}} | BY_ROWS},
            "checkpoints.by_rows.epochs is null, expected a number: more starts from it",
        ),
    ],
)
def test_a_horizon_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


@pytest.mark.parametrize(("rows", "epochs"), [(99, 20), (400, 20), (6000, 6), (12_000, 4), (600_000, 1)])
def test_epochs_follow_the_rows(rows: int, epochs: int) -> None:
    assert settings(checkpoints=BY_ROWS).checkpoints["by_rows"].count_epochs(rows) == epochs


@pytest.mark.parametrize(
    ("lengths", "packs_per_step", "tokens"),
    [
        ([300] * 99, 1, 512),  # some 99 steps an epoch: as many as rows of this length allow
        ([340] * 600_000, 8, 16384),
        ([100] * 50 + [1500], 1, 2048),  # the longest row fits
    ],
)
def test_tokens_of_a_pack_follow_the_rows(lengths: list[int], packs_per_step: int, tokens: int) -> None:
    found = settings(batch_tokens=None, packs_per_step=packs_per_step)
    assert fill_batch_tokens(found, lengths).batch_tokens == tokens
    assert fill_batch_tokens(settings(), lengths).batch_tokens == 400


@pytest.mark.parametrize(
    ("rows", "changes", "epochs", "advice"),
    [
        (99, {"batch_tokens": 16384}, 2, "only 4 optimizer steps .*warm-up of 10.* lower .*batch_tokens from 16384 to 1024$"),
        (99, {"packs_per_step": 80}, 9, "set train_draft.packs_per_step to 1"),
        (9, {"batch_tokens": 512}, 2, "raise `epochs` of its checkpoint from 2 to 10"),
        (99, {"batch_tokens": 512}, 1, None),
    ],
)  # fmt: skip
def test_too_few_steps_are_told_with_the_key_to_change(
    rows: int, changes: dict[str, Any], epochs: int, advice: str | None
) -> None:
    """Bug: 99 rows in one pack an epoch took two steps, and nobody said so before 16 minutes of cells at tau 1.000."""
    lengths, found = [300] * rows, settings(**changes)
    told = explain_few_steps(lengths, found, found.warmup_steps or 10, 0, range(epochs))
    assert told is None if advice is None else re.search(advice, str(told))
    # What it advises is enough.
    if match := re.search("batch_tokens from .* to ([0-9]+)$", told or ""):
        fewer = found.model_copy(update={"batch_tokens": int(match[1])})
        assert explain_few_steps(lengths, fewer, 10, 0, range(epochs)) is None
