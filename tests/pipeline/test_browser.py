"""Prefect's pages in a real browser, as a user meets them: the form, the run it starts, the table at its end."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline import password
from tests.pipeline.conftest import make_served
from tests.pipeline.test_flows import Server, wait_for

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install -e '.[test]' to test the pages in a browser"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium on this machine: apt-get install chromium, or your own"
)
PATIENCE = 120_000  # milliseconds: a machine at other work


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(make_served(tmp_path_factory.mktemp("browsed")), str(tmp_path_factory.mktemp("prefect")))
    try:
        wait_for(started.up, 600)
        yield started
    finally:
        started.process.terminate()
        started.process.wait(60)


@pytest.fixture
def page(server: Server, tmp_path: Path) -> Iterator[Any]:
    """Which finds no other host, as on a machine without a network."""
    with playwright.sync_playwright() as started:
        alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--no-proxy-server", alone])
        opened = browser.new_page(viewport={"width": 1280, "height": 1200})
        opened.set_default_timeout(PATIENCE)
        yield opened
        browser.close()


def log_in(server: Server, page: Any) -> None:
    """As a person does, with the line of the file that `make ui` names."""
    box = page.get_by_placeholder("admin:pass")  # Prefect's hint of user:password
    box.fill(server.password)
    page.get_by_role("button", name="Login").click()
    box.wait_for(state="detached")


def test_without_the_password_the_pages_show_nothing_but_the_login(server: Server, page: Any) -> None:
    """Bug: the pages asked nobody for a password."""
    page.goto(f"http://127.0.0.1:{server.port}/deployments")
    box = page.get_by_placeholder("admin:pass")
    box.fill("aerie:wrong")
    # By the answer: Prefect's page says "Authentication failed" before anybody has tried, too.
    with page.expect_response(lambda answer: answer.url.endswith("/admin/version") and answer.status == 401):
        page.get_by_role("button", name="Login").click()
    assert box.is_visible() and page.locator("a[href*='/deployments/deployment/']").count() == 0
    log_in(server, page)
    page.locator("a[href*='/deployments/deployment/']", has_text="sweep").first.wait_for()


def test_the_second_pages_ask_for_the_password_too(server: Server, page: Any) -> None:
    """PREFECT_SERVER_UI_V2_ENABLED, or a cookie, chooses them."""
    page.goto(f"http://127.0.0.1:{server.port}/v2/deployments")
    log_in(server, page)
    page.get_by_text("sweep", exact=True).first.wait_for()


class ForeignPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>theirs</p>")


@pytest.fixture
def foreign() -> Iterator[str]:
    """A page of another origin: of this machine too, for newer browsers keep those of others from asking 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ForeignPage) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_port}/"
        site.shutdown()


ATTACK = """async ([url, mode, type, authorization]) => {
    const headers = {'content-type': type, ...(authorization ? {authorization} : {})};
    try { return (await fetch(url, {method: 'POST', mode, headers, body: '{}'})).status } catch (error) { return 'refused' }
}"""


def test_a_page_of_another_origin_starts_no_run(server: Server, page: Any, foreign: str) -> None:
    """Bug: a page of any site could POST create_flow_run, with a command among its parameters."""
    deployment = server.ask("deployments/name/build/build")["id"]
    before = len(server.ask("flow_runs/filter", {}))
    page.goto(foreign)
    url = f"http://127.0.0.1:{server.port}/api/deployments/{deployment}/create_flow_run"
    known = password.build_auth_header(server.password)["Authorization"]
    assert [page.evaluate(ATTACK, [url, "cors", "application/json", sent]) for sent in ("", known)] == ["refused"] * 2
    page.evaluate(ATTACK, [url, "no-cors", "text/plain", ""])  # is sent without a preflight, and its answer hidden
    assert len(server.ask("flow_runs/filter", {})) == before


def test_a_run_is_started_from_the_form_and_its_table_is_found(server: Server, page: Any) -> None:
    assert server.ended(server.run())["type"] == "COMPLETED"
    page.goto(f"http://127.0.0.1:{server.port}/deployments")
    log_in(server, page)
    page.locator("a[href*='/deployments/deployment/']", has_text="sweep").first.click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    # descriptions are drawn as Markdown, which took t<num_steps>_... for tags and showed only the t
    page.get_by_text("tSTEPS_TOPK_TOKENS, as t8_2_16; a chain is t8_1_9").wait_for()
    page.get_by_role("button", name="Add item").click()
    seen = {run["id"] for run in server.ask("flow_runs/filter", {})}
    page.locator("textarea").first.fill("8_2_16")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("does not match").first.wait_for()  # refused by the form: no run
    assert {run["id"] for run in server.ask("flow_runs/filter", {})} == seen
    page.locator("textarea").first.fill("t8_2_16")
    page.get_by_role("button", name="Submit").click()
    (run,) = wait_for(lambda: [run for run in server.ask("flow_runs/filter", {}) if run["id"] not in seen])
    assert run["parameters"]["cells"]["trees"] == ["t8_2_16"]
    state = server.ended(run["id"])
    assert state["type"] == "COMPLETED", state["message"]
    page.goto(f"http://127.0.0.1:{server.port}/runs/flow-run/{run['id']}")
    page.get_by_text("Artifacts", exact=True).click()
    page.get_by_text("benchmark", exact=True).first.click()
    page.get_by_text("t5_1_6", exact=True).first.wait_for()
    page.get_by_text("2.512", exact=True).first.wait_for()
    assert json.loads(server.artifacts(run["id"])["benchmark"]["data"]) == [{"tree": "t5_1_6", "tau": "2.512"}]
