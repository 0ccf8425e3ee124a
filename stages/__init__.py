"""The stages of the graph, each `python -m stages.NAME`, and what they share."""

import os

# How long a thread of torch on a CPU spins for its next work before it sleeps, where the user sets neither: some ten µs instead
# of milliseconds, in which it takes a core from the threads it waits for on a machine that is busy (docs/LOG.md, 2026-11-22).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch loads libgomp, which reads it once

if "AERIE_FORK_SERVER" in os.environ:  # set by `aerie run` for the commands of dvc.yaml
    from stages.telemetry import fork_server

    fork_server.run_forked()
