"""A run in Prefect's pages: its name, by what it does; its plan and results; a stage's log, and its bar as progress."""

import csv
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger, runtime
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.settings import PREFECT_UI_URL
from prefect.states import State

from pipeline.commands import TABLE_FILE
from pipeline.dvc_output import PROGRESS_PATTERN
from pipeline.forms import Changes, Sweep

# The pages propose a name of random words, which says nothing; a name that a person typed stays.
GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi psi
omega"""
# Prefect's server makes two words, as phenomenal-wombat; its pages a letter and more, as xi3-kianira-band.
RANDOM_NAME = re.compile(rf"[a-z]+-[a-z]+|({'|'.join(GREEK.split())})\d*(-[A-Za-z0-9']+)+")
MAX_NAMES = 3
NIGHTLY = "nightly"  # the deployment of prefect.yaml that a clock starts
RESULT_TABLE = Path("results/benchmark.csv")
PAGE_FILE = Path("results/report/index.html")
METRICS_FILE = Path("results/metrics.json")
PROGRESS_INTERVAL_S = 3.0
# What Prefect's engines log of a state's end: its representation, and `NoneType: None` below that of a failed task. The
# state itself and its message are shown, and a stage's own log says the error.
ENGINE_LINES = ("Task run failed with ", "Finished in state ")
for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(lambda record: not str(record.msg).startswith(ENGINE_LINES))


def name_sweep(cells: Sweep) -> str:
    """Return a name such as `sweep t4_2_8 at e009`: trees, and what else the form names."""
    name = f"sweep {join_names(cells.trees, 'trees')}"
    if cells.checkpoints:
        name += f" at {join_names(cells.checkpoints, 'checkpoints')}"
    if cells.workloads:
        name += f" on {join_names(cells.workloads, 'workloads')}"
    return f"{name}, served" if cells.engine == "served" else name


def name_build(changes: Changes) -> str:
    """Return `build`, and what differs from params.yaml."""
    keys = [f"{key} {value}" for key, value in changes.other.items()]
    parts = [
        join_names(changes.trees, "trees"),
        changes.epochs and f"epochs {', '.join(map(str, changes.epochs))}",
        changes.workloads and f"on {join_names(changes.workloads, 'workloads')}",
        join_names([text if len(text) <= 60 else text.partition(" ")[0] for text in keys], "keys"),
    ]
    word = NIGHTLY if runtime.deployment.name == NIGHTLY else "build"
    return " ".join([word, ", ".join(part for part in parts if part)]).rstrip()


def join_names(names: Sequence[str], plural: str) -> str:
    """Return the names, or their number if they would fill the line."""
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} {plural}"


def rename_run(name: str) -> str:
    """Give this run the name, unless a person has named it -> its name."""
    now = str(runtime.flow_run.name)
    if not RANDOM_NAME.fullmatch(now):
        return now
    with get_client(sync_client=True) as client:
        client.update_flow_run(UUID(str(runtime.flow_run.id)), name=name)
    return name


def publish_plan(reasons: dict[str, list[str]]) -> None:
    """Publish, before anything runs, which stages are stale and what changed."""
    rows = [{"stage": name, "because": "; ".join(changes)} for name, changes in reasons.items()]
    if rows:
        create_table_artifact(rows, key="plan", description="Stale stages before the run; those below them may follow")
    get_run_logger().info(
        f"{len(rows)} stale stage{'s' * (len(rows) != 1)}" + (f": {', '.join(reasons)}" if rows else "")
    )


def publish_results(states: dict[str, State[str]], reasons: dict[str, list[str]]) -> None:
    """Publish each stage's outcome and reasons and, unless a stage failed, the report and the tables of results."""
    lines = [
        f"| {name} | {name_outcome(state)} | "
        f"{str(state.message).removeprefix('not run: ') if state.is_pending() else '; '.join(reasons.get(name, []))} |"
        for name, state in states.items()
    ]
    create_markdown_artifact(
        "\n".join(
            [f"**{count_outcomes(states)}**", "", "| stage | outcome | what had changed |", "|---|---|---|", *lines]
        ),
        key="outcomes",
        description="The outcome of each stage in this run",
    )
    if not all(state.is_completed() for state in states.values()):
        return
    if RESULT_TABLE.exists():
        with RESULT_TABLE.open(encoding="utf-8", newline="") as file:
            rows = [{name: _shorten_number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
        description = f"{RESULT_TABLE}, rounded; the columns are defined in docs/metrics.md"
        create_table_artifact(rows, key="benchmark", description=description)
    if report := "\n\n".join(list_report_parts()):
        made = create_markdown_artifact(report, key="report", description="The report: what to launch, and the table")
        if pages := PREFECT_UI_URL.value():  # None of a run without a server of its own, which has no pages
            get_run_logger().info(f"the report: {pages}/artifacts/artifact/{made}")


def list_report_parts() -> Iterator[str]:
    """Yield the verdict, where the page lies, and the table, as Markdown; nothing of what the results here lack."""
    if METRICS_FILE.exists() and (verdict := json.loads(METRICS_FILE.read_text(encoding="utf-8")).get("verdict")):
        yield f"**{' '.join(verdict['text'].split())}**"
    if PAGE_FILE.exists():
        yield f"The whole report is {PAGE_FILE.resolve()}, a file of this machine."
    if TABLE_FILE.exists():
        yield f"```text\n{TABLE_FILE.read_text(encoding='utf-8').rstrip()}\n```"


def count_outcomes(states: dict[str, State[str]]) -> str:
    counts = Counter(map(name_outcome, states.values()))
    return f"{len(states)} stages: " + ", ".join(f"{count} {word}" for word, count in counts.items())


def name_outcome(state: State[str]) -> str:
    return "not run" if state.is_pending() else str(state.name).lower()


def _shorten_number(cell: str) -> str:
    """Return a fraction with four digits, so that the columns that matter fit on a page."""
    try:
        return f"{float(cell):.4g}" if "." in cell else cell
    except ValueError:
        return cell


class ProgressLog:
    """A log whose progress bar lines become a progress artifact, and nothing else."""

    def __init__(self, stage: str, log: Callable[[str], object]) -> None:
        self._key = re.sub(r"[^a-z0-9]+", "-", f"progress-{stage}".lower())
        self._stage, self._log = stage, log
        self._artifact: Any = None
        self._updated = float("-inf")

    def __call__(self, line: str) -> None:
        found = PROGRESS_PATTERN.search(line)
        if not found:
            self._log(line)
            return
        percent = float(found["percent"])
        if percent < 100 and time.monotonic() - self._updated < PROGRESS_INTERVAL_S:
            return
        self._updated = time.monotonic()
        description = f"{self._stage}: {found['counts']}"
        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=self._key, description=description)
        else:
            update_progress_artifact(self._artifact, percent, description=description)
