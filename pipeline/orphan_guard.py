"""Waits until whoever started it is gone, and ends what it has left. python -m pipeline.orphan_guard MARK

Its stages here, by their mark; and of the runs that workers make for it, those of which it has said `sent RUN` and not
`back RUN`. The other way round, a flow's own process ends with the worker that started it.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from uuid import UUID

from pipeline.dvc_graph import end_marked

PARENT_POLL_S = 0.5  # seconds


def end_with_parent() -> None:
    """End this run as a cancellation does when the process that serves it is gone: killed, it could not tell us."""
    parent, number = multiprocessing.parent_process(), os.getppid()
    if parent is None and "PREFECT__FLOW_RUN_ID" not in os.environ:
        return  # started by hand

    def watch() -> None:
        if parent:
            parent.join()
        while os.getppid() == number and not parent:  # a work pool's worker starts us as any command
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def cancel_flow_runs(runs: Iterable[str]) -> None:
    """Those of these flow runs that are not over; their worker then ends what it has begun."""
    from prefect import get_client  # takes a second to import, which most guards never need
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        for run in runs:
            client.set_flow_run_state(UUID(run), Cancelling())


def main() -> None:
    if os.fork():
        os._exit(0)
    sent = set[str]()
    for line in sys.stdin:  # until the other end of the pipe is closed, by its owner or by the kernel
        what, run = line.split()
        sent = sent | {run} if what == "sent" else sent - {run}
    telling = threading.Thread(target=cancel_flow_runs, args=(sent,))
    if sent:
        telling.start()
    end_marked(sys.argv[1])
    if sent:
        telling.join()  # nothing can be imported once this thread has ended, and it imports


if __name__ == "__main__":
    main()
