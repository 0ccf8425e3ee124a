"""Let stages with a TMPDIR each, as on GPUs of their own, begin to measure together (stages/measuring/measurement_lock.py)."""

import fcntl
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stages.measuring.measurement_lock import POLL_S, hold_lock, is_free


@contextmanager
def begin_together(tmpdirs: Sequence[Path]) -> Iterator[threading.Event]:
    """Let stages with these TMPDIRs, run in the block, begin to measure when each has a server that is ready.

    Servers that start slow what is measured beside them. Yield an event to set when a stage ends: it may have failed before its
    server was ready, and the others wait no longer.
    """
    ended = threading.Event()
    with ExitStack() as stack:
        for tmpdir in tmpdirs:
            stack.enter_context(hold_lock("starting", fcntl.LOCK_SH, tmpdir))
        release = threading.Thread(target=_release_when_ready, args=(stack.pop_all(), tmpdirs, ended))
    release.start()
    try:
        yield ended
    finally:
        ended.set()
        release.join()


def _release_when_ready(held: ExitStack, tmpdirs: Sequence[Path], ended: threading.Event) -> None:
    """Let go of the `starting` locks once a stage of each TMPDIR waits to measure, or one has ended."""
    with held:
        while any(is_free("measuring", tmpdir) for tmpdir in tmpdirs):
            if ended.wait(POLL_S):
                return
