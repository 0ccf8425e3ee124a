"""Decide in which order stages run, and which at the same time. Knows neither Prefect nor DVC: callbacks start and ask."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from pipeline.resources import ResourceLease, ResourcePool
from stages.params.schedule import StageResources

POLL_S = 0.2  # while another run holds what is needed

StaleReasons = list[str]  # what changed; empty: the stage is up to date


@dataclass(frozen=True)
class StageGraph:
    """Stages with the stages they depend on, in an order in which they can run, and what each takes of the machine.

    Stages of `remote` run on other hosts, as many at once as are ready, and take nothing of this machine.
    """

    upstream: dict[str, list[str]]
    needs: dict[str, StageResources]
    remote: frozenset[str] = frozenset()


def run_stages(
    graph: StageGraph,
    reasons: dict[str, StaleReasons],
    pool: ResourcePool,
    start: Callable[[str, ResourceLease, StaleReasons], "Future[Any]"],
    get_changed: Callable[[str], bool | None],
    explain: Callable[[list[str]], dict[str, StaleReasons]],
) -> None:
    """Run every stage once, after its upstream stages and as soon as the pool has what it needs. Of stages that are
    ready at the same time, exclusive ones come last.


    `reasons` holds the stale stages before the run. A stage below one that changed something is explained again, in one
    call for all stages that become ready together. `start` is called for every stage; without reasons where an upstream
    stage failed. `get_changed` returns whether an ended stage changed anything, None if it failed.
    """
    waiting, ended = list(graph.upstream), dict[str, bool | None]()
    explained: dict[str, StaleReasons] = {}
    running: dict[Future[Any], tuple[str, ResourceLease]] = {}

    def get_rank(name: str) -> int:
        """Return 0 for a stage that takes nothing of this machine, 2 for one that takes all of it, else 1."""
        return 1 + graph.needs[name].exclusive if explained[name] and name not in graph.remote else 0

    try:
        while waiting or running:
            ready = [name for name in waiting if all(need in ended for need in graph.upstream[name])]
            new = {name: [ended[need] for need in graph.upstream[name]] for name in ready if name not in explained}
            again = [name for name, changed in new.items() if None not in changed and any(changed)]
            latest = {**reasons, **{name: [] for name in again}, **(explain(again) if again else {})}
            explained |= {name: [] if None in changed else latest.get(name, []) for name, changed in new.items()}
            for name in sorted(ready, key=get_rank):
                if get_rank(name) == 2 and any(other not in graph.remote for other, _ in running.values()):
                    break
                lease = pool.try_lease(graph.needs[name]) if get_rank(name) else ResourceLease()
                if lease:
                    waiting.remove(name)
                    running[start(name, lease, explained[name])] = (name, lease)
            if not running:  # another run holds what is needed
                time.sleep(POLL_S)
            # With a timeout also while stages run: a ready stage may wait for a lock of another run.
            done, _ = wait(running, timeout=POLL_S if ready else None, return_when=FIRST_COMPLETED)
            for future in done:
                name, lease = running.pop(future)
                lease.release()
                ended[name] = get_changed(name)
    finally:
        pool.release_gate()
