"""What a GPU needs to be kept busy: passes recorded once and played, and results fetched by one copy.

On the CPU a pass is simply called, and its result is there.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MAX_PENDING_READBACKS = 2  # the step that is read, and the one that was begun before
WARMUP_CALLS = 2  # calls before a recording: kernels are compiled and picked, workspaces taken


def measure_free_memory(device: torch.device) -> float:
    """Bytes that can still be taken: the device's, and what torch holds of it for nobody. Of a CPU it isn't asked."""
    if device.type != "cuda":
        return math.inf
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


@cache
def get_capture_stream(device: torch.device) -> Any:
    """The stream that recordings are made on: one for all of a process, since cuBLAS keeps a workspace for each it ever saw."""
    return torch.cuda.Stream(device)


def time_graph_replay(work: Callable[[], object], device: torch.device, plays: int = 10) -> float:
    """What `work` takes, recorded and played: the median."""
    stream = get_capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize(device)
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    for _ in range(1 + plays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found[1:])


class CudaGraphRunner:
    """Passes without arguments, which read and write tensors that stay where they are."""

    def __init__(self, device: torch.device):
        self.records = device.type == "cuda"
        self.device = device
        self.played: dict[Hashable, Callable[[], None]] = {}
        self.pool: Any = None

    def run(self, key: Hashable, work: Callable[[], None], changed: list[Tensor]) -> None:
        """Do `work`: play what was recorded under `key`; the first time, record it.

        `changed` are the tensors that it reads and changes: recording calls it, and must leave no trace.
        """
        if not self.records:
            work()
            return
        if key not in self.played:
            self.played[key] = self._recorded(work, changed)
        self.played[key]()

    def _recorded(self, work: Callable[[], None], changed: list[Tensor]) -> Callable[[], None]:
        graph, before = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in changed]
        stream = get_capture_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                work()
                for tensor, value in zip(changed, before, strict=True):
                    tensor.copy_(value)
        torch.cuda.synchronize(self.device)
        try:
            # One pool for all: no pass needs what another left in it.
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            # A target whose forward waits for the device (a router that asks for counts) can't be recorded.
            warnings.warn(f"a pass can't be recorded as a CUDA graph and is slower: {error}", stacklevel=3)
            torch.cuda.synchronize(self.device)
            return work
        self.pool = self.pool or graph.pool()
        return graph.replay


class AsyncReadback:
    """Small tensors' values, fetched while the device goes on: at most SLOTS of a size at a time on their way."""

    def __init__(self, device: torch.device):
        self.waits = device.type == "cuda"
        self.boxes: dict[int, list[tuple[Tensor, Any]]] = {}  # by size: a plain step's is smaller than a cycle's

    def send(self, values: Tensor) -> Callable[[], list[int]]:
        """Begin to fetch values [n] int64, as they are once the device has done what it was asked for -> waits for them."""
        if not self.waits:
            found = values.tolist()
            return lambda: found
        boxes = self.boxes.setdefault(len(values), [])
        boxes.append(boxes.pop(0) if len(boxes) == MAX_PENDING_READBACKS else self.box(len(values)))
        box, arrived = boxes[-1]
        box.copy_(values, non_blocking=True)
        arrived.record()

        def fetch() -> list[int]:
            arrived.synchronize()
            return box.tolist()

        return fetch

    def box(self, size: int) -> tuple[Tensor, Any]:
        """Memory that the device writes to by itself, and what tells that it did."""
        return torch.empty(size, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
