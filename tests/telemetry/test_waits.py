"""The waits of a stage, as logs/stages.jsonl has them."""

import sys
from types import SimpleNamespace

import pytest
import torch

from stages.telemetry import waits


def test_the_first_kernel_is_noted_when_cuda_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(_lazy_call=queued.append)))
    meter = waits.WaitMeter()
    assert meter.read().first_kernel_s is None
    queued[0]()
    found = meter.read()
    assert found.first_kernel_s is not None and found.first_kernel_s >= found.import_s > 0


def test_loading_and_compiling_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_counted", {"load": 0.0, "server": 0.0})
    torch._dynamo.utils.reset_frame_count()  # and the seconds so far
    assert waits.WaitMeter().read().load_s is None

    @waits.count_wait("load")
    def load() -> torch.Tensor:
        return torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))

    assert load().tolist() == [2, 2, 2]
    found = waits.WaitMeter().read()
    assert found.load_s is not None and found.compile_s is not None and found.load_s >= found.compile_s > 0
    assert found.server_s is None
