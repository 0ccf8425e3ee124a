"""The stages of the graph, each `python -m stages.NAME`, and what they share."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType

# How long a thread of torch on a CPU spins for its next work before it sleeps, where the user sets neither: some ten µs instead
# of milliseconds, in which it takes a core from the threads it waits for on a machine that is busy (docs/LOG.md, 2026-11-22).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch loads libgomp, which reads it once


def end_interrupted(number: int, frame: FrameType | None) -> None:
    """End a stage that Ctrl-C met while it was importing, before run_stage: with one line and 130, as run_stage does.

    At once, in the signal handler: a KeyboardInterrupt in the middle of NumPy's import becomes an ImportError.
    """
    if "RANK" not in os.environ:  # the process that has started the ranks says it for them
        os.write(sys.stderr.fileno(), b"aerie: stopped before the stage began; run again to go on\n")
    os._exit(130)


def end_without_memory(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error that was not caught: in one line where an import, before run_stage, finds no memory."""
    no_library = issubclass(kind, ImportError) and "failed to map segment" in str(error)
    if not (issubclass(kind, MemoryError) or no_library):
        sys.__excepthook__(kind, error, trace)
        return
    os.write(
        sys.stderr.fileno(), b"aerie: out of memory before the stage began; end what else uses it, and run again\n"
    )


# Python is about to run a module of this package, python -m stages.NAME, and Ctrl-C is not ignored, as nohup does.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_interrupted)
if sys.argv[:1] == ["-m"]:
    sys.excepthook = end_without_memory

# Set by `aerie run` for the commands of dvc.yaml, or left by an earlier stage of a bare `dvc repro`.
if "AERIE_FORK_SERVER" in os.environ or (sys.argv[:1] == ["-m"] and Path(".scratch/fork_server").exists()):
    from stages.telemetry import fork_server

    fork_server.run_forked()
