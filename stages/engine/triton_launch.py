"""Launch options shared by all Triton kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Programmatic dependent launch (Hopper and later): a kernel starts before its predecessor ends, and waits for its inputs.
PDL_SUPPORTED = (
    torch.version.hip is None
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
    and not triton.knobs.runtime.interpret
)
LAUNCH_OPTIONS: dict[str, Any] = {"launch_pdl": True} if PDL_SUPPORTED else {}  # unknown to other backends
USES_PDL = tl.constexpr(PDL_SUPPORTED)


@triton.jit
def wait_for_inputs():
    """Let the next kernel start, and wait until all kernels before this one have ended."""
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
