"""Run a server, and end it with every process it started, when the stage closes the pipe or is gone.

    python -I server_guard.py SETTLE_S COMMAND...

Standard input is a pipe whose other end the stage holds: it closes when the stage ends the server, and when the stage is
gone, even by SIGKILL. Processes are found by descent, not by their group: a worker may have a session of its own, and may
have outlived the process that started it (on Linux such orphans become children of the guard, a subreaper).

It imports nothing of the project, whose packages take seconds to import.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

SUBREAPER, DEATHSIG = 36, 1  # of prctl(2)
KILL_S = 10.0  # limit for killing processes that fork faster than they are killed
ROUND_S = 0.02  # between two rounds of killing


def main() -> None:
    settle_s, command = float(sys.argv[1]), sys.argv[2:]
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    wake = _wake_on_child_end()
    _prctl(SUBREAPER, 1)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_prepare_server)
    status = _wait_for_server(server.pid, wake)
    if status is None:
        _signal_descendants(signal.SIGTERM)
        ends = time.monotonic() + settle_s
        while status is None and time.monotonic() < ends:
            time.sleep(ROUND_S)
            status = _reap_children(server.pid)
    late_status = _kill_descendants(server.pid)
    status = late_status if status is None else status
    os._exit(1 if status is None else status if status >= 0 else 128 - status)


def _prepare_server() -> None:
    """Run in the server's process before its program: restore signal handlers, and let it die with the guard."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
    _prctl(DEATHSIG, signal.SIGKILL)


def _wake_on_child_end() -> int:
    """Return a descriptor that can be read from once a child has ended."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the default handler writes nothing
    return read_end


def _wait_for_server(server: int, wake: int) -> int | None:
    """Wait until the server ends, and return its status; None if the stage closes the pipe before."""
    while True:
        status = _reap_children(server)
        if status is not None:
            return status
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if 0 in ready and not os.read(0, 4096):
            return None


def _reap_children(server: int) -> int | None:
    """Reap every ended child, orphans too; return the server's status if it is one of them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def _kill_descendants(server: int) -> int | None:
    """Kill all descendants, round by round; return the server's status if it was among them."""
    status, ends = None, time.monotonic() + KILL_S
    while _signal_descendants(signal.SIGKILL) and time.monotonic() < ends:
        time.sleep(ROUND_S)
        found = _reap_children(server)
        status = status if found is None else found
    return status


def _signal_descendants(name: signal.Signals) -> int:
    """Send a signal to every process that descends from this one; return how many there are."""
    found = psutil.Process().children(recursive=True)
    for process in found:
        with contextlib.suppress(psutil.Error):  # it has ended
            process.send_signal(name)  # psutil checks that the pid was not reused
    return len(found)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # Linux
        libc.prctl(ctypes.c_int(option), *(ctypes.c_ulong(a) for a in (value, 0, 0, 0)))


if __name__ == "__main__":
    main()
