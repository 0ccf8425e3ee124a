"""Call a function in a child process with limits of time and memory, for what may never end: programs in files of others."""

import multiprocessing
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

import psutil

T = TypeVar("T")
LIMIT_S, LIMIT_BYTES = 30, 1 << 29  # of what takes milliseconds and megabytes


def call_limited(function: Callable[[], T], what: str, remedy: str) -> T:
    """Return what `function` returns, in a fork of this process; it must not wait for other threads, which the fork lacks.

    Raises ValueError, which names `what`, where that fails, takes LIMIT_S seconds, or LIMIT_BYTES more than this process has.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(sender, function))
    child.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT_S):
            raise ValueError(f"{what} has not ended in {LIMIT_S} seconds, expected milliseconds; {remedy}")
        found: tuple[T, str] = receiver.recv()
    except EOFError:
        needs = f"needs more than {LIMIT_BYTES >> 20} MiB of memory, expected a few"
        raise ValueError(f"{what} {needs}; {remedy}") from None
    finally:
        child.kill()
        child.join()
        receiver.close()
    if found[1]:
        raise ValueError(f"{what} fails ({found[1]}); {remedy}")
    return found[0]


def _answer(sender: Connection, function: Callable[[], T]) -> None:
    try:
        most = psutil.Process().memory_info().vms + LIMIT_BYTES
        with suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # A parent that is killed can't end its child.
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S + 1,) * 2)
        sender.send((function(), ""))
    except Exception as error:
        if not isinstance(error, MemoryError):
            sender.send((None, " ".join(str(error).split())[:300] or type(error).__name__))
    finally:
        os._exit(0)  # without what an error would print
