"""Run one stage for a run of another host, in a folder of its own that uses this checkout's DVC cache.

    make worker        # with PREFECT_API_URL of the server whose runs it helps

The files are those of the run that sent the stage, so this checkout's commit does not matter to results; its .dvc holds
the remote's address and credentials.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from prefect import flow, get_client, get_run_logger, runtime
from prefect.states import Completed, Failed, State

from pipeline import dvc_graph, processes, resources, run_pages, workspaces
from pipeline.orphan_guard import end_with_parent
from pipeline.remote import dvc_remote
from pipeline.scheduler import POLL_S
from stages.params.schema import load_params

SENT_FOLDER = Path(".scratch/sent")


@flow(name="stage")
def stage(order: dvc_remote.StageOrder) -> State[None]:
    """Run a stage of another host's run: pull its files and inputs from the remote, push its results there."""
    end_with_parent()
    _tag_worker()
    return _run_order(order)


def _run_order(order: dvc_remote.StageOrder) -> State[None]:
    """Run a stage with the checkout in the current folder. A failure is returned as a state, which the sending run reads."""
    log = get_run_logger().info
    with contextlib.ExitStack() as stack:
        try:
            folder = workspaces.resolve_inside(SENT_FOLDER, order.stage)
        except ValueError as error:  # before anything is touched
            return Failed(message=str(error))
        held = stack.enter_context(workspaces.hold_workspace(log, SENT_FOLDER / f"{order.stage}.lock"))
        workspaces.make_bare_project(folder)
        try:
            stack.enter_context(contextlib.chdir(folder))
            dvc_remote.unpack_order(order)
            stack.enter_context(processes.guard_run(held))
            lease = stack.enter_context(_wait_for_lease(order.stage))
            files = [*held, *(file.fileno() for file in lease.files)]
            outcome = dvc_graph.reproduce_stage(
                order.stage, run_pages.ProgressLog(order.stage, log), lease.environment, files
            )
            dvc_remote.push_results(order.stage)
            shutil.rmtree(folder)  # after a failure the folder stays, to be looked at and resumed
        except processes.StageError as error:
            return Failed(name=dvc_remote.TRANSIENT_STATE if error.transient else None, message=error.line)
        except ValueError as error:
            return Failed(message=str(error))
    return Completed(name=outcome.capitalize(), message=f"{order.stage}: {outcome}")


def _tag_worker() -> None:
    """Add the worker's name to the run's tags, by which the sending run finds out whether the worker is alive."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(runtime.flow_run.id, tags=[os.environ["PREFECT__WORKER_NAME"]])


@contextlib.contextmanager
def _wait_for_lease(name: str) -> Iterator[resources.ResourceLease]:
    """Lease what the stage needs when it is free. Raises ValueError if this machine does not have it."""
    rules = load_params().schedule
    pool = resources.ResourcePool(rules.slots, resources.list_gpus())
    pool.check_request(name, rules.get_needs(name))
    try:
        while (lease := pool.try_lease(rules.get_needs(name))) is None:
            time.sleep(POLL_S)
    finally:
        pool.release_gate()
    try:
        yield lease
    finally:
        lease.release()
