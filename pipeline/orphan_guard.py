"""Wait until the run that started this process has ended, then end what it has left: python -m pipeline.orphan_guard MARK

That is its stages on this machine, found by their mark, the flow runs on workers of which it has written `sent RUN` to
this process and not `back RUN`, and the temporary folders of which it has written `made FOLDER`. The other way round,
`end_with_parent` ends a flow's process with the one that serves it.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable
from uuid import UUID

from pipeline.processes import end_marked

PARENT_POLL_S = 0.5  # seconds


def end_with_parent() -> None:
    """End this run like a cancellation when the process that serves it is gone: killed outright, it cannot cancel the run."""
    parent, number = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        if parent:
            parent.join()
        while os.getppid() == number and not parent:  # a work pool's worker starts a flow as a command
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def cancel_flow_runs(runs: Iterable[str]) -> None:
    """Cancel those of these flow runs that have not ended; their worker then ends the stages it has started."""
    from prefect import get_client  # 1 s to import, which most guards never need
    from prefect.states import Cancelling

    with get_client(sync_client=True) as client:
        for run in runs:
            client.set_flow_run_state(UUID(run), Cancelling())


def main() -> None:
    if os.fork():
        os._exit(0)
    sent, made = set[str](), set[str]()
    for line in sys.stdin:  # until the other end of the pipe is closed, by its owner or by the kernel
        event, name = line.rstrip("\n").split(maxsplit=1)
        if event == "made":
            made.add(name)
        else:
            sent = sent | {name} if event == "sent" else sent - {name}
    cancelling = threading.Thread(target=cancel_flow_runs, args=(sent,))
    if sent:
        cancelling.start()
    end_marked(sys.argv[1])
    for folder in made:  # of a server that was among them
        shutil.rmtree(folder, ignore_errors=True)
    if sent:
        cancelling.join()  # before the main thread ends, after which nothing can be imported


if __name__ == "__main__":
    main()
