"""The artifacts of a run's page: the plan before it, each stage's outcome, and the results."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.settings import PREFECT_UI_URL
from prefect.states import State

from pipeline.commands import TABLE_FILE

RESULT_TABLE = Path("results/benchmark.csv")
PAGE_FILE = Path("results/report/index.html")
METRICS_FILE = Path("results/metrics.json")


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
