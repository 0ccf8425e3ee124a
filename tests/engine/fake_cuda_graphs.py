"""Stand-ins for CUDA graphs, by which passes have on a CPU the shapes and the order that they have on a GPU."""

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.engine import slot_pool
from stages.engine.cuda_graphs import AsyncReadback


class FakeCudaGraphs:
    """Stands in for CUDA graphs: fixed shapes, and a pass that leaves no trace when it is recorded."""

    def __init__(self, device: torch.device, captures: bool = True):
        self.captures, self.recorded = captures, dict[Hashable, Callable[[], None]]()

    def run(self, key: Hashable, step: Callable[[], None], mutated: list[Tensor]) -> None:
        if key not in self.recorded:
            before = [tensor.clone() for tensor in mutated]
            step()
            for tensor, value in zip(mutated, before, strict=True):
                tensor.copy_(value)
            self.recorded[key] = step
        self.recorded[key]()


class FakeReadback(AsyncReadback):
    """Stands in for copies to the host that a GPU makes by itself."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.is_async = True

    def _allocate_buffer(self, size: int) -> tuple[Tensor, Any]:
        return torch.empty(size, dtype=torch.int64), SimpleNamespace(record=lambda: None, synchronize=lambda: None)


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slot_pool, "CudaGraphRunner", FakeCudaGraphs)
    patch.setattr(slot_pool, "AsyncReadback", FakeReadback)
