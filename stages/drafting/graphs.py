"""What a GPU needs to be kept busy: passes recorded once and played, and results fetched by one copy.

On the CPU a pass is simply called, and its result is there.
"""

import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

WARM = 2  # calls before a recording: kernels are compiled and picked, workspaces taken


class Graphs:
    """Passes without arguments, which read and write tensors that stay where they are."""

    def __init__(self, device: torch.device):
        self.records = device.type == "cuda"
        self.device = device
        self.played: dict[Hashable, Callable[[], None]] = {}
        self.pool = None

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
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        before = [tensor.clone() for tensor in changed]
        with torch.cuda.stream(stream):
            for _ in range(WARM):
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


class Mail:
    """A small tensor's values, fetched while the device goes on: at most `slots` at a time on their way."""

    def __init__(self, device: torch.device, slots: int = 2):
        self.waits = device.type == "cuda"
        self.slots = slots
        self.boxes: list[tuple[Tensor, torch.cuda.Event]] = []
        self.sent = 0

    def send(self, values: Tensor) -> Callable[[], list[int]]:
        """Begin to fetch values [n] int64, as they are once the device has done what it was asked for -> waits for them."""
        if not self.waits:
            found = values.tolist()
            return lambda: found
        if len(self.boxes) < self.slots:
            self.boxes.append((torch.empty_like(values, device="cpu", pin_memory=True), torch.cuda.Event()))
        box, arrived = self.boxes[self.sent % self.slots]
        self.sent += 1
        box.copy_(values, non_blocking=True)
        arrived.record()

        def fetch() -> list[int]:
            arrived.synchronize()
            return box.tolist()

        return fetch
