"""One process that has imported torch, for a whole run of the tests: stages and pytest's workers are forks of it.

    pytest -n 4 ── starts ──> fork server (stages/telemetry/fork_server.py), which imports PRELOADED once: 5 s of a core
      └─ xdist ── starts ──> client: python tests/warm_process.py ADDRESS ──> a fork that is the worker, and collects

Without xdist the first test that needs the server starts it.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADDRESS_VARIABLE = "AERIE_TEST_WARM_PROCESS"  # for pytest's workers
PRELOADED = ("aiohttp.web", "pydantic.main")  # half a second of each of the engines' doubles


@contextmanager
def start_fork_server() -> Iterator[str]:
    """Yield the address of a server that listens as soon as it has imported torch."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        address = Path(folder) / "socket"
        start = f"from stages.telemetry import fork_server as it; it.PRELOADED += {PRELOADED}; it.main()"
        command = [sys.executable, "-c", start, str(address), str(os.getpid())]
        # Packages may be on the PYTHONPATH, as on a machine without an environment of this project's.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        with subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL) as server:
            try:
                _wait_until_listening(server, address)
                yield str(address)
            finally:
                server.terminate()


def _wait_until_listening(server: subprocess.Popen[bytes], address: Path) -> None:
    while not address.exists():
        assert server.poll() is None, "the fork server of the tests has ended"
        time.sleep(0.05)


def main() -> None:
    """Be a worker of pytest, in a fork: execnet's words after the address are those of `python -u -c PROGRAM`."""
    from stages.telemetry import fork_server

    fork_server.run_module_forked(sys.argv[1], "tests.warm_worker", sys.argv[2:])
    sys.exit("the fork server of the tests has ended")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
