"""Waits of a stage that are not its work: imports, CUDA's start, loading weights, servers, the compiler.

Times count from the start of the process, that of a fork where the fork server starts stages. Only this process is looked at:
of a stage with ranks, or with servers, the one that writes the log.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil

_counted = {"load": 0.0, "server": 0.0}


@dataclass(frozen=True)
class StageWaits:
    """Seconds; None where there was nothing of the kind."""

    import_s: float  # from the start of the process until the stage's `main`
    first_kernel_s: float | None  # from there too, until CUDA is ready for its first kernel
    load_s: float | None  # reading weights and moving them to the device
    server_s: float | None  # from the start of servers until they answer
    compile_s: float | None  # torch.compile's: all graphs, forward and backward


class WaitMeter:
    """Waits of this process, from before `main` to its end."""

    def __init__(self) -> None:
        self._first_kernel_s: float | None = None
        self._import_s = _get_process_age()
        torch = sys.modules.get("torch")
        call_when_ready = getattr(getattr(torch, "cuda", None), "_lazy_call", None)
        if call_when_ready is not None:  # torch calls it at the end of CUDA's start, or at once where that has been
            call_when_ready(self._note_first_kernel)

    def read(self) -> StageWaits:
        """Return the waits so far."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded where nothing has been compiled
        compile_s = dynamo.calculate_time_spent().get("total_wall_time", 0.0) if dynamo else 0.0
        others = (round(seconds, 2) or None for seconds in (_counted["load"], _counted["server"], compile_s))
        return StageWaits(round(self._import_s, 2), self._first_kernel_s, *others)

    def _note_first_kernel(self) -> None:
        self._first_kernel_s = round(_get_process_age(), 2)


@contextmanager
def count_wait(kind: Literal["load", "server"]) -> Iterator[None]:
    """Count the seconds of the block, or of the function that this decorates, as a wait of this kind."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _counted[kind] += time.perf_counter() - started


def _get_process_age() -> float:
    return max(0.0, time.time() - psutil.Process().create_time())
