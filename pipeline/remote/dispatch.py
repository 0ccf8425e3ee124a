"""Stages that are made elsewhere, by the workers of a Prefect pool or on a Ray cluster: sent, watched, collected.

A worker is `make worker` in a checkout of its own; what it runs is pipeline/remote/prefect_worker.py. Files travel by the DVC remote
(pipeline/remote/dvc_remote.py), so the two hosts share that and the Prefect server, and nothing else.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from uuid import UUID

from httpx import HTTPError
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.runtime import task_run
from prefect.states import Crashed

from pipeline import dvc_graph, orphan_guard
from pipeline.remote import dvc_remote
from stages.params.schedule import Schedule, StageResources

POOL = "aerie-stages"
DEPLOYMENT = "stage/stage"  # in prefect.yaml
ASK_EVERY = 1.0  # seconds, about all runs together
ASK_WORKERS_EVERY = 10.0
TAKEN_TIMEOUT_S = 180.0  # seconds from a worker's promise to the run's first word; a host under load takes some ten
PAGE = 200  # runs of one answer, at most

_sending = threading.Lock()  # one at a time: each is a process that reads the graph


class RemoteHosts(Protocol):
    """Who makes stages elsewhere."""

    def make(self, order: dvc_remote.StageOrder, needs: StageResources, say: Callable[[str], object]) -> None:
        """Until it is made. Raises StageError: as `graph.run_stage`, and where the host is lost, which another may mend."""

    def cancel(self) -> None:
        """All that is being made."""


@contextmanager
def open_hosts(rules: Schedule) -> Iterator[RemoteHosts | None]:
    """Those of schedule.runner. Raises ValueError where there are none, or no remote to meet at."""
    if rules.runner == "local":
        yield None
        return
    dvc_remote.check_remote()
    if rules.runner == "workers":
        yield PoolWorkers()
        return
    try:
        from pipeline.remote.ray_cluster import RayCluster
    except ModuleNotFoundError:
        raise ValueError("schedule.runner is ray, and prefect-ray is not installed: pip install -e '.[ray]'") from None
    with RayCluster(rules.ray_address) as cluster:
        yield cluster


def make_remotely(
    name: str, needs: StageResources, hosts: RemoteHosts, say: Callable[[str], object]
) -> dvc_graph.Outcome:
    """One stage, made elsewhere and collected; from the cache, where anybody has made it before.

    Raises:
        StageError: as `RemoteHosts.make`.
    """
    with _sending:
        said = dvc_graph.run_module(["pipeline.remote.dvc_remote", "offer", name])
    order = json.loads(
        next(line for line in said if line.startswith(dvc_remote.ORDER_PREFIX)).removeprefix(dvc_remote.ORDER_PREFIX)
    )
    if order is None:
        return dvc_graph.reproduce_stage(name, say)
    hosts.make(dvc_remote.StageOrder(**order), needs, say)
    with _sending:
        dvc_graph.run_module(["pipeline.remote.dvc_remote", "collect", name])
    dvc_graph.reproduce_stage(name, say)
    return dvc_graph.Outcome.RAN


class PoolWorkers:
    """Of the pool, in whose pages each stage is a run; whichever thread finds the last answer old asks about all of them."""

    def __init__(self) -> None:
        """Raises ValueError where no worker is there."""
        with get_client(sync_client=True) as client:
            try:
                client.read_deployment_by_name(DEPLOYMENT)
                online = [one for one in client.read_workers_for_work_pool(POOL) if one.status == WorkerStatus.ONLINE]
            except ObjectNotFound:
                online = []
        if not online:
            raise ValueError(
                f"params.yaml: schedule.runner is workers, and no worker of the pool {POOL} is online; start one on each "
                "host, `make worker` in a checkout there, or write local"
            )
        self._lock = threading.Lock()
        self._runs: dict[UUID, FlowRun | None] = {}
        self._asked = self._asked_workers = float("-inf")

    def make(self, order: dvc_remote.StageOrder, needs: StageResources, say: Callable[[str], object]) -> None:
        """`needs` are met on the worker's machine, by the same rules as here."""
        name = order.stage
        try:
            with get_client(sync_client=True) as client:
                run = client.create_flow_run_from_deployment(
                    client.read_deployment_by_name(DEPLOYMENT).id,
                    name=name,
                    parameters={"order": order.model_dump(exclude_unset=True)},
                    parent_task_run_id=UUID(str(task_run.id)),
                )
        except HTTPError as error:
            raise dvc_graph.StageError(f"{name} could not be sent: {error}", transient=True) from None
        say(f"sent to the pool {POOL}: run {run.id}")
        ended = self._wait(run.id, say)
        assert ended.state
        if ended.state.type != StateType.COMPLETED:
            message = f"{name}, made by {_get_worker_name(ended)}, {ended.state.type.lower()}: {ended.state.message}"
            raise dvc_graph.StageError(
                message, ended.state.type == StateType.CRASHED or dvc_graph.is_transient(message)
            )
        say(f"made by {_get_worker_name(ended)}; collecting")

    def cancel(self) -> None:
        """At once, so without the lock, which a thread may hold that waits for the server."""
        runs = list(map(str, self._runs))
        try:
            orphan_guard.cancel_flow_runs(runs)
        except HTTPError:  # our guard knows of them too, and tells the server when we are gone
            return
        for run in runs:
            dvc_graph.tell_guard(f"back {run}")

    def _wait(self, run: UUID, say: Callable[[str], object]) -> FlowRun:
        """Until it is over. Raises StageError where this run is cancelled meanwhile."""
        with self._lock:
            self._runs[run] = None
            dvc_graph.tell_guard(f"sent {run}")
        begun = False
        while dvc_graph.wait_before_retry(ASK_EVERY):
            found = self._look(run)
            if found and found.state and found.state.is_running() and found.tags and not begun:
                begun = True
                say(f"begun by {_get_worker_name(found)}")
            if found and found.state and found.state.is_final():
                with self._lock:
                    del self._runs[run]
                    dvc_graph.tell_guard(f"back {run}")
                return found
        raise dvc_graph.StageError("not waited for: the run is cancelled")

    def _look(self, run: UUID) -> FlowRun | None:
        with self._lock:
            if time.monotonic() - self._asked > ASK_EVERY:
                try:
                    self._ask()
                except HTTPError:  # a server under load says 503 for a while; the runs go on meanwhile
                    pass
                self._asked = time.monotonic()
            return self._runs[run]

    def _ask(self) -> None:
        with get_client(sync_client=True) as client:
            ids = list(self._runs)
            for begin in range(0, len(ids), PAGE):
                asked = FlowRunFilter.model_validate({"id": {"any_": ids[begin : begin + PAGE]}})
                self._runs |= {one.id: one for one in client.read_flow_runs(flow_run_filter=asked)}
            if time.monotonic() - self._asked_workers > ASK_WORKERS_EVERY:
                self._close_lost(client)
                self._asked_workers = time.monotonic()

    def _close_lost(self, client: Any) -> None:
        """Runs whose worker is gone, with its host perhaps, say nothing any more."""
        gone = {one.name for one in client.read_workers_for_work_pool(POOL) if one.status == WorkerStatus.OFFLINE}
        for run in filter(None, self._runs.values()):
            if run.state and run.state.is_pending():
                lost = (time.time() - run.state.timestamp.timestamp()) > TAKEN_TIMEOUT_S
            else:
                lost = bool(run.state and run.state.is_running() and gone & set(run.tags))
            if lost:
                crashed: Any = Crashed(message=f"nothing is heard of {_get_worker_name(run)}")
                client.set_flow_run_state(run.id, crashed, force=True)


def _get_worker_name(run: FlowRun) -> str:
    """The worker, which its first word puts among the run's tags."""
    return ", ".join(run.tags) or "no worker"
