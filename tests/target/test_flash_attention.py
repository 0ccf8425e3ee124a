"""When packed documents run on FlashAttention 3: on a Hopper, where it is installed and loads."""

import importlib.machinery
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch.nn import attention

from stages.target import flash_attention

CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], list[str]]:
    """Return a function that makes a machine of a GPU's capability, with or without FlashAttention 3; what is activated is kept."""
    activated: list[str] = []

    def make(major: int, installed: bool) -> list[str]:
        found = importlib.machinery.ModuleSpec(flash_attention.FA3_MODULE, None) if installed else None
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: found)
        monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append)
        return activated

    return make


@pytest.mark.parametrize(
    ("major", "installed", "expected"), [(9, True, ["FA3"]), (9, False, []), (8, True, []), (10, True, [])]
)
def test_only_an_installed_kernel_on_a_hopper_is_activated(machine, major, installed, expected) -> None:
    activated = machine(major, installed)
    assert flash_attention.activate_flash_attention_3(CUDA) == bool(expected)
    assert activated == expected


def test_a_cpu_has_no_flash_kernel() -> None:
    assert not flash_attention.activate_flash_attention_3(torch.device("cpu"))


def test_a_kernel_that_does_not_load_is_told_and_left_out(monkeypatch) -> None:
    """PyTorch's own activation, of a module that is found and can't be imported."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: importlib.machinery.ModuleSpec("", None))
    with pytest.warns(UserWarning, match="FlashAttention 3 is installed and can't be used: ModuleNotFoundError"):
        assert not flash_attention.activate_flash_attention_3(CUDA)
    assert attention.current_flash_attention_impl() is None
