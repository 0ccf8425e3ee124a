"""Tell without torch whether this machine has a GPU that CUDA or ROCm could use."""

import os
import shutil
from glob import glob

# Devices of NVIDIA's driver, of Jetson, of WSL and of ROCm.
GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd")


def may_have_gpu() -> bool:
    """Return False only where there is no GPU for sure: no device and no nvidia-smi, or none is left visible."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(map(glob, GPU_DEVICES)) or shutil.which("nvidia-smi") is not None
