"""Wall-clock times of a decoding, as its caller sees them."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from stages.engine.decode_state import DecodeStep


class TimedDecode(NamedTuple):
    """The steps of a whole decoding, and its times in seconds."""

    steps: list[DecodeStep]
    prefill_s: float  # until the token from prefill
    total_s: float  # until the last token
    process_s: float | None  # CPU time of this process meanwhile, of all threads; None on a GPU

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def cycles(self) -> list[DecodeStep]:
        """All steps but prefill's."""
        return self.steps[1:]


def time_decode(start: Callable[[], Iterator[DecodeStep]], device: str) -> TimedDecode:
    """Time the decoding that `start` begins.

    On a GPU a prefill runs once before: the first prompt of a length selects kernels, which can take ten prefills.
    """
    if device.startswith("cuda"):
        warmup = start()
        next(warmup)
        del warmup
    process_started, started = time.process_time(), read_device_clock(device)
    decoding = start()
    steps = [next(decoding)]
    first = read_device_clock(device)
    steps += decoding
    total_s = read_device_clock(device) - started
    process_s = None if device.startswith("cuda") else time.process_time() - process_started
    return TimedDecode(steps, first - started, total_s, process_s)


def read_device_clock(device: str) -> float:
    """Return seconds, after the device has finished all queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
