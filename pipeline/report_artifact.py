"""The report in a run's page: the verdict, a link that a browser opens, the picture and the table, as Markdown."""

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import httpx

from pipeline import password, report_server
from pipeline.commands import TABLE_FILE

PAGE_FILE = Path("results/report/index.html")
METRICS_FILE = Path("results/metrics.json")
MAX_PICTURE_BYTES = 300_000  # of an artifact, which the server's database keeps
SVG_PATTERN = re.compile(r"<svg\b[^>]*\bviewBox=.*?</svg>", re.DOTALL)
COLOUR_DEFINITION = re.compile(r"--([a-z0-9-]+):\s*([^;{}]+);")
COLOUR_USE = re.compile(r"var\(--([a-z0-9-]+)[^)]*\)")
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
NAME_SPACES = f'xmlns="{SVG}" xmlns:xlink="{XLINK}"'
PICTURE_WIDTH = 640
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
        if picture := extract_picture(PAGE_FILE.read_text(encoding="utf-8")):
            yield f"![The report's first picture]({picture})"
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


def extract_picture(page: str) -> str | None:
    """Return the page's first plot as a data URI, in the colours of the light page; None if it has none that is whole.

    Plots have no size and name spaces of their own, and CSS variables of the page as colours.
    """
    figures = page[page.find("<figure") :] if "<figure" in page else page
    if not (found := SVG_PATTERN.search(figures)):
        return None
    colours: dict[str, str] = {}
    for name, value in COLOUR_DEFINITION.findall(page):
        colours.setdefault(name, value.strip())  # the first: those of the light page
    svg = COLOUR_USE.sub(lambda use: colours.get(use[1], "#1d2126"), found[0])
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("<svg", f"<svg {NAME_SPACES}", 1)
    try:
        picture = ElementTree.fromstring(svg)
    except ElementTree.ParseError:  # a page may hold what a picture of its own may not, as &nbsp;
        return None
    picture.attrib.pop("height", None)
    picture.attrib |= {"width": str(PICTURE_WIDTH), "style": "background: #fff"}
    for prefix, space in (("", SVG), ("xlink", XLINK)):
        ElementTree.register_namespace(prefix, space)
    data = ElementTree.tostring(picture)
    return f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}" if len(data) <= MAX_PICTURE_BYTES else None
