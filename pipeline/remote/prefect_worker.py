"""What a worker does: one stage, for a run of another host, in a folder of its own beside this checkout's cache.

    make worker        # with PREFECT_API_URL of the server whose runs it helps

Or a node of a Ray cluster, whose AERIE_CHECKOUT says where this checkout is.

The files are those of the run that sent it, so this checkout's commit doesn't matter to results; where the remote is, and
who we are there, this checkout's .dvc says.
"""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from prefect import flow, get_client, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed, State

from pipeline import dvc_graph, resources, workspaces
from pipeline.orphan_guard import end_with_parent
from pipeline.progress import ProgressLog
from pipeline.remote import dvc_remote
from pipeline.scheduler import POLL_S
from stages.params.schema import load_params

SENT_FOLDER = Path(".scratch/sent")


@flow(name="stage")
def stage(order: dvc_remote.StageOrder) -> State[None]:
    """A stage of another host's run: its files and what it needs from the remote, what it made back there."""
    end_with_parent()
    _tag_worker()
    return _make_stage(order)


@task(name="stage", cache_policy=NO_CACHE)
def stage_on_ray(order: dvc_remote.StageOrder) -> State[None]:
    """The same on a node of Ray's."""
    checkout = os.environ.get("AERIE_CHECKOUT", "")
    if not Path(checkout, ".dvc").is_dir():
        return Failed(
            message=f"AERIE_CHECKOUT of this node is {checkout!r}, expected a checkout; set it before `ray start`"
        )
    get_run_logger().info(f"on {socket.gethostname()}, {checkout}")
    with contextlib.chdir(checkout):
        return _make_stage(order)


def _make_stage(order: dvc_remote.StageOrder) -> State[None]:
    """In the checkout we stand in. What fails is a state, which whoever sent it reads."""
    say = get_run_logger().info
    with contextlib.ExitStack() as stack:
        try:
            order = dvc_remote.checked(order)
            folder = workspaces.inside(SENT_FOLDER, order.stage)
        except ValueError as error:  # before anything is touched
            return Failed(message=str(error))
        held = stack.enter_context(workspaces.hold_workspace(say, SENT_FOLDER / f"{order.stage}.lock"))
        workspaces.make_bare(folder)
        try:
            stack.enter_context(contextlib.chdir(folder))
            dvc_remote.unpack_order(order)
            stack.enter_context(dvc_graph.guard_run([held.fileno()]))
            lease = stack.enter_context(_wait_for_lease(order.stage))
            files = [held.fileno(), *(file.fileno() for file in lease.files)]
            outcome = dvc_graph.reproduce_stage(order.stage, ProgressLog(order.stage, say), lease.environment, files)
            dvc_remote.push_results(order.stage)
            shutil.rmtree(folder)  # what fails stays, to be looked at, and what was half done in it
        except (dvc_graph.StageError, ValueError) as error:
            return Failed(message=str(error))
    return Completed(name=outcome.capitalize(), message=f"{order.stage}: {outcome}")


def _tag_worker() -> None:
    """Among the run's tags, for whoever waits for us: it asks whether we are still there."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(runtime.flow_run.id, tags=[os.environ["PREFECT__WORKER_NAME"]])


@contextlib.contextmanager
def _wait_for_lease(name: str) -> Iterator[resources.ResourceLease]:
    """What the stage takes of this machine, when it is free. Raises ValueError where this machine hasn't got it."""
    rules = load_params().schedule
    pool = resources.ResourcePool(rules.slots, resources.list_gpus())
    pool.check(name, rules.needs(name))
    try:
        while (lease := pool.take(rules.needs(name))) is None:
            time.sleep(POLL_S)
    finally:
        pool.close()
    try:
        yield lease
    finally:
        lease.release()
