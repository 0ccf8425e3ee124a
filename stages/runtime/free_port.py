"""Return a port that stays free until a child process binds it, perhaps minutes later.

A port that the kernel gives (a bind to port 0) lies in the ephemeral range, from which every outgoing connection of the machine
takes its own: SGLang binds its port after loading and capturing, 100 s later, and by then a connection may hold it. Two
processes that start servers at once choose at random among some 20,000 ports.
"""

import random
import socket
from contextlib import suppress
from pathlib import Path

HOST = "127.0.0.1"
FIRST_PORT = 10_000  # services that people install mostly lie below
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
DEFAULT_FIRST_EPHEMERAL = 32_768  # of Linux; that of macOS and Windows, 49,152, lies above it

_given: set[int] = set()  # by this process, which binds none of them itself


def find_free_port() -> int:
    """Return a free port of the loopback address, below the ephemeral range where one is, and never the same twice."""
    candidates = list(set(range(FIRST_PORT, read_first_ephemeral())) - _given)
    random.SystemRandom().shuffle(candidates)  # processes seeded alike must not find the same port
    for port in [*candidates, 0]:
        with socket.socket() as tried, suppress(OSError):  # in use
            tried.bind((HOST, port))
            _given.add(port)
            return int(tried.getsockname()[1])
    raise AssertionError("the kernel gives a free port")


def read_first_ephemeral() -> int:
    """Return the first port that the kernel gives to outgoing connections."""
    with suppress(OSError, ValueError, IndexError):
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    return DEFAULT_FIRST_EPHEMERAL
