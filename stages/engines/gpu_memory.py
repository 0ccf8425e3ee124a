"""Memory of the GPUs that a server uses, read from nvidia-smi, since the engine runs in another process. Sizes are in GiB."""

import shutil
import subprocess
from typing import NamedTuple

from stages.params.units import format_gib
from stages.runtime.machine import list_named_gpus


class GpuMemory(NamedTuple):
    name: str
    used: float
    total: float


def list_visible_gpus() -> list[GpuMemory]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES, in its order; none on a machine without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "index,uuid,name,memory.used,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if output.returncode:
        return []
    found: dict[str, GpuMemory] = {}
    for index, uuid, name, used, total in (line.split(", ") for line in output.stdout.strip().splitlines()):
        found[index] = found[uuid] = GpuMemory(name, float(used) / 1024, float(total) / 1024)  # MiB
    named = list_named_gpus()
    if named is None:
        return [gpu for key, gpu in found.items() if key.isdigit()]
    return [found[key] for key in named if key in found]


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
