"""Several processes, one per device, as torchrun starts them; and one, where it did not."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class RankContext:
    rank: int
    world: int
    device: str

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def join_process_group(device: str) -> Iterator[RankContext]:
    """Inside the block the processes of torchrun know each other; `device` cuda becomes each one's own."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield RankContext(0, 1, device)
        return
    device = select_rank_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield RankContext(dist.get_rank(), world, device)
    finally:
        dist.destroy_process_group()


def select_rank_device(device: str) -> str:
    """The GPU of this process, where it is one of several; else `device`. It is then the current one."""
    if device.startswith("cuda") and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # or every process would take a share of the first one's memory
    return device


def launch_ranks(stage: str, arguments: list[str], processes: int) -> bool:
    """Run the stage as `processes` processes, as torchrun would start them, and wait; False where this is to be the one.

    So it is with one process, and where this already is one of several. Over several hosts, start the stage with torchrun
    or any launcher that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises ValueError where one of them fails; it then ends the others.
    """
    if processes == 1 or "RANK" in os.environ:
        return False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    try:
        for rank in range(processes):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", f"stages.{stage}", *arguments]
            started.append(subprocess.Popen(command, env=env, preexec_fn=_die_with_parent))
        while any(s.poll() is None for s in started) and not any(s.poll() for s in started):
            time.sleep(0.05)
        failed = [s.returncode for s in started if s.poll()]
    finally:
        for process in started:
            process.terminate()  # those that have ended don't mind
    for process in started:
        process.wait()
    if failed:
        raise ValueError(
            f"{stage}: one of {processes} processes ended with {failed[0]}; what it said is above. What was finished is "
            f"kept; run again, or set {stage}.processes to 1"
        )
    return True


def _die_with_parent() -> None:
    """On Linux, so that killing the stage leaves no process that goes on writing beside the next run."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
