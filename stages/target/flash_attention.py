"""Which flash kernel packed documents run on: PyTorch's own, or FlashAttention 3 where it is installed."""

import importlib.util
import warnings

import torch
from torch.nn import attention

FA3_MODULE = "flash_attn_interface"  # of the package flash-attn-3
HOPPER = 9  # the compute capability that FlashAttention 3 runs on


def activate_flash_attention_3(device: torch.device) -> bool:
    """Replace PyTorch's flash kernel by FlashAttention 3 in this process, where it is installed on a Hopper; return whether.

    PyTorch calls it for `_flash_attention_forward` from then on, in compiled code too (torch.nn.attention, torch 2.11). On an
    H200 its forward takes half of the time (benchmarks/document_attention.py).
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    if importlib.util.find_spec(FA3_MODULE) is None or not hasattr(attention, "activate_flash_attention_impl"):
        return False
    if attention.current_flash_attention_impl() == "FA3":
        return True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*[Oo]verriding a previously registered kernel"
            )  # that is the purpose
            attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, OSError, ValueError) as error:
        warnings.warn(f"FlashAttention 3 is installed and can't be used: {type(error).__name__}: {error}", stacklevel=2)
        return False
    return True
