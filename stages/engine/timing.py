"""How long a decoding takes, as its caller sees it."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from stages.engine.decode import DecodeStep


class TimedDecode(NamedTuple):
    """All of a decoding."""

    steps: list[DecodeStep]
    first_s: float  # to the token from prefill
    last_s: float  # to the last token

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def cycles(self) -> list[DecodeStep]:
        """All but prefill's token."""
        return self.steps[1:]


def time_decode(begin: Callable[[], Iterator[DecodeStep]], device: str) -> TimedDecode:
    """On a GPU it is begun once before: the first prompt of a length has kernels picked for it, which can take ten prefills."""
    if device.startswith("cuda"):
        first_time = begin()
        next(first_time)
        del first_time
    started = read_device_clock(device)
    decoding = begin()
    steps = [next(decoding)]
    first = read_device_clock(device)
    steps += decoding
    return TimedDecode(steps, first - started, read_device_clock(device) - started)


def read_device_clock(device: str) -> float:
    """Seconds, once the device has done what it was asked for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()
