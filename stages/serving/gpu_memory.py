"""Memory of the GPUs that a server would use, as nvidia-smi says it: the engine's own process is another."""

import os
import shutil
import subprocess
from typing import NamedTuple


class GpuMemory(NamedTuple):
    name: str
    used: float  # GiB
    total: float


def list_visible_gpus() -> list[GpuMemory]:
    """Those of CUDA_VISIBLE_DEVICES, in its order; none on a machine without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "index,uuid,name,memory.used,memory.total"
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    if said.returncode:
        return []
    found: dict[str, GpuMemory] = {}
    for index, uuid, name, used, total in (line.split(", ") for line in said.stdout.strip().splitlines()):
        found[index] = found[uuid] = GpuMemory(name, float(used) / 1024, float(total) / 1024)  # MiB
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [gpu for key, gpu in found.items() if key.isdigit()]
    return [found[key.strip()] for key in wanted.split(",") if key.strip() in found]


def check_free_memory(gpus: list[GpuMemory], mem_fraction: float) -> None:
    """Raises ValueError where another process holds what the server is to take: its start would fail, or its cache be small."""
    for number, gpu in enumerate(gpus):
        free = gpu.total - gpu.used
        if free < mem_fraction * gpu.total:
            raise ValueError(
                f"GPU {number} ({gpu.name}) has {free:.1f} of {gpu.total:.1f} GiB free, expected at least "
                f"{mem_fraction:g} of it (benchmark_served.server.mem_fraction): another process holds {gpu.used:.1f} GiB. "
                "End it (nvidia-smi names it), choose another GPU with CUDA_VISIBLE_DEVICES, or lower mem_fraction"
            )
