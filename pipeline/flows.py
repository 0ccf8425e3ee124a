"""Prefect flows: check the parameters, bring every stage up to date, publish the table.

    make ui                        # the server, its pages, and the flows, waiting to be run (pipeline/serve.py)
    python -m pipeline.flows       # one run from a terminal, recorded by that server

Prefect shows and schedules; DVC decides which stages are stale. So Prefect caches and retries no task: each asks DVC.
"""

import contextlib
import csv
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path
from typing import Any

from httpx import HTTPStatusError
from prefect import flow, get_client, get_run_logger, runtime, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed, State

from pipeline import dvc_graph, password, processes, recipes, reproduce, resources, workspaces
from pipeline.forms import Changes, RecipeName, Sweep
from pipeline.orphan_guard import end_with_parent
from pipeline.progress import ProgressLog
from pipeline.remote import dispatch
from pipeline.scheduler import StageGraph, run_stages
from stages.params.schema import Params, check_raw_exists, load_params

RESULT_TABLES = {"benchmark": Path("results/benchmark.csv"), "served": Path("results/served.csv")}
REPORT_PAGE = Path("results/report/index.html")
NO_CHANGES = Changes()


@flow(name="build")
def build(changes: Changes = NO_CHANGES) -> State[None]:
    """params.yaml -> the tables of results/: a task for each stage of dvc.yaml, as many at once as `schedule` allows.

    Without changes, in this workspace, one run after another; with changes, in a workspace of its own, beside others.
    """
    return _run_graph(None if changes == NO_CHANGES else lambda: _apply_changes(changes.build_sections(load_params())))


@flow(name="sweep")
def sweep(cells: Sweep) -> State[None]:
    """Trees x checkpoints x workloads, in a workspace of its own; trained checkpoints are not trained again."""
    return _run_graph(lambda: _apply_changes(cells.build_sections(load_params())))


@flow(name="reproduce")
def reproduce_recipe(recipe: RecipeName) -> State[None]:
    """A published experiment, in a workspace of its own, and its results beside the published ones."""
    return _run_graph(lambda: _log_lines(reproduce.take_recipe(recipe)), lambda: _publish_comparison(recipe))


def _apply_changes(sections: dict[str, dict[str, Any]]) -> None:
    _log_lines(iter(recipes.write_sections(sections) or ["nothing differs from params.yaml"]))


def _log_lines(lines: Iterator[str]) -> None:
    for line in filter(None, lines):
        get_run_logger().info(line)


def _publish_comparison(recipe: str) -> None:
    """Publish the comparison as an artifact."""
    table = "\n".join(reproduce.compare_recipe(recipe))
    create_markdown_artifact(table, key="compared", description=f"{recipe}: ours beside the published")


def _run_graph(change: Callable[[], None] | None, publish: Callable[[], None] = lambda: None) -> State[None]:
    """Run the whole graph here, or, with `change`, in a new workspace whose params.yaml that changes; then `publish`."""
    end_with_parent()
    with contextlib.ExitStack() as stack:
        try:
            require_server()
            if change:
                name = workspaces.name_workspace(str(runtime.flow_run.name), str(runtime.flow_run.id))
                stack.enter_context(contextlib.chdir(workspaces.make_workspace(name)))
            held = stack.enter_context(workspaces.exclusive_run(get_run_logger().warning))
            if change:
                change()
            params = load_params()
            check_raw_exists(params)
            hosts = stack.enter_context(dispatch.open_hosts(params.schedule))
            graph, pool = plan_run(params)
        except ValueError as error:  # the user's to correct: the page shows it without a traceback
            get_run_logger().error(str(error))
            return Failed(message=str(error))
        try:
            stack.enter_context(processes.guard_run(held))
            reasons = dvc_graph.explain_stale()
            stack.enter_context(processes.preload_stages(len(reasons)))
            publish_plan(reasons)
            states = run_stale_stages(graph, reasons, pool, hosts)
        except BaseException:  # a cancelled flow: its tasks are on other threads, which get no signal
            if hosts:
                hosts.cancel()
            processes.stop_stages()
            raise
        publish_results(states, reasons)
        if change:
            get_run_logger().info(f"take it over with: aerie promote {Path.cwd().name}")
        state = make_final_state(states)
        try:
            publish()  # also after a failure, from what is there, as `aerie reproduce` does
        except ValueError as error:
            return Failed(message=f"{state.message}; {error}")
        return state


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
def run_stage(stage: str, reasons: list[str], environment: dict[str, str], held: list[int], hosts: Any = None) -> Any:
    """Bring one stage up to date and log it line by line; the state is named after DVC's outcome. Without reasons do nothing.

    With `hosts` it runs there; its log is then in the pages of another run, which this log names.
    """
    if not reasons:
        return _make_completed_state(stage, dvc_graph.Outcome.UNCHANGED)
    log, rules = get_run_logger(), load_params().schedule
    log.info(f"{stage} is stale: {', '.join(reasons)}")
    on_line = ProgressLog(stage, log.info)
    for attempt in range(1, rules.attempts + 1):
        try:
            if hosts:
                return _make_completed_state(
                    stage, dispatch.run_remotely(stage, rules.get_needs(stage), hosts, log.info)
                )
            return _make_completed_state(stage, dvc_graph.reproduce_stage(stage, on_line, environment, held))
        except processes.StageError as error:  # a state: an exception would bury the log under Prefect's stack
            if not error.transient or attempt == rules.attempts:
                return Failed(message=str(error))
            pause = rules.retry_pause_s * 2 ** (attempt - 1)
            log.warning(f"{error}\nthat may pass: attempt {attempt + 1} of {rules.attempts} in {pause:g} s")
            if not processes.wait_before_retry(pause):
                return Failed(message=f"{error}\nnot tried again: the run is cancelled")
    raise AssertionError("the last attempt returns above")


def _make_completed_state(stage: str, outcome: dvc_graph.Outcome) -> State[str]:
    return Completed(name=outcome.capitalize(), message=f"{stage}: {outcome}", data=outcome.value)


def run_stale_stages(
    graph: StageGraph, reasons: dict[str, list[str]], pool: resources.ResourcePool, hosts: dispatch.RemoteHosts | None
) -> dict[str, State[str]]:
    """Run each stage after its upstream stages -> their states. After a failure the others still run (`--keep-going`).

    Tasks run on Prefect's threads and are submitted from this one, where a cancellation is raised. `reasons` is updated
    with those found on the way, so that it holds the reasons of every stage that ran.
    """
    futures: dict[str, Any] = {}

    def start(name: str, lease: resources.ResourceLease, changes: list[str]) -> Future[Any]:
        reasons.pop(name, None)
        if changes:
            reasons[name] = changes
        held = [file.fileno() for file in lease.files]
        stage_task = run_stage.with_options(name=name, task_run_name=name)
        # wait_for draws the edges of the graph in the pages; a task below one that is not completed ends as NotReady.
        upstream = [futures[need] for need in graph.upstream[name]]
        where = hosts if name in graph.remote else None
        futures[name] = stage_task.submit(
            name, changes, lease.environment, held, where, wait_for=upstream, return_state=False
        )
        wrapped: Future[Any] = futures[name].wrapped_future
        return wrapped

    def get_changed(name: str) -> bool | None:
        futures[name].wait()
        state = futures[name].state
        return state.name != dvc_graph.Outcome.UNCHANGED.capitalize() if state.is_completed() else None

    run_stages(graph, reasons, pool, start, get_changed, dvc_graph.explain_stale)
    return {name: futures[name].state for name in graph.upstream}


def publish_plan(reasons: dict[str, list[str]]) -> None:
    """Publish, before anything runs, which stages are stale and what changed."""
    rows = [{"stage": name, "because": "; ".join(changes)} for name, changes in reasons.items()]
    if rows:
        create_table_artifact(rows, key="plan", description="Stale stages before the run; those below them may follow")
    get_run_logger().info(f"{len(rows)} stages are stale" + (f": {', '.join(reasons)}" if rows else ""))


def publish_results(states: dict[str, State[str]], reasons: dict[str, list[str]]) -> None:
    """Publish each stage's outcome and reasons and, unless a stage failed, the tables of results."""
    lines = [
        f"| {name} | {_name_outcome(state)} | {'; '.join(reasons.get(name, []))} |" for name, state in states.items()
    ]
    create_markdown_artifact(
        "\n".join(
            [f"**{_count_outcomes(states)}**", "", "| stage | outcome | what had changed |", "|---|---|---|", *lines]
        ),
        key="outcomes",
        description="The outcome of each stage in this run",
    )
    if not all(state.is_completed() for state in states.values()):
        return
    for key, table in RESULT_TABLES.items():
        if table.exists():  # not if the run measures nothing on that engine
            with table.open(encoding="utf-8", newline="") as file:
                rows = [{name: _shorten_number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
            description = f"{table}, rounded; the columns are defined in docs/metrics.md"
            create_table_artifact(rows, key=key, description=description)
    if REPORT_PAGE.exists():
        create_link_artifact(
            REPORT_PAGE.resolve().as_uri(), "results/report/index.html", key="report", description="The report"
        )


def make_final_state(states: dict[str, State[str]]) -> State[None]:
    """Return the flow's state: failed with the names of the failed stages, or completed with the counts."""
    if failed := [name for name, state in states.items() if state.is_failed()]:
        return Failed(message=f"see the log of {', '.join(failed)}; {_count_outcomes(states)}")
    return Completed(message=_count_outcomes(states))


def _shorten_number(cell: str) -> str:
    """Return a fraction with four digits, so that the columns that matter fit on a page."""
    try:
        return f"{float(cell):.4g}" if "." in cell else cell
    except ValueError:
        return cell


def _count_outcomes(states: dict[str, State[str]]) -> str:
    counts = Counter(map(_name_outcome, states.values()))
    return f"{len(states)} stages: " + ", ".join(f"{count} {word}" for word, count in counts.items())


def _name_outcome(state: State[str]) -> str:
    return "not run" if state.is_pending() else str(state.name).lower()


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
                f"the Prefect server at {url} refuses the password, expected the line in .prefect/password of its workspace; "
                f'export {password.CLIENT}="$(cat .prefect/password)", or for `make worker` {password.FILE}'
            ) from None


def main() -> None:
    try:
        require_server()  # before the flow, whose call starts the temporary server
        check_raw_exists(load_params())
    except ValueError as error:
        sys.exit(f"aerie: {error}")
    # SIGTERM as an exception, like Ctrl-C, so that a running stage is ended too; in `serve` Prefect does this.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    state = build(return_state=True)
    sys.exit(0 if state.is_completed() else f"aerie: {state.message}")


if __name__ == "__main__":
    main()
