"""The reports over HTTP: whose link it is, and that nothing else can be read."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.responses import PlainTextResponse

from pipeline import report_server

SECRET = "aerie:secret"
RUN = "sweep-t4_2_8-at-e009-0123abcd"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a report, a run's with another, and what nobody may read."""
    made = tmp_path / "project"
    for folder, text in ((made, "of main"), (made / ".scratch/runs" / RUN, "of the run")):
        (folder / "results/report").mkdir(parents=True)
        (folder / "results/report/index.html").write_text(text)
        (folder / "results/metrics.json").write_text("private")
    (made / ".prefect").mkdir()
    (made / ".prefect/password").write_text(SECRET)
    (tmp_path / "outside").write_text("private")
    return made


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: dict[str, str]
    text: str


def ask(root: Path, path: str, method: str = "GET") -> Answer:
    """Send a request as a server hands it on; clients take `..` out of a path."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # the client neither sends more nor goes
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": unquote(path), "root_path": "", "headers": [], "query_string": b"",
    }  # fmt: skip
    asyncio.run(report_server.ReportPages(PlainTextResponse("Prefect's"), SECRET, root)(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]).decode())


BASE = f"/report/{report_server.derive_key(SECRET)}"


def test_each_link_opens_the_report_of_its_workspace_in_a_sandbox(root: Path) -> None:
    """Bug: the link was a file:// address, which browsers refuse on a page of a server."""
    for workspace, text in (("main", "of main"), (RUN, "of the run")):
        answer = ask(root, report_server.build_path(SECRET, workspace))
        assert (answer.status_code, answer.text) == (200, text)
        assert "text/html" in answer.headers["content-type"]
        rules = answer.headers["content-security-policy"]
        assert rules.startswith("sandbox allow-scripts allow-downloads; default-src 'none'")
        assert "allow-same-origin" not in rules  # whose scripts could read the password that Prefect's pages keep
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert ask(root, f"{BASE}/main/").text == "of main"
    assert ask(root, "/api/health").text == "Prefect's"


@pytest.mark.parametrize(
    "path",
    [
        "/main/../metrics.json", "/main/%2e%2e/metrics.json", "/main/..%2fmetrics.json", "/main/..%5cmetrics.json",
        "/main/../../.prefect/password", "/main//etc/passwd", "/main/%2fetc%2fpasswd", "/../index.html", "/%2e%2e/index.html",
        "/./index.html", "/main/index.html%00", "/none/index.html", "//index.html", f"/main/{'x' * 300}", "/main/none",
        f"/{RUN}/../../../../../results/metrics.json", "/..%2f..%2fproject/index.html",
    ],
)  # fmt: skip
def test_nothing_but_the_folder_is_readable(root: Path, path: str) -> None:
    answer = ask(root, BASE + path)
    assert answer.status_code == 404 and "private" not in answer.text and SECRET not in answer.text


def test_no_symbolic_link_leads_out(root: Path) -> None:
    report = root / "results/report"
    (report / "metrics.json").symlink_to("../metrics.json")
    (report / "outside").symlink_to(root.parent / "outside")
    (report / "folder").symlink_to(root / ".prefect")
    for name in ("metrics.json", "outside", "folder/password"):
        assert ask(root, f"{BASE}/main/{name}").status_code == 404
    report.rename(root / "elsewhere")  # the folder itself, and one above it
    report.symlink_to(root / "elsewhere")
    assert ask(root, f"{BASE}/main/index.html").status_code == 404
    (root / ".scratch/runs/linked-0123abcd").symlink_to(root / ".scratch/runs" / RUN)
    assert ask(root, f"{BASE}/linked-0123abcd/index.html").status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_is_read_only(root: Path, method: str) -> None:
    assert ask(root, f"{BASE}/main/index.html", method).status_code == 405
    assert (root / "results/report/index.html").read_text() == "of main"
