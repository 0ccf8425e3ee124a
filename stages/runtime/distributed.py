"""Process groups: one process per device, started by torchrun or by `launch_ranks`; or a single process."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from stages.runtime.free_port import HOST, find_free_port

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class RankContext:
    """The rank of this process, the number of processes, and this process's device."""

    rank: int
    world: int
    device: str

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def join_process_group(device: str) -> Iterator[RankContext]:
    """Join the process group of torchrun for the duration of the block; `device` cuda becomes this rank's GPU."""
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


def all_gather_lists(group: RankContext, mine: list[Any]) -> list[Any]:
    """Return the lists of all ranks, concatenated in the order of ranks. Blocks until every rank has called it."""
    if group.world == 1:
        return mine
    parts: list[list[Any]] = [[] for _ in range(group.world)]
    dist.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def select_rank_device(device: str) -> str:
    """Return this rank's GPU, else `device`, and make it the current one."""
    if device.startswith("cuda") and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # or every process would take a share of the first one's memory
    return device


def launch_ranks(stage: str, arguments: list[str], processes: int) -> bool:
    """Run the stage as `processes` ranks, as torchrun does, and wait for them.

    Returns False without starting any if `processes` is 1 or this process already is a rank: the caller then does the work.
    Over several hosts, start the stage with torchrun or any launcher that sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT.

    Raises:
        ValueError: if a rank fails; the others are terminated.
    """
    if processes == 1 or "RANK" in os.environ:
        return False
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": HOST, "MASTER_PORT": str(find_free_port())}
    # A stage that is a fork (stages/telemetry/fork_server.py) has ranks that are: each saves the import of torch.
    if address := os.environ.get("AERIE_RANKS_FORK_SERVER"):
        shared["AERIE_FORK_SERVER"] = address
    started = []
    try:
        for rank in range(processes):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", f"stages.{stage}", *arguments]
            started.append(subprocess.Popen(command, env=env, preexec_fn=partial(_die_with_parent, os.getpid())))
        while any(s.poll() is None for s in started) and not any(s.poll() for s in started):
            time.sleep(0.05)
        failed = [s.returncode for s in started if s.poll()]
    finally:
        for process in started:
            process.terminate()  # no effect on ranks that have ended
    for process in started:
        process.wait()
    if failed:
        raise ValueError(
            f"{stage}: one of {processes} processes ended with {failed[0]}; its output is above. Finished work is "
            f"kept; run again, or set {stage}.processes to 1"
        )
    return True


def _die_with_parent(parent: int) -> None:
    """Request SIGKILL when the parent dies (Linux), so that a killed stage leaves no rank that writes beside the next run.

    A parent that has died before the request sends nothing: then this process ends itself.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
