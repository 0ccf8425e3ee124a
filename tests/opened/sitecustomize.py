"""Record which files each stage opens: Python imports this module first, where its folder is on PYTHONPATH.

`python -m stages.NAME WORDS`, started in a project, leaves the list in $AERIE_OPENED/NAME WORDS.json when it ends.
"""

import atexit
import json
import os
import sys
from pathlib import Path

import watch


def _leave(started: watch.Watch, name: str) -> None:
    Path(os.environ["AERIE_OPENED"], f"{name}.json").write_text(json.dumps(started.opened()))


def _leave_at_exit(started: watch.Watch, name: str) -> None:
    """Also where this process only waits for its fork (stages/telemetry/fork_server.py), and then runs no exit handlers."""
    exit_now, me = os._exit, os.getpid()

    def leave_and_exit(status: int) -> None:
        if os.getpid() == me:
            _leave(started, name)
        exit_now(status)

    atexit.register(_leave, started, name)
    os._exit = leave_and_exit  # type: ignore[assignment]


if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith("stages.") and "AERIE_OPENED" in os.environ:
    _leave_at_exit(watch.Watch(Path()), " ".join(sys.orig_argv[2:]))
