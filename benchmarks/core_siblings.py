"""Which CPUs share a core, measured: virtual machines often hide it, and then two busy processes may land on one core.

    python3 -m benchmarks.core_siblings [SECONDS]     # of each pair; prints how fast a CPU is beside each other busy one

A process counts on one CPU, alone and while another process counts on a second CPU. Two CPUs of one core slow each other to
about 0.6; CPUs of two cores do not. Other users of the host do as well, so a pair is judged by the fastest of three. The last
line names one CPU of each core, for `taskset -c` before a server and its client: an engine's scheduler is one busy process, its
HTTP server another, and the client a third.
"""

import multiprocessing as mp
import os
import sys
import time
from multiprocessing.synchronize import Event

SHARED = 0.85  # of the speed alone: less is a shared core
TRIES = 3


def main(seconds: float = 0.1) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    print(f"{time.strftime('%Y-%m-%d')}: {len(cpus)} CPUs, {seconds} s a pair")
    alone = {cpu: max(count(cpu, seconds) for _ in range(TRIES)) for cpu in cpus}
    print("alone, of the fastest: " + " ".join(f"{cpu}:{alone[cpu] / max(alone.values()):.2f}" for cpu in cpus))
    cores: list[list[int]] = []
    for cpu in cpus:
        beside = {core[0]: max(count_beside(core[0], cpu, seconds) for _ in range(TRIES)) for core in cores}
        shares = {first: beside[first] / alone[first] for first in beside}
        if shares and min(shares.values()) < SHARED:
            nearest = min(shares, key=lambda first: shares[first])
            print(f"{cpu} shares a core with {nearest}, which has {shares[nearest]:.2f} of its speed beside it")
            next(core for core in cores if core[0] == nearest).append(cpu)
        else:
            cores.append([cpu])
    print(f"{len(cores)} cores: taskset -c {','.join(str(core[0]) for core in cores)}")


def count(cpu: int, seconds: float) -> int:
    """Return how far a loop on this CPU counts."""
    os.sched_setaffinity(0, {cpu})
    counted, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        counted += 1
    return counted


def count_beside(cpu: int, other: int, seconds: float) -> int:
    """Return how far a loop on `cpu` counts while another one runs on `other`."""
    begun, ended = mp.Event(), mp.Event()
    busy = mp.Process(target=keep_busy, args=(other, begun, ended))
    busy.start()
    begun.wait()
    try:
        return count(cpu, seconds)
    finally:
        ended.set()
        busy.join()


def keep_busy(cpu: int, begun: Event, ended: Event) -> None:
    os.sched_setaffinity(0, {cpu})
    begun.set()
    while not ended.is_set():
        pass


if __name__ == "__main__":
    main(*(float(word) for word in sys.argv[1:2]))
