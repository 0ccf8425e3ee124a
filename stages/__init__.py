"""The stages of the graph, each `python -m stages.NAME`, and what they share."""

import os
import sys
from types import TracebackType

# How long a thread of torch on a CPU spins for its next work before it sleeps, where the user sets neither: some ten µs instead
# of milliseconds, in which it takes a core from the threads it waits for on a machine that is busy (docs/LOG.md, 2026-11-22).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch loads libgomp, which reads it once


def _end_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a stage that Ctrl-C met while it was importing, before run_stage could: with one line and 130, as run_stage does."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if "RANK" not in os.environ:  # the process that has started the ranks says it for them
        print("aerie: stopped before the stage began; run again to go on", file=sys.stderr, flush=True)
    os._exit(130)


if sys.argv[:1] == ["-m"]:  # Python is about to run a module of this package, python -m stages.NAME
    sys.excepthook = _end_interrupted

if "AERIE_FORK_SERVER" in os.environ:  # set by `aerie run` for the commands of dvc.yaml
    from stages.telemetry import fork_server

    fork_server.run_forked()
