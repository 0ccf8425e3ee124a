"""Replicas of one target's server: as many as the visible GPUs hold, started together, each on GPUs of its own."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from stages.engines.gpu_memory import list_visible_gpus
from stages.engines.protocol import ServingEngine
from stages.engines.server import ServerGroup, ServerProcess
from stages.runtime.free_port import find_free_port
from stages.runtime.machine import list_named_gpus

MAX_RESTARTS = 3  # of each server, in one run
SECTION = "sample_target.server.launch_args"  # of params.yaml, for messages
# Flags of SGLang and vLLM that multiply the GPUs of one server.
PARALLEL_FLAGS = {
    "tp": ("--tp", "-tp", "--tp-size", "--tensor-parallel-size"),
    "pp": ("--pp", "-pp", "--pp-size", "--pipeline-parallel-size"),
    "dp": ("--dp", "-dp", "--dp-size", "--data-parallel-size"),
}


def plan_replicas(
    engine: ServingEngine,
    folder: str,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    launch_args: Sequence[str],
    timeout_s: float,
    logs: Path,
    threads: int | None,
) -> ServerGroup:
    """Return servers that are not started yet: one on a CPU, else one for each group of GPUs that `launch_args` ask for.

    `device` may name one GPU, such as cuda:1, which then has the only server.
    """
    groups = [None] if device == "cpu" else group_gpus(list_gpus(device), count_gpus_per_server(launch_args))
    servers = []
    for index, gpus in enumerate(groups):
        port = find_free_port()
        kind = device.partition(":")[0]  # the only GPU it sees is its first
        line = engine.build_command(folder, port, dtype, kind, trust_remote_code) + list(launch_args)
        log = logs / (f"{engine.name}_server.log" if len(groups) == 1 else f"{engine.name}_server_{index}.log")
        placement = f" on GPU {gpus}" if gpus else ""
        print(f"starting {engine.name} on port {port}{placement}; its log is {log}", flush=True)
        servers.append(
            ServerProcess(engine.name, line, port, log, timeout_s, restarts=MAX_RESTARTS, threads=threads, gpus=gpus)
        )
    return ServerGroup(servers)


def list_gpus(device: str) -> list[str]:
    """Return the visible GPUs that `device` (cuda, cuda:1) means, as CUDA_VISIBLE_DEVICES names them."""
    count, named = len(list_visible_gpus()), list_named_gpus()
    names = [str(n) for n in range(count)] if named is None else named[:count]
    gpu_index = device.partition(":")[2]
    return names[int(gpu_index) : int(gpu_index) + 1] if gpu_index else names


def count_gpus_per_server(launch_args: Sequence[str]) -> int:
    """Return tensor x pipeline x data parallel size of these flags. Raises ValueError for one that is no positive number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for key, flags in PARALLEL_FLAGS.items():
        parser.add_argument(*flags, dest=key, type=int, default=1)
    # SGLang: its dp then divides tp and takes no GPUs of its own
    parser.add_argument("--enable-dp-attention", action="store_true")
    try:
        found = vars(parser.parse_known_args(list(launch_args))[0])
    except argparse.ArgumentError as error:
        raise ValueError(f"{SECTION}: {error}") from None
    if found.pop("enable_dp_attention"):
        del found["dp"]
    if invalid := {key: size for key, size in found.items() if size < 1}:
        raise ValueError(f"{SECTION}: expected sizes of at least 1, found {invalid}")
    return math.prod(found.values())


def group_gpus(names: list[str], size: int) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES of each server of `size` GPUs. Raises ValueError if there are not enough for one."""
    if len(names) < size:
        raise ValueError(
            f"{SECTION} asks for {size} GPUs for a server, found {len(names)} visible; lower its --tp (tensor parallel size), "
            "or make more visible (CUDA_VISIBLE_DEVICES, schedule.stages.sample_target.gpus)"
        )
    groups = [",".join(names[start : start + size]) for start in range(0, len(names) - size + 1, size)]
    if unused := len(names) % size:
        print(f"{unused} of {len(names)} GPUs are not used: a server takes {size}")
    return groups
