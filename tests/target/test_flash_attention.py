"""When documents run on FlashAttention 3: on a Hopper, where it is installed, loads and computes what PyTorch's kernel does."""

import importlib.machinery
import importlib.util
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from stages.target import feature_target

CUDA = torch.device("cuda")


@dataclass
class Machine:
    """A machine with a GPU that this one does not have."""

    major: int = 9
    installed: bool = True
    kernels_differ: bool = False
    active: list[str] = field(default_factory=list)

    def attend(self, _device: torch.device) -> Tensor:
        return torch.ones(3) * (2 if self.active and self.kernels_differ else 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    spec = importlib.machinery.ModuleSpec(feature_target.FA3_MODULE, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (made.major, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec if made.installed else None)
    monkeypatch.setattr(feature_target, "attend_two_documents", made.attend)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", made.active.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", made.active.clear)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: made.active[0] if made.active else None)
    return made


@pytest.mark.parametrize(
    ("major", "installed", "expected"), [(9, True, ["FA3"]), (9, False, []), (8, True, []), (10, True, [])]
)
def test_only_an_installed_kernel_on_a_hopper_is_activated(machine, major, installed, expected) -> None:
    machine.major, machine.installed = major, installed
    assert feature_target.activate_flash_attention_3(CUDA) == bool(expected)
    assert machine.active == expected


def test_a_kernel_that_computes_something_else_is_told_and_left_out(machine) -> None:
    """Bug: a FlashAttention 3 whose operator failed stayed active, so all rows were padded, at three quarters of the speed."""
    machine.kernels_differ = True
    with pytest.warns(UserWarning, match=r"can't be used \(RuntimeError: its output is 1 away from PyTorch's kernel"):
        assert not feature_target.activate_flash_attention_3(CUDA)
    assert machine.active == []
