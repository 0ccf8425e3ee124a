"""Call a function in a child process with limits of time and memory, for what may never end: programs in files of others."""

import math
import multiprocessing
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

import psutil

T = TypeVar("T")


def call_limited(function: Callable[[], T], limit_s: float, limit_bytes: int) -> T:
    """Return what `function` returns, in a fork of this process; it must not wait for other threads, which the fork lacks.

    Raises:
        TimeoutError: where it has not returned after `limit_s` seconds.
        MemoryError: where it needs `limit_bytes` more than this process has, or its process ends for another reason.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(sender, function, limit_s, limit_bytes))
    child.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise TimeoutError
        found: T = receiver.recv()
    except EOFError:
        raise MemoryError from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    return found


def _answer(sender: Connection, function: Callable[[], T], limit_s: float, limit_bytes: int) -> None:
    try:
        most = psutil.Process().memory_info().vms + limit_bytes
        with suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # A parent that is killed can't end its child.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s) + 1,) * 2)
        sender.send(function())
    finally:
        os._exit(0)  # without what an error would print
