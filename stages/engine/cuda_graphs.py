"""CUDA graphs captured once and replayed, and results copied to the host without blocking it.

On the CPU a step is simply called, and its result is available at once.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MAX_PENDING_READBACKS = 2  # the step being read, and the one launched before
WARMUP_CALLS = 2  # calls before a capture: kernels are compiled and selected, workspaces allocated


def measure_free_memory(device: torch.device) -> float:
    """Return the bytes that can still be allocated: free on the device, or cached by torch and unused. Infinity on a CPU."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


@cache
def get_capture_stream(device: torch.device) -> Any:
    """Return the process's only stream for captures, since cuBLAS keeps a workspace for every stream it was used on."""
    return torch.cuda.Stream(device)


def time_graph_replay(work: Callable[[], object], device: torch.device, plays: int = 10) -> float:
    """Return the median milliseconds of `work`, captured and replayed."""
    stream = get_capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize(device)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    for _ in range(1 + plays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


class CudaGraphRunner:
    """Captures and replays steps without arguments, whose tensors keep their addresses."""

    def __init__(self, device: torch.device, captures: bool | None = None):
        self.captures = device.type == "cuda" if captures is None else captures
        self.device = device
        self.graphs: dict[Hashable, Callable[[], None]] = {}
        self.pool: Any = None

    def run(self, key: Hashable, step: Callable[[], None], mutated: list[Tensor]) -> None:
        """Run `step`: replay the graph captured under `key`, after capturing it the first time.

        `mutated`: the tensors that the step reads and changes. Capturing calls the step, so their values are restored.
        """
        if not self.captures:
            step()
            return
        if key not in self.graphs:
            self.graphs[key] = self._capture(step, mutated)
        self.graphs[key]()

    def _capture(self, step: Callable[[], None], mutated: list[Tensor]) -> Callable[[], None]:
        graph, before = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in mutated]
        stream = get_capture_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                step()
                for tensor, value in zip(mutated, before, strict=True):
                    tensor.copy_(value)
        torch.cuda.synchronize(self.device)
        try:
            # All graphs share one pool: no step needs another's intermediate results.
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # A forward pass that waits for the device (a router that reads counts) can't be captured.
            warnings.warn(f"a pass can't be captured as a CUDA graph and is slower: {error}", stacklevel=3)
            torch.cuda.synchronize(self.device)
            return step
        self.pool = self.pool or graph.pool()
        return graph.replay


class AsyncReadback:
    """Copies small tensors to the host while the device continues: at most MAX_PENDING_READBACKS of one size at a time."""

    def __init__(self, device: torch.device):
        self.is_async = device.type == "cuda"
        self.buffers: dict[int, list[tuple[Tensor, Any]]] = {}  # by size: a plain step's is smaller than a cycle's

    def start(self, values: Tensor) -> Callable[[], list[int]]:
        """Start to copy values [n] int64 once queued work is done -> a function that waits for them."""
        if not self.is_async:
            found = values.tolist()
            return lambda: found
        buffers = self.buffers.setdefault(len(values), [])
        is_full = len(buffers) == MAX_PENDING_READBACKS
        buffers.append(buffers.pop(0) if is_full else self._allocate_buffer(len(values)))
        buffer, arrived = buffers[-1]
        buffer.copy_(values, non_blocking=True)
        arrived.record()

        def fetch() -> list[int]:
            arrived.synchronize()
            return buffer.tolist()

        return fetch

    def _allocate_buffer(self, size: int) -> tuple[Tensor, Any]:
        """Return pinned memory and the event that marks the end of a copy into it."""
        return torch.empty(size, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
