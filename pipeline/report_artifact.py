"""The report in a run's page: the verdict, a link that a browser opens, and the table, as Markdown."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from pipeline import password, report_server
from pipeline.commands import TABLE_FILE

PAGE_FILE = Path("results/report/index.html")
METRICS_FILE = Path("results/metrics.json")
ANSWER_TIMEOUT_S = 5.0


def render_report() -> str:
    """Return the Markdown of the report in this folder; empty if there is neither a page nor a table."""
    return "\n\n".join(_list_parts())


def _list_parts() -> Iterator[str]:
    if verdict := read_verdict():
        yield f"**{verdict}**"
    if PAGE_FILE.exists():
        url = find_report_url()
        yield (
            f"[The whole report]({url})"
            if url
            else f"The whole report is {PAGE_FILE.resolve()}, a file of this machine."
        )
    if TABLE_FILE.exists():
        yield f"```text\n{TABLE_FILE.read_text(encoding='utf-8').rstrip()}\n```"


def read_verdict() -> str | None:
    """Return the line of results/metrics.json that says what to launch, on one line; None if the results have none."""
    try:
        text = json.loads(METRICS_FILE.read_text(encoding="utf-8"))["verdict"]["text"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return " ".join(str(text).split())


def find_report_url() -> str | None:
    """Return the address at which the run's server shows the report of this folder; None if it shows none."""
    server, secret = os.environ.get("PREFECT_API_URL", ""), os.environ.get(password.CLIENT)
    if not (server and secret):
        return None
    folder = Path.cwd()
    is_run = folder.parts[-3:-1] == report_server.RUNS_FOLDER.parts
    origin = urlsplit(server)
    path = report_server.build_path(secret, folder.name if is_run else report_server.MAIN)
    url = f"{origin.scheme}://{origin.netloc}{path}"
    try:  # a server that `make ui` did not start shows none; that of another workspace shows its own
        answer = httpx.head(url, timeout=ANSWER_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return None
    same = answer.headers.get("content-length") == str(PAGE_FILE.stat().st_size)
    return url if answer.is_success and same else None
