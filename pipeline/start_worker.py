"""Start a worker that runs stages for runs of another host: `make worker`, `aerie worker`. docs/scheduling.md

    PREFECT_API_URL=http://127.0.0.1:4200/api AERIE_PASSWORD_FILE=~/aerie-password make worker

Arguments are passed to `prefect worker start`.
"""

import os
import signal
import sys
from pathlib import Path

from pipeline import password

POLL_S = "2"  # an environment variable


def main(arguments: list[str]) -> None:
    password.exempt_loopback()
    try:
        os.environ[password.CLIENT] = password.find_password()
        # Only now: Prefect reads its settings from the environment once, when it is imported.
        from pipeline.flows import require_server
        from pipeline.remote.dispatch import POOL

        require_server()
    except ValueError as error:
        sys.exit(f"aerie: {error}")
    os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", POLL_S)
    os.environ.setdefault("PREFECT_WORKER_ENABLE_CANCELLATION", "true")
    os.environ["PWD"] = str(Path.cwd())  # the deployment's pull step runs stages in {{ $PWD }}
    # A shell's background job ignores it, and Prefect ends a worker that gets SIGTERM by SIGINT: it would work on for good.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
