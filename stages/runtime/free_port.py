"""Return a port that stays free until a child process binds it, perhaps minutes later.

A port that the kernel gives (a bind to port 0) lies in the ephemeral range, from which every outgoing connection of the machine
takes its own: SGLang binds its port after loading and capturing, 100 s later, and by then a connection may hold it. Nor may
another stage that starts servers find it: a port is reserved, by a lock of the kernel on a byte of one file, until this process
ends.
"""

import fcntl
import functools
import random
import socket
from pathlib import Path
from typing import TextIO

from stages.runtime.machine import open_lock_file, open_user_folder

HOST = "127.0.0.1"
FIRST_PORT = 10_000  # services that people install mostly lie below
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
DEFAULT_FIRST_EPHEMERAL = 32_768  # of Linux; that of macOS and Windows, 49,152, lies above it
MAX_TRIES = 1_000


def find_free_port() -> int:
    """Return a free port of the loopback address below the ephemeral range, reserved for this process.

    Where no port below the ephemeral range is found, the kernel chooses one inside it.
    """
    candidates = range(FIRST_PORT, read_first_ephemeral())
    generator = random.SystemRandom()  # processes seeded alike must not find the same port
    for _ in range(MAX_TRIES if candidates else 0):
        port = generator.choice(candidates)
        if _bind(port) is not None and _reserve(port):
            return port
    while True:
        given = _bind(0)
        if given is not None and _reserve(given):
            return given


def read_first_ephemeral() -> int:
    """Return the first port that the kernel gives to outgoing connections."""
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_FIRST_EPHEMERAL


def _bind(port: int) -> int | None:
    """Return the port that a bind to `port` holds for a moment; None if it is in use."""
    with socket.socket() as tried:
        try:
            tried.bind((HOST, port))
        except OSError:
            return None
        return tried.getsockname()[1]


def _reserve(port: int) -> bool:
    """Return whether this process could reserve the port: no process of this user had."""
    if port in _reserved:  # a process may lock the same byte twice
        return False
    try:
        fcntl.lockf(_open_ports_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _reserved.add(port)
    return True


_reserved: set[int] = set()


@functools.cache
def _open_ports_file() -> TextIO:
    """Return the file whose bytes are the ports. It stays open: a process that closes it anywhere loses all its locks."""
    return open_lock_file(open_user_folder(), "ports.lock")
