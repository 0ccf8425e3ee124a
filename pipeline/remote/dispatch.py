"""Send stages to other hosts, the workers of a Prefect pool; watch them and collect their results.

A worker is `make worker` in a checkout of its own and runs pipeline/remote/prefect_worker.py. Files travel through the DVC
remote (pipeline/remote/dvc_remote.py), so the hosts share that remote and the Prefect server, and nothing else.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, WorkerStatus
from prefect.exceptions import ObjectAlreadyExists
from prefect.runtime import task_run
from prefect.states import Crashed, State
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker
from ruamel.yaml import YAML

from pipeline import dvc_graph, orphan_guard, processes
from pipeline.remote import dvc_remote, prefect_worker
from stages.params.schedule import Schedule

POOL = "aerie-stages"
STAGE = "stage"  # in prefect.yaml; the deployments beside it are run by `make ui`
POLL_RUNS_S = 1.0  # one request for all runs
POLL_WORKERS_S = 10.0
START_TIMEOUT_S = 180.0  # from a worker's claim of a run to the run's start; a host under load takes some ten seconds
PAGE_SIZE = 200  # most runs that one answer of the server holds

_transfer_lock = threading.Lock()  # one offer or collection at a time: each is a process that reads the graph


def find_hosts(rules: Schedule) -> "PoolWorkers | None":
    """Return the hosts of schedule.runner, None for local. Raises ValueError if there are none, or no DVC remote."""
    if rules.runner == "local":
        return None
    dvc_remote.check_remote()
    return PoolWorkers()


def run_remotely(name: str, hosts: "PoolWorkers", log: Callable[[str], object]) -> dvc_graph.Outcome:
    """Run one stage on another host and collect its results, or restore it if a host has run it before.

    Raises StageError as `PoolWorkers.run_order`.
    """
    with _transfer_lock:
        lines = processes.run_module(["pipeline.remote.dvc_remote", "offer", name])
    order = json.loads(
        next(line for line in lines if line.startswith(dvc_remote.ORDER_PREFIX)).removeprefix(dvc_remote.ORDER_PREFIX)
    )
    if order is None:
        return dvc_graph.reproduce_stage(name, log)
    hosts.run_order(dvc_remote.StageOrder(**order), log)
    with _transfer_lock:
        processes.run_module(["pipeline.remote.dvc_remote", "collect", name])
    dvc_graph.reproduce_stage(name, log)
    return dvc_graph.Outcome.RAN


def read_deployments() -> dict[str, dict[str, Any]]:
    """Return the deployments of prefect.yaml by name, so that both ways to deploy offer the same."""
    found = YAML(typ="safe").load(Path(__file__).parents[1].with_name("prefect.yaml").read_text(encoding="utf-8"))
    return {deployment["name"]: deployment for deployment in found["deployments"]}


def deploy_stage() -> None:
    """Create the work pool for workers of other hosts, and the deployment that runs send there, unless they exist.

    Workers run it in the folder in which they were started.
    """
    deployment = read_deployments()[STAGE]
    pool = deployment["work_pool"]["name"]
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template))
        client.create_deployment(
            client.create_flow(prefect_worker.stage),
            deployment["name"],
            description=deployment["description"],
            work_pool_name=pool,
            entrypoint="pipeline.remote.prefect_worker.stage",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}],
            parameter_openapi_schema=parameter_schema(prefect_worker.stage).model_dump_for_openapi(),
        )


class PoolWorkers:
    """Workers of the Prefect pool, for which each stage is a flow run. One thread at a time polls the state of all runs."""

    def __init__(self) -> None:
        """Look for workers. Raises ValueError if none is online."""
        deploy_stage()
        with get_client(sync_client=True) as client:
            workers = client.read_workers_for_work_pool(POOL)
        if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
            raise ValueError(f"no worker of the pool {POOL} is online; start one by `make worker`")
        self._lock = threading.Lock()
        self._runs: dict[UUID, FlowRun | None] = {}
        self._polled_runs = self._polled_workers = float("-inf")

    def run_order(self, order: dvc_remote.StageOrder, log: Callable[[str], object]) -> None:
        """Run a stage to its end on a worker, which leases what it needs on its own machine by the same rules as here.

        Raises StageError if it failed, or, transient, if its host is lost.
        """
        name = order.stage
        try:
            with get_client(sync_client=True) as client:
                run = client.create_flow_run_from_deployment(
                    client.read_deployment_by_name(f"{STAGE}/{STAGE}").id,
                    name=name,
                    parameters={"order": order.model_dump(exclude_unset=True)},
                    parent_task_run_id=UUID(str(task_run.id)),
                )
        except HTTPError as error:
            raise processes.StageError(f"{name} could not be sent: {error}", transient=True) from None
        log(f"sent to the pool {POOL}: run {run.id}")
        ended = self._wait_for_end(run.id, log)
        assert ended.state
        check_completed(f"{name}, made by {_get_worker_name(ended)}", ended.state)
        log(f"made by {_get_worker_name(ended)}; collecting")

    def cancel(self) -> None:
        """Cancel every run. Does not take the lock, which a thread that waits for the server may hold."""
        runs = list(map(str, self._runs))
        try:
            orphan_guard.cancel_flow_runs(runs)
        except HTTPError:  # the guard knows of them too, and cancels them when this process has ended
            return
        for run in runs:
            processes.notify_guard(f"back {run}")

    def _wait_for_end(self, run: UUID, log: Callable[[str], object]) -> FlowRun:
        """Return the run when it has ended. Raises StageError if the run that sent it is cancelled meanwhile."""
        with self._lock:
            self._runs[run] = None
            processes.notify_guard(f"sent {run}")
        started = False
        while processes.wait_before_retry(POLL_RUNS_S):
            found = self._get_run(run)
            if found and found.state and found.state.is_running() and found.tags and not started:
                started = True
                log(f"begun by {_get_worker_name(found)}")
            if found and found.state and found.state.is_final():
                with self._lock:
                    del self._runs[run]
                    processes.notify_guard(f"back {run}")
                return found
        raise processes.StageError("not waited for: the run is cancelled")

    def _get_run(self, run: UUID) -> FlowRun | None:
        """Return the run's last known state, polled if it is older than a second."""
        with self._lock:
            if time.monotonic() - self._polled_runs > POLL_RUNS_S:
                try:
                    self._poll_runs()
                except HTTPError:  # a server under load answers 503 for a while; the runs continue
                    pass
                self._polled_runs = time.monotonic()
            return self._runs[run]

    def _poll_runs(self) -> None:
        with get_client(sync_client=True) as client:
            ids = list(self._runs)
            for start in range(0, len(ids), PAGE_SIZE):
                run_filter = FlowRunFilter.model_validate({"id": {"any_": ids[start : start + PAGE_SIZE]}})
                self._runs |= {flow_run.id: flow_run for flow_run in client.read_flow_runs(flow_run_filter=run_filter)}
            if time.monotonic() - self._polled_workers > POLL_WORKERS_S:
                self._crash_lost_runs(client)
                self._polled_workers = time.monotonic()

    def _crash_lost_runs(self, client: Any) -> None:
        """Mark runs as crashed whose worker, perhaps with its host, is gone: they report nothing more themselves."""
        gone = {
            worker.name for worker in client.read_workers_for_work_pool(POOL) if worker.status == WorkerStatus.OFFLINE
        }
        for run in filter(None, self._runs.values()):
            if run.state and run.state.is_pending():
                lost = (time.time() - run.state.timestamp.timestamp()) > START_TIMEOUT_S
            else:
                lost = bool(run.state and run.state.is_running() and gone & set(run.tags))
            if lost:
                crashed: Any = Crashed(message=f"nothing is heard of {_get_worker_name(run)}")
                client.set_flow_run_state(run.id, crashed, force=True)


def check_completed(subject: str, state: State[Any]) -> None:
    """Check the final state of a stage on another host. Raises StageError unless it is completed."""
    if not state.is_completed():
        message = f"{subject}, {state.type.lower()}: {state.message}"
        may_pass = state.is_crashed() or state.name == dvc_remote.TRANSIENT_STATE or processes.is_transient(message)
        raise processes.StageError(message, may_pass)


def _get_worker_name(run: FlowRun) -> str:
    """Return the worker's name, which the run itself adds to its tags when it starts."""
    return ", ".join(run.tags) or "no worker"
