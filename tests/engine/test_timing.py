"""How long a decoding takes."""

from collections.abc import Iterator

import pytest
import torch

from stages.engine.decode_state import DecodeStep
from stages.measuring import torch_context


@pytest.mark.parametrize(("device", "num_before"), [("cpu", 1), ("cuda", 2)])
def test_on_a_gpu_a_prompt_is_read_once_before_the_clock_runs(
    device: str, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of that first time only the first token is made, and nothing is kept."""
    clock, begins, made, over = iter(range(10, 1000)), [], [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch_context.time, "perf_counter", lambda: float(next(clock)))

    def decoding() -> Iterator[DecodeStep]:
        begins.append(1)
        try:
            for token in (5, 6, 7):
                made.append(token)
                yield DecodeStep([token], 0)
        finally:
            over.append(1)

    found = torch_context.time_decode(decoding, device)
    assert found.tokens == [5, 6, 7] and len(begins) == len(over) == num_before
    assert made == [5] * (num_before - 1) + [5, 6, 7]
    assert (found.prefill_s, found.total_s) == (1.0, 2.0)
