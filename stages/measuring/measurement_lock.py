"""Let servers of several cells start together, and be measured one at a time: a start, or an end, would slow a measurement.

Locks of the kernel (flock), shared by all stages of a user on this machine, free when their holder ends, killed or not:

    starting   shared by stages whose server starts; exclusive: the one that measures
    measuring  shared by stages whose server is ready, until they have measured and ended it; no other server starts meanwhile

Alone, a stage has nothing to wait for. Stages with a TMPDIR each, as on GPUs of their own, do not wait for each other.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.runtime.machine import open_lock_file, open_user_folder

POLL_S = 0.1


@contextmanager
def hold_lock(name: str, kind: int, tmpdir: Path | None = None) -> Iterator[None]:
    """Hold a lock, as soon as others let it go."""
    with open_lock_file(open_user_folder(tmpdir), f"{name}.lock") as file:
        fcntl.flock(file, kind)
        yield


def is_free(name: str, tmpdir: Path | None = None) -> bool:
    """Return whether the lock is free."""
    with open_lock_file(open_user_folder(tmpdir), f"{name}.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def has_other_servers() -> bool:
    """Return whether another stage has a server that starts, or that waits for its measurement or is being measured."""
    return any(
        (open_user_folder() / f"{name}.lock").exists() and not is_free(name) for name in ("starting", "measuring")
    )


@contextmanager
def start_server() -> Iterator[None]:
    """Start a server inside the block, which waits until no server is being measured or about to be."""
    while True:
        with hold_lock("starting", fcntl.LOCK_SH):
            if is_free("measuring"):  # and stays so: who is ready now waits for `starting`
                yield
                return
        time.sleep(POLL_S)


@contextmanager
def measure_server() -> Iterator[None]:
    """Measure a server inside the block, which waits until none starts and no other is being measured."""
    with hold_lock("measuring", fcntl.LOCK_SH), hold_lock("starting", fcntl.LOCK_EX):
        yield
