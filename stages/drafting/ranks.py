"""Several processes, one per device, as torchrun starts them; and one, where it did not."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: str

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Inside the block the processes of torchrun know each other; `device` cuda becomes each one's own."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(0, 1, device)
        return
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield Ranks(dist.get_rank(), world, device)
    finally:
        dist.destroy_process_group()


def spread(module: str, arguments: list[str], processes: int) -> None:
    """Become `processes` processes of `python -m module` under torchrun; returns where this already is one of several.

    Over several hosts, start the stage with torchrun yourself: it finds its rank in the environment.
    """
    if processes == 1 or "RANK" in os.environ:
        return
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", module]
    os.execv(sys.executable, [sys.executable, *command, *arguments])
