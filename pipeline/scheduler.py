"""In which order stages run, and which at once. Knows neither Prefect nor DVC: who calls starts them and asks."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from pipeline.resources import ResourceLease, ResourcePool
from stages.params.schedule import StageResources

POLL_S = 0.2  # seconds, where another run holds what is needed

StaleReasons = list[str]  # what changed; none: the stage is up to date


@dataclass(frozen=True)
class StageGraph:
    """Stages with the stages they need, in an order in which they can run, and what each takes of the machine.

    Those `away` are made elsewhere, as many at once as are ready, and take nothing of this one.
    """

    upstream: dict[str, list[str]]
    needs: dict[str, StageResources]
    away: frozenset[str] = frozenset()


def run_stages(
    graph: StageGraph,
    why: dict[str, StaleReasons],
    pool: ResourcePool,
    start: Callable[[str, ResourceLease, StaleReasons], "Future[Any]"],
    ended_as: Callable[[str], bool | None],
    ask: Callable[[list[str]], dict[str, StaleReasons]],
) -> None:
    """Every stage once, after those it needs, when the pool has what it takes; exclusive ones when nothing else can run.

    `why` is as all stages are before. Whatever is below a stage that changed something is asked about again, in one call
    for those that can begin together. `start` is called of every stage, also of one that can't run since what it needs has
    failed: it then has no reason to. `ended_as` says of a stage whether it changed anything, None where it failed.
    """
    open_, ended = list(graph.upstream), dict[str, bool | None]()
    judged: dict[str, StaleReasons] = {}
    running: dict[Future[Any], tuple[str, ResourceLease]] = {}

    def turn(name: str) -> int:
        """What takes nothing first, what takes the machine last."""
        return 1 + graph.needs[name].exclusive if judged[name] and name not in graph.away else 0

    try:
        while open_ or running:
            ready = [name for name in open_ if all(need in ended for need in graph.upstream[name])]
            judged |= _explain_stages(graph, [name for name in ready if name not in judged], why, ended, ask)
            for name in sorted(ready, key=turn):
                if turn(name) == 2 and any(at_work not in graph.away for at_work, _ in running.values()):
                    break
                lease = pool.take(graph.needs[name]) if turn(name) else ResourceLease()
                if lease:
                    open_.remove(name)
                    running[start(name, lease, judged[name])] = (name, lease)
            if not running:  # another run holds what is needed
                time.sleep(POLL_S)
            # Also while something runs: what the ready wait for may be another run's.
            done, _ = wait(running, timeout=POLL_S if ready else None, return_when=FIRST_COMPLETED)
            for future in done:
                name, lease = running.pop(future)
                lease.release()
                ended[name] = ended_as(name)
    finally:
        pool.close()


def _explain_stages(
    graph: StageGraph,
    new: list[str],
    why: dict[str, StaleReasons],
    ended: dict[str, bool | None],
    ask: Callable[[list[str]], dict[str, StaleReasons]],
) -> dict[str, StaleReasons]:
    """Why each of `new` runs, asked again where something above it has changed since; no reason below a failure."""
    above = {name: [ended[need] for need in graph.upstream[name]] for name in new}
    again = [name for name in new if None not in above[name] and any(above[name])]
    now = ask(again) if again else {}
    return {name: [] if None in above[name] else (now if name in again else why).get(name, []) for name in new}
