"""Requests that the Prefect server of `make ui` refuses, sent to a real server as an attacker's page would send them."""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from pipeline import password
from tests.pipeline.conftest import make_served
from tests.pipeline.test_flows import REPO, Server, run_server, wait_for

FOREIGN = "http://evil.example"
EVENTS = "api/events/out"


@pytest.fixture(scope="module")
def server(prefect_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    project = make_served(tmp_path_factory.mktemp("secured"))
    with run_server(project, tmp_path_factory.mktemp("attacked"), prefect_tables) as started:
        yield started


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str


def send(server: Server, method: str, path: str, headers: dict[str, str], body: object = None) -> Answer:
    """Send exactly these headers; `Host` too, where it is among them."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    found = Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
    connection.close()
    return found


def known(server: Server) -> dict[str, str]:
    return {"Content-Type": "application/json", **password.build_auth_header(server.password)}


def create_flow_run(server: Server) -> str:
    return f"/api/deployments/{server.ask('deployments/name/build/build')['id']}/create_flow_run"


def runs(server: Server) -> list[str]:
    return [run["id"] for run in server.ask("flow_runs/filter", {})]


def test_a_request_without_the_password_or_with_a_wrong_one_is_refused(server: Server) -> None:
    """Bug: the server had no password, so every process and every page on this machine could start flows."""
    path, plain = create_flow_run(server), {"Content-Type": "application/json"}
    for headers in (plain, plain | password.build_auth_header("aerie:wrong"), plain | password.build_auth_header("")):
        assert send(server, "POST", path, headers, {}).status == 401
        assert send(server, "GET", "/api/admin/version", headers).status == 401
    assert runs(server) == []
    assert send(server, "GET", "/api/admin/version", known(server)).status == 200


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/redoc", "/api/openapi.json", "/api/docs/"])
def test_the_description_of_the_api_is_not_served(server: Server, path: str) -> None:
    """Bug: FastAPI's pages were answered without the password: every call that starts something, with its fields."""
    assert send(server, "GET", path, {}).status == 404


def test_a_text_plain_body_without_the_password_starts_no_run(server: Server) -> None:
    """Bug: a form of another site sends text/plain without a preflight, and Prefect read it as JSON."""
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "text/plain", "Origin": FOREIGN}):
        assert send(server, "POST", create_flow_run(server), headers, {}).status in (401, 403)
    assert runs(server) == []


def test_a_request_of_another_origin_is_refused_even_with_the_password(server: Server) -> None:
    """Bug: as above; CORS alone hides the answer, and the run would have started."""
    refused = send(server, "POST", create_flow_run(server), known(server) | {"Origin": FOREIGN}, {})
    assert refused.status == 403 and "access-control-allow-origin" not in refused.headers
    assert runs(server) == []


@pytest.mark.parametrize("host", ["evil.example", "evil.example:4200", "127.0.0.1.evil.example", "0.0.0.0", ""])
def test_a_foreign_host_name_is_refused_even_with_the_password(server: Server, host: str) -> None:
    """Bug: a page of a site whose name was rebound to 127.0.0.1 was of the server's own origin to a browser."""
    for path in ("/api/admin/version", "/api/health", "/ui-settings", "/"):
        assert send(server, "GET", path, known(server) | {"Host": host}).status == 400


def test_a_websocket_without_the_password_or_of_another_origin_is_closed(server: Server) -> None:
    """Bug: browsers let any page open WebSockets to any host, and the server's events went to all of them."""
    url, prefect = f"ws://127.0.0.1:{server.port}/{EVENTS}", [Subprotocol("prefect")]
    for token in (None, "wrong"):
        with connect(url, subprotocols=prefect, proxy=None) as opened:
            opened.send(json.dumps({"type": "auth", "token": token}))
            with pytest.raises(ConnectionClosed):
                opened.recv(60)
    with pytest.raises(InvalidStatus, match="403"):
        connect(url, subprotocols=prefect, origin=Origin(FOREIGN), proxy=None)
    with connect(url, subprotocols=prefect, proxy=None) as opened:
        opened.send(json.dumps({"type": "auth", "token": server.password}))
        assert json.loads(opened.recv(60)) == {"type": "auth_success"}


@pytest.fixture(scope="module")
def ran(server: Server) -> str:
    """A run that has ended, so that a flow, a guard and stages have printed something."""
    server.project.write_stage("middle", "print('names', [name for name in os.environ if 'AUTH_STRING' in name])")
    run = server.run()
    assert server.ended(run)["type"] == "COMPLETED"
    server.project.write_stage("middle")
    return run


@pytest.mark.usefixtures("ran")
def test_the_password_is_in_a_file_of_ours_alone_and_in_no_log_or_command_line(server: Server) -> None:
    file = Path(server.home, password.NAME)
    assert file.stat().st_mode & 0o777 == 0o600
    secret = server.password.partition(":")[2]
    assert len(secret) >= 40
    others = [path for path in Path(server.home).rglob("*") if path.is_file() and path != file]
    assert [path for path in [server.log, *others] if secret.encode() in path.read_bytes()] == []
    ours = psutil.Process(server.process.pid)
    assert [p.pid for p in [ours, *ours.children(recursive=True)] if secret in " ".join(p.cmdline())] == []
    assert f"this shows: cat {os.path.relpath(file, server.project.root)}" in server.log.read_text()


def test_stages_are_not_given_the_password(server: Server, ran: str) -> None:
    """Bug to be: a stage starts engines, graders and others' code, which would inherit it."""
    assert wait_for(lambda: [line for line in server.messages(ran) if line.startswith("names")]) == ["names []"]


def test_a_recipe_is_one_of_recipes_even_where_the_form_is_not_asked(server: Server) -> None:
    """Bug: only the page's form held the name to the list; the flow took any path that ends in .yaml."""
    from pydantic import TypeAdapter, ValidationError

    from pipeline.forms import RecipeName

    for name in ("/tmp/theirs.yaml", "../theirs.yaml", "none", "weather-tiny; touch x"):
        with pytest.raises(ValidationError, match="there is no recipe"):
            TypeAdapter(RecipeName).validate_python(name)


def test_a_client_without_the_right_password_is_told_so_in_one_line(server: Server, tmp_path: Path) -> None:
    """As on another host: with the server's address, and nothing of its PREFECT_HOME."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "AERIE"))}
    env |= {"PYTHONPATH": str(REPO), "PREFECT_HOME": str(tmp_path / "home"), "PREFECT_API_AUTH_STRING": "aerie:wrong"}
    env |= {"PREFECT_API_URL": f"http://127.0.0.1:{server.port}/api"}
    command = [sys.executable, "-m", "pipeline.start_worker"]
    found = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1 and "refuses the password" in found.stderr, found.stderr
    assert found.stderr.count("\n") == 1 and "Traceback" not in found.stderr


def test_the_password_is_kept_between_starts_and_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    made, file = password.read_or_create_password(tmp_path)
    assert password.read_or_create_password(tmp_path) == (made, file)
    other = tmp_path / "other"
    other.mkdir()
    assert password.read_or_create_password(other)[0] != made
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"mode 0640, expected 0600(?s:.*)chmod 600"):
        password.read_or_create_password(tmp_path)
    file.chmod(0o600)
    for text in ("", "aerie:\n", ":x\n", "a b:c\n", "one:1\ntwo:2\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="expected one line user:password"):
            password.read_password(file)


def test_a_preflight_of_another_origin_is_refused_and_one_of_the_pages_is_allowed(server: Server) -> None:
    """Bug: CORS allowed every origin, so a page of another site could read the answers too."""
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin in (FOREIGN, "null", "http://127.0.0.1:1", f"https://127.0.0.1:{server.port}"):
        refused = send(server, "OPTIONS", create_flow_run(server), asks | {"Origin": origin})
        assert refused.status == 403 and "access-control-allow-origin" not in refused.headers
    for name in ("127.0.0.1", "localhost"):
        own = f"http://{name}:{server.port}"
        allowed = send(server, "OPTIONS", create_flow_run(server), asks | {"Origin": own})
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, own)
