"""Return a port that stays free until a child process binds it, perhaps minutes later.

A port that the kernel gives (a bind to port 0) lies in the ephemeral range, from which every outgoing connection of the machine
takes its own: SGLang binds its port after loading and capturing, 100 s later, and by then a connection may hold it. Two
processes that start servers at once choose at random among some 20,000 ports.
"""

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
FIRST_PORT = 10_000  # services that people install mostly lie below
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
DEFAULT_FIRST_EPHEMERAL = 32_768  # of Linux; that of macOS and Windows, 49,152, lies above it
MAX_TRIES = 1_000

_given: set[int] = set()  # by this process, which binds none of them itself


def find_free_port() -> int:
    """Return a free port of the loopback address below the ephemeral range, never the same twice.

    Where no port below the ephemeral range is found, the kernel chooses one inside it.
    """
    candidates = range(FIRST_PORT, read_first_ephemeral())
    generator = random.SystemRandom()  # processes seeded alike must not find the same port
    for _ in range(MAX_TRIES if candidates else 0):
        port = generator.choice(candidates)
        if port not in _given and _bind(port) is not None:
            _given.add(port)
            return port
    given = _bind(0)
    assert given is not None, "the kernel gives a free port"
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
