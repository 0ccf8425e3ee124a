"""Muon is torch.optim.Muon but for its rounding; another optimizer's state is refused. Sharded weights: test_train_draft.py."""

import pytest
import torch
from torch import nn

from stages.training.optimizer import MasterWeightOptimizer, OptimizerSettings

SETTINGS = OptimizerSettings(1e-3, 0.01, muon_learning_rate=0.02, muon_weight_decay=0.3)


def build_draft() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24), nn.Linear(24, 24, bias=False), nn.Linear(24, 9))


def train(draft: nn.Module, optimizer: MasterWeightOptimizer, steps: range) -> None:
    for step in steps:
        draft(torch.randn(6, 24, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step(1.0 - step / 10, clip=0.5)


def test_matrices_are_updated_as_torch_does_and_the_rest_by_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    own, draft = build_draft(), build_draft()
    train(own, MasterWeightOptimizer(own, SETTINGS, is_table=lambda name: name.startswith("3.")), range(5))
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # torch's Muon computes in bfloat16
    matrices = {name: w for name, w in draft.named_parameters() if w.ndim == 2 and not name.startswith("3.")}
    others = [w for name, w in draft.named_parameters() if name not in matrices]
    muon = torch.optim.Muon(matrices.values(), lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95))
    for step in range(5):
        draft(torch.randn(6, 24, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 0.5)
        for optimizer, rate in ((muon, 0.02), (adamw, 1e-3)):
            optimizer.param_groups[0]["lr"] = rate * (1.0 - step / 10)
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in draft.named_parameters():
        torch.testing.assert_close(own.get_parameter(name), weight, rtol=2e-4, atol=2e-6, msg=name)


def test_training_goes_on_to_the_bit_and_another_optimizers_state_is_refused() -> None:
    straight, resumed = build_draft(), build_draft()
    train(straight, MasterWeightOptimizer(straight, SETTINGS), range(6))
    first = MasterWeightOptimizer(resumed, SETTINGS)
    train(resumed, first, range(3))
    second = MasterWeightOptimizer(resumed, SETTINGS)
    second.restore_moments({name: t.clone() for name, t in first.get_moments().items()}, 3)
    train(resumed, second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    message = r"has of 0\.weight momentum, expected exp_avg: another optimizer trained it"
    with pytest.raises(ValueError, match=message):
        MasterWeightOptimizer(resumed, OptimizerSettings(1e-3)).restore_moments(second.get_moments(), 6)


def test_frozen_weights_have_no_master_weights_and_stay() -> None:
    draft = build_draft().bfloat16()
    draft[3].weight.requires_grad_(False)
    masters = {name: w.detach().float() for name, w in draft.named_parameters() if w.requires_grad}
    optimizer, before = MasterWeightOptimizer(draft, SETTINGS, masters), draft[3].weight.clone()
    draft(torch.randn(6, 24).bfloat16()).square().mean().backward()
    optimizer.add_gradients()
    optimizer.step(1.0, 0.5)
    assert "3.weight" not in optimizer.master_weights and torch.equal(draft[3].weight, before)
    assert not any(name.endswith("3.weight") for name in optimizer.get_moments())
