"""The waits of a stage, as logs/stages.jsonl has them."""

import pytest
import torch

from stages.telemetry import waits


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
