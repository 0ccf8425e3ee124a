"""Which flash kernel packed documents run on: PyTorch's own, or FlashAttention 3 where it is installed."""

import importlib.util
import warnings

import torch
from torch import Tensor
from torch.nn import attention

FA3_MODULE = "flash_attn_interface"  # of the package flash-attn-3
HOPPER = 9  # the compute capability that FlashAttention 3 runs on
MAX_DIFFERENCE = 0.02  # between two kernels in bfloat16, of the norm


def activate_flash_attention_3(device: torch.device) -> bool:
    """Replace PyTorch's flash kernel by FlashAttention 3 in this process, where it is installed on a Hopper; return whether.

    PyTorch calls it for `_flash_attention_forward` from then on, in compiled code too (torch.nn.attention, torch 2.11). On an
    H200 its forward takes half of the time (docs/results/2026-11-27-h200-sweep-8b.md). A kernel that fails, or computes something
    else than PyTorch's, is left out with a warning.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    if importlib.util.find_spec(FA3_MODULE) is None or not hasattr(attention, "activate_flash_attention_impl"):
        return False
    if attention.current_flash_attention_impl() == "FA3":
        return True
    try:
        expected = attend_two_documents(device)
        with warnings.catch_warnings():
            # That is the purpose.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            attention.activate_flash_attention_impl("FA3")
        difference = float((attend_two_documents(device) - expected).norm() / expected.norm())
        if not difference < MAX_DIFFERENCE:
            raise RuntimeError(
                f"its output is {difference:.2g} away from PyTorch's kernel, expected less than {MAX_DIFFERENCE}"
            )
    except (ImportError, RuntimeError, OSError, ValueError, TypeError) as error:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        warnings.warn(
            f"FlashAttention 3 is installed and can't be used ({type(error).__name__}: {error}); PyTorch's kernel is used",
            stacklevel=2,
        )
        return False
    return True


def attend_two_documents(device: torch.device) -> Tensor:
    """Return causal attention [24, 2, 64] of two short documents by the flash kernel in use."""
    generator = torch.Generator(device).manual_seed(1)
    query, key, value = (
        torch.randn(24, heads, 64, device=device, dtype=torch.bfloat16, generator=generator) for heads in (2, 1, 1)
    )
    borders = torch.tensor([0, 11, 24], device=device, dtype=torch.int32)
    forward = torch.ops.aten._flash_attention_forward
    return forward(query, key, value, borders, borders, 13, 13, 0.0, True, False)[0].float()
