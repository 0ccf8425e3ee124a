"""Memory of the GPUs that a server uses, from the driver, since the engine runs in another process. Sizes are in GiB."""

from typing import NamedTuple

from stages.params.units import GIB, format_gib
from stages.telemetry import gpu_energy


class GpuMemory(NamedTuple):
    name: str
    used: float
    total: float


def list_visible_gpus() -> list[GpuMemory]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, in its order; none on a machine without NVIDIA's driver."""
    nvml, found = gpu_energy.pynvml, list[GpuMemory]()
    for card in gpu_energy.list_visible_cards():
        memory = nvml.nvmlDeviceGetMemoryInfo(
            card, version=nvml.nvmlMemory_v2
        )  # `used` without what the driver reserves
        found.append(GpuMemory(nvml.nvmlDeviceGetName(card), memory.used / GIB, memory.total / GIB))
    return found


def sum_used_gib(gpus: list[GpuMemory]) -> float | None:
    """Return the memory in use on all GPUs; None without GPUs."""
    return round(sum(gpu.used for gpu in gpus), 2) if gpus else None


def check_free_memory(gpus: list[GpuMemory], mem_fraction: float) -> None:
    """Raises ValueError if another process holds memory that the server will take: it would not start, or have a small cache."""
    for index, gpu in enumerate(gpus):
        free = gpu.total - gpu.used
        if free < mem_fraction * gpu.total:
            raise ValueError(
                f"GPU {index} ({gpu.name}) has {format_gib(free)} of {format_gib(gpu.total)} free, expected at least "
                f"{mem_fraction:g} of it (benchmark_served.servers.*.mem_fraction): another process holds "
                f"{format_gib(gpu.used)}; end it, choose another GPU (CUDA_VISIBLE_DEVICES), or lower mem_fraction"
            )
