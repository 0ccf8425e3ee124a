"""Prefect flows: check the parameters, bring every stage up to date, publish the table.

    make ui      # the server, its pages, and the flows, waiting to be run (pipeline/serve.py)

Prefect shows and schedules; DVC decides which stages are stale. So Prefect caches and retries no task: each asks DVC.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from httpx import HTTPStatusError
from prefect import allow_failure, flow, get_client, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed, Pending, State

from pipeline import (
    commands,
    dvc_graph,
    password,
    processes,
    promotion,
    recipes,
    reproduce,
    resources,
    run_pages,
    workspaces,
)
from pipeline.forms import Changes, RecipeName, Sweep
from pipeline.orphan_guard import end_with_parent
from pipeline.remote import dispatch
from pipeline.scheduler import StageGraph, run_stages
from stages.params.schema import Params, load_params

NO_CHANGES = Changes()


@flow(name="build")
def build(changes: Changes = NO_CHANGES) -> State[None]:
    """params.yaml -> the tables of results/: a task for each stage of dvc.yaml, as many at once as `schedule` allows.

    Without changes, in this workspace, one run after another; with changes, in a workspace of its own, beside others.
    """
    change = None if changes == NO_CHANGES else lambda: _apply_changes(changes.build_sections(load_params()))
    return _run_graph(run_pages.name_build(changes), change)


@flow(name="sweep")
def sweep(cells: Sweep) -> State[None]:
    """Trees x checkpoints x workloads, in a workspace of its own; trained checkpoints are not trained again."""
    return _run_graph(run_pages.name_sweep(cells), lambda: _apply_sweep(cells))


@flow(name="reproduce")
def reproduce_recipe(recipe: RecipeName) -> State[None]:
    """A published experiment, in a workspace of its own, and its results beside the published ones."""
    return _run_graph(
        f"reproduce {recipe}",
        lambda: _log_lines(reproduce.take_recipe(recipe)),
        lambda: create_markdown_artifact(
            "\n".join(reproduce.compare_recipe(recipe)),
            key="compared",
            description=f"{recipe}: ours beside the published",
        ),
    )


def _apply_changes(sections: dict[str, dict[str, Any]]) -> None:
    _log_lines(iter(recipes.write_sections(sections) or ["nothing differs from params.yaml"]))


def _apply_sweep(cells: Sweep) -> None:
    """Write the sweep's axes into params.yaml, and for `aerie promote` which of them params.yaml there is to have as well."""
    sections = cells.build_sections()
    promotion.note_added(Path.cwd(), sections)
    _apply_changes(sections)


def _log_lines(lines: Iterator[str]) -> None:
    for line in filter(None, lines):
        get_run_logger().info(line)


@dataclass(frozen=True)
class PreparedRun:
    """A run of the graph that may begin: the workspace is held, the hosts are reached, the graph is planned."""

    name: str
    root: Path  # where the flow was started
    has_own_workspace: bool
    held: list[int]  # open files that hold the workspace
    graph: StageGraph
    pool: resources.ResourcePool
    hosts: dispatch.PoolWorkers | None


def _run_graph(
    name: str, change: Callable[[], None] | None, publish: Callable[[], object] = lambda: None
) -> State[None]:
    """Run the whole graph here, or, with `change`, in a new workspace whose params.yaml that changes; then `publish`."""
    end_with_parent()
    with contextlib.ExitStack() as stack:
        try:
            run = _prepare_run(stack, name, change)
        except ValueError as error:  # the user's to correct: the page shows it without a traceback
            return _fail(str(error))
        state = make_final_state(_run_stages(stack, run))
        try:
            publish()  # also after a failure, from what is there, as `aerie reproduce` does
        except ValueError as error:
            return _fail(f"{state.message}; {error}")
        get_run_logger().log(logging.INFO if state.is_completed() else logging.ERROR, str(state.message))
        if run.has_own_workspace and state.is_completed():
            _offer_promotion(run.root, run.name)
        return state


def _fail(message: str) -> State[None]:
    """Log an error and return the failed state of a flow."""
    get_run_logger().error(message)
    return Failed(message=" ".join(message.split()))  # as it is shown


def _prepare_run(stack: contextlib.ExitStack, name: str, change: Callable[[], None] | None) -> PreparedRun:
    """Name the run, enter its workspace and hold it until `stack` ends, and plan the graph.

    Raises ValueError for parameters, files that they name, hosts or resources that the user must correct.
    """
    root = Path.cwd()
    require_server()
    name = run_pages.rename_run(name)
    if change:
        name = workspaces.name_workspace(name, str(runtime.flow_run.id))
        stack.enter_context(contextlib.chdir(workspaces.make_workspace(name)))
    held = stack.enter_context(workspaces.hold_workspace(get_run_logger().warning))
    if change:
        change()
    params = commands.check_run_params()
    hosts = dispatch.find_hosts(params.schedule)
    graph, pool = plan_run(params)
    return PreparedRun(name, root, change is not None, held, graph, pool, hosts)


def _run_stages(stack: contextlib.ExitStack, run: PreparedRun) -> dict[str, State[str]]:
    """Run the stale stages and publish the plan and the results; return the states of all stages."""
    try:
        stack.enter_context(processes.guard_run(run.held))
        reasons = dvc_graph.explain_stale()
        if reasons and dvc_graph.INPUTS_STAGE in run.graph.upstream:
            reasons = {dvc_graph.INPUTS_STAGE: ["it always runs first"]} | reasons
        if not run.has_own_workspace:
            run_pages.rename_run(f"{run.name}: {run_pages.join_names(list(reasons), 'stages') or 'nothing stale'}")
        if reasons.keys() - run.graph.remote:
            stack.enter_context(processes.preload_stages())
        run_pages.publish_plan(reasons)
        states = run_stale_stages(run.graph, reasons, run.pool, run.hosts)
    except BaseException:  # a cancelled flow: its tasks are on other threads, which get no signal
        if run.hosts:
            run.hosts.cancel()
        processes.stop_stages()
        raise
    run_pages.publish_results(states, reasons)
    return states


def _offer_promotion(root: Path, name: str) -> None:
    """Log the command that takes over the results, or why it would refuse."""
    with contextlib.chdir(root):
        obstacle = promotion.find_obstacle(name)
    get_run_logger().info(
        f"can't be taken over as it is: {obstacle}" if obstacle else f"take it over with: aerie promote {name}"
    )


def plan_run(params: Params) -> tuple[StageGraph, resources.ResourcePool]:
    """Return the graph and this machine's resources. Raises ValueError if a stage asks for more than this machine has."""
    upstream = dvc_graph.list_stages()
    pool = resources.ResourcePool(params.schedule.slots, resources.list_gpus())
    needs = {name: params.schedule.get_needs(name) for name in upstream}
    rules = params.schedule
    remote = frozenset(
        name for name in upstream if rules.runner != "local" and name.partition("@")[0] in rules.remote_stages
    )
    for name, need in needs.items():
        if name not in remote:
            pool.check_request(name, need)
    return StageGraph(upstream, needs, remote), pool


@task(cache_policy=NO_CACHE)
def run_stage(
    stage: str,
    reasons: list[str],
    environment: dict[str, str],
    held: list[int],
    hosts: Any = None,
    failed_above: str | None = None,
) -> Any:
    """Bring one stage up to date and log it line by line; the state is named after DVC's outcome. Without reasons do nothing.

    With `hosts` it runs there; its log is then in the pages of another run, which this log names. Below a stage that has
    failed, `failed_above`, the state says so.
    """
    if failed_above:  # the state that Prefect has for this, whose own message is an upstream task's id
        return Pending(name="NotReady", message=f"not run: {failed_above} failed")
    if not reasons:
        return _make_completed_state(stage, dvc_graph.Outcome.UNCHANGED)
    log, rules = get_run_logger(), load_params().schedule
    log.info(f"{stage} is stale: {', '.join(reasons)}")
    on_line = run_pages.ProgressLog(stage, log.info)
    for attempt in range(1, rules.attempts + 1):
        try:
            if hosts:
                return _make_completed_state(stage, dispatch.run_remotely(stage, hosts, log.info))
            return _make_completed_state(stage, dvc_graph.reproduce_stage(stage, on_line, environment, held))
        except processes.StageError as error:  # a state: an exception would bury the log under Prefect's stack
            if not error.transient or attempt == rules.attempts:
                return Failed(message=error.line)
            pause = rules.retry_pause_s * 2 ** (attempt - 1)
            log.warning(f"{error.line}; that may pass: attempt {attempt + 1} of {rules.attempts} in {pause:g} s")
            if not processes.wait_before_retry(pause):
                return Failed(message=f"{error.line}; not tried again: the run is cancelled")
    raise AssertionError("the last attempt returns above")


def _make_completed_state(stage: str, outcome: dvc_graph.Outcome) -> State[str]:
    return Completed(name=outcome.capitalize(), message=f"{stage}: {outcome}", data=outcome.value)


def run_stale_stages(
    graph: StageGraph, reasons: dict[str, list[str]], pool: resources.ResourcePool, hosts: dispatch.PoolWorkers | None
) -> dict[str, State[str]]:
    """Run each stage after its upstream stages -> their states. After a failure the others still run (`--keep-going`).

    Tasks run on Prefect's threads and are submitted from this one, where a cancellation is raised. `reasons` is updated
    with those found on the way, so that it holds the reasons of every stage that ran.
    """
    futures: dict[str, Any] = {}
    failed_above: dict[str, str] = {}  # of a stage that cannot run: the stage that failed

    def start(name: str, lease: resources.ResourceLease, changes: list[str]) -> Future[Any]:
        reasons.pop(name, None)
        if changes:
            reasons[name] = changes
        held = [file.fileno() for file in lease.files]
        stage_task = run_stage.with_options(name=name, task_run_name=name)
        # wait_for draws the edges of the graph in the pages; allow_failure, since run_stage itself says what has failed.
        upstream = [allow_failure(futures[need]) for need in graph.upstream[name]]
        failed = [
            failed_above.get(need, need) for need in graph.upstream[name] if not futures[need].state.is_completed()
        ]
        if failed:
            failed_above[name] = failed[0]
        where = hosts if name in graph.remote else None
        futures[name] = stage_task.submit(
            name, changes, lease.environment, held, where, failed_above.get(name), wait_for=upstream, return_state=False
        )
        wrapped: Future[Any] = futures[name].wrapped_future
        return wrapped

    def get_changed(name: str) -> bool | None:
        futures[name].wait()
        state = futures[name].state
        return state.name != dvc_graph.Outcome.UNCHANGED.capitalize() if state.is_completed() else None

    run_stages(graph, reasons, pool, start, get_changed, dvc_graph.explain_stale)
    return {name: futures[name].state for name in graph.upstream}


def make_final_state(states: dict[str, State[str]]) -> State[None]:
    """Return the flow's state: failed with the error of each failed stage, or completed; with the counts."""
    counts = run_pages.count_outcomes(states)
    if failed := [f"{name} failed: {state.message}" for name, state in states.items() if state.is_failed()]:
        return Failed(message="; ".join([*failed, counts]))
    return Completed(message=counts)


def require_server() -> None:
    """Check that a server answers. Without one Prefect starts a temporary server, which loses a third of the records.

    Raises:
        ValueError: PREFECT_API_URL is not set, nothing answers there, or it refuses the password.
    """
    url = PREFECT_API_URL.value()
    todo = "run `make ui` in another terminal, and export PREFECT_API_URL and PREFECT_API_AUTH_STRING as it says"
    if not url:
        raise ValueError(f"PREFECT_API_URL is not set; {todo}")
    with get_client(sync_client=True) as client:
        if problem := client.api_healthcheck():
            raise ValueError(f"no Prefect server answers at PREFECT_API_URL {url} ({problem}); {todo}")
        try:
            client.api_version()  # the health check above is answered without a password
        except HTTPStatusError as error:
            if error.response.status_code != HTTPStatus.UNAUTHORIZED:
                raise
            raise ValueError(
                f"the Prefect server at {url} refuses the password, expected the line in .prefect/password of its workspace, in "
                f"{password.CLIENT} or a file that {password.FILE} names"
            ) from None
