"""The story: check the parameters, bring every stage up to date, publish the table.

    make ui                        # the server, its pages, and this flow waiting to be run (pipeline/serve.py)
    python -m pipeline.flows       # one run from here, recorded by that server

Prefect shows and schedules; DVC decides what is fresh. So no task here is cached or retried by Prefect: each asks DVC.
"""

import csv
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from prefect import flow, get_client, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed, State

from pipeline import graph
from stages.params import check_raw_exists, load

TABLES = {"benchmark": Path("results/benchmark.csv"), "served": Path("results/served.csv")}


@flow(name="build")
def build() -> State[None]:
    """params.yaml -> the tables of results/; a task for each stage of dvc.yaml, in an order in which they can run."""
    end_with_parent()
    try:
        require_server()
        check_raw_exists(load())
    except ValueError as error:  # for the user to correct: the page shows it without a traceback
        get_run_logger().error(str(error))
        return Failed(message=str(error))
    try:
        states = bring_up_to_date(graph.stages())
    except BaseException:  # a cancelled flow; also when its tasks are on other threads, which see no signal
        graph.end_children()
        raise
    publish(states)
    return verdict(states)


@task(cache_policy=NO_CACHE)
def bring(stage: str) -> Any:
    """One stage, its log line by line, and what DVC made of it as the state's name."""
    try:
        outcome = graph.run_stage(stage, get_run_logger().info)
    except graph.StageError as error:  # a state, not a raise, which would bury the stage's log under Prefect's stack
        return Failed(message=str(error))
    return Completed(name=outcome.capitalize(), message=f"{stage}: {outcome}", data=outcome.value)


def bring_up_to_date(stages: dict[str, list[str]]) -> dict[str, State[str]]:
    """Each stage after what it needs; after a failure all others still run, as with `dvc repro --keep-going`.

    One at a time, in this thread: timed cells must not share the CPU, and a cancellation lands here.
    """
    states: dict[str, State[str]] = {}
    for name, needs in stages.items():
        work = bring.with_options(name=name, task_run_name=name)
        # wait_for draws the edges of the graph in the UI; a task whose needs are not completed ends as NotReady.
        states[name] = work(name, wait_for=[states[need] for need in needs], return_state=True)
    return states


def publish(states: dict[str, State[str]]) -> None:
    """The tables of what was measured, unless they are from before a failure, and what became of each stage."""
    lines = [f"| {name} | {_word(state)} |" for name, state in states.items()]
    create_markdown_artifact(
        "\n".join([f"**{_counts(states)}**", "", "| stage | outcome |", "|---|---|", *lines]),
        key="outcomes",
        description="What DVC made of each stage in this run",
    )
    if not all(state.is_completed() for state in states.values()):
        return
    for key, table in TABLES.items():
        if rows := _rows(table):
            about = f"{table}, rounded; the columns are defined in docs/metrics.md"
            create_table_artifact(rows, key=key, description=about)


def _rows(table: Path) -> list[dict[str, str]]:
    """Its lines; none where nothing was asked of that engine."""
    if not table.exists():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return [{name: _brief(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def verdict(states: dict[str, State[str]]) -> State[None]:
    """The flow's own state: failed with the names of the stages that failed, or completed with the counts."""
    if failed := [name for name, state in states.items() if state.is_failed()]:
        return Failed(message=f"see the log of {', '.join(failed)}; {_counts(states)}")
    return Completed(message=_counts(states))


def _brief(cell: str) -> str:
    """Four digits of a fraction: with all of them no page is wide enough for the columns that matter."""
    try:
        return f"{float(cell):.4g}" if "." in cell else cell
    except ValueError:
        return cell


def _counts(states: dict[str, State[str]]) -> str:
    counts = Counter(map(_word, states.values()))
    return f"{len(states)} stages: " + ", ".join(f"{count} {word}" for word, count in counts.items())


def _word(state: State[str]) -> str:
    return "not run" if state.is_pending() else str(state.name).lower()


def require_server() -> None:
    """Refuse to run against no server, or Prefect would start its throw-away one, which loses a third of the records.

    Raises:
        ValueError: where PREFECT_API_URL is not set or nothing answers there.
    """
    url = PREFECT_API_URL.value()
    todo = "run `make ui` in another terminal, then `export PREFECT_API_URL=http://127.0.0.1:4200/api`"
    if not url:
        raise ValueError(f"PREFECT_API_URL is not set; {todo}")
    with get_client(sync_client=True) as client:
        if problem := client.api_healthcheck():
            raise ValueError(f"no Prefect server answers at PREFECT_API_URL {url} ({problem}); {todo}")


def end_with_parent() -> None:
    """End this run as a cancellation does when the process that serves it is gone: killed, it could not tell us."""
    if parent := multiprocessing.parent_process():

        def watch() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    try:
        require_server()  # before the flow, since calling it is what starts the throw-away server
        check_raw_exists(load())
    except ValueError as error:
        sys.exit(f"aerie: {error}")
    # A kill as an exception, like Ctrl-C, so that the stage at work is ended too; `serve` has Prefect do this.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    state = build(return_state=True)
    sys.exit(0 if state.is_completed() else f"aerie: {state.message}")


if __name__ == "__main__":
    main()
