"""A server as a child: ready, broken, and gone however its parent ends."""

import sys
import time
from pathlib import Path

import httpx
import pytest

from stages.engines import registry, server
from stages.runtime import free_port
from tests.conftest import has_ended

ROOT = Path(__file__).parents[2]
# Serves, and has a child of its own that ignores SIGTERM, as an engine's workers may.
SERVES = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"], stdout=subprocess.PIPE)
child.stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""  # noqa: E501


def line(program: str, port: int) -> list[str]:
    return [sys.executable, "-c", program, str(port)]


def test_a_server_answers_inside_the_block_and_has_ended_after_it(tmp_path: Path) -> None:
    port = free_port.find_free_port()
    with server.ServerProcess("vllm", line(SERVES, port), port, tmp_path / "log", 60, settle_s=0.5) as running:
        child = int(httpx.get(running.base_url, trust_env=False).text)
        running.check_alive()
        assert not has_ended(child, 0)
    assert has_ended(child)


# Serves, and has a grandchild in a session of its own whose parent has ended, as a daemon does: no signal to a group, and
# no search among a server's children, finds it. It ignores SIGTERM.
DAEMONISES = """
import http.server, os, signal, sys, time
reads, writes = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(writes, str(os.getpid()).encode())
        time.sleep(300)
    os._exit(0)
daemon = os.read(reads, 99)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/fall":
            os._exit(7)
        self.send_response(200); self.end_headers(); self.wfile.write(daemon)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
needs_subreaper = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a subreaper")


@needs_subreaper
def test_a_servers_daemon_is_gone_when_the_server_falls(tmp_path: Path) -> None:
    """The next server would find the port or the GPU's memory taken."""
    port, log = free_port.find_free_port(), tmp_path / "log"
    with server.ServerProcess("vllm", line(DAEMONISES, port), port, log, 60, settle_s=0.5, restarts=1) as running:
        daemon = int(httpx.get(running.base_url, trust_env=False).text)
        crash(running)
        assert running.get_exit_status() == 7 and has_ended(daemon, 0)
        running.check_alive()
        new_daemon = int(httpx.get(running.base_url, trust_env=False).text)
        assert new_daemon != daemon
    assert has_ended(new_daemon, 5)


def test_a_server_is_gone_when_its_guard_is_killed(tmp_path: Path) -> None:
    port = free_port.find_free_port()
    with server.ServerProcess("vllm", line(SERVES, port), port, tmp_path / "log", 60, settle_s=0.5) as running:
        child = int(httpx.get(running.base_url, trust_env=False).text)
        running._guard.kill()
    assert has_ended(child, 10)


def test_a_server_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    port = free_port.find_free_port()
    sleeps = ["sh", "-c", "echo $$; exec sleep 99"]
    with (
        pytest.raises(ValueError, match=r"not ready after 1\.5 s; raise sample_target.server.start_timeout_s"),
        server.ServerProcess("vllm", sleeps, port, tmp_path / "log", 1.5, settle_s=0.5),
    ):
        pass
    assert has_ended(int((tmp_path / "log").read_text().split()[0]))


def test_a_server_whose_port_is_taken_is_ended_at_once(tmp_path: Path) -> None:
    """Bug: SGLang 0.5.17 lives on without its HTTP server, and the stage waited for it until start_timeout_s."""
    port, log = free_port.find_free_port(), tmp_path / "log"
    message = f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use"
    lives_on = [
        "sh",
        "-c",
        f'echo $$; echo "the port {port + 1}: address already in use"; sleep 1; echo "{message}"; exec sleep 99',
    ]
    begun = time.monotonic()
    with (
        pytest.raises(ValueError, match=rf"(?s)cannot listen on port {port}: another process.*run again.*Errno 98"),
        server.ServerProcess("sglang", lives_on, port, log, 60, settle_s=0.5),
    ):
        pass
    assert 1 <= time.monotonic() - begun < 60  # neither for another port nor after the whole timeout
    assert has_ended(int(log.read_text().split()[0]))


@pytest.mark.parametrize("engine", ["transformers", "sglang", "vllm"])
def test_every_command_stays_on_loopback_and_off_the_models_own_settings(engine: str) -> None:
    words = registry.get(engine).build_command("/models/t", 8123, "bfloat16", "cuda", True)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "8123"
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--trust-remote-code" in words
    defaults = {"sglang": "openai", "vllm": "vllm"}
    assert engine == "transformers" or defaults[engine] in words[words.index("--trust-remote-code") - 1]


# On SIGTERM a server writes a file, waits for those of all three servers, and writes a second file.
WAITS_FOR_OTHERS = """
import http.server, pathlib, signal, sys, threading, time
port, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
def end(*_):
    (folder / f"asked-{port}").touch()
    while len([*folder.glob("asked-*")]) < 3:
        time.sleep(0.01)
    (folder / f"ended-{port}").touch()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_servers_are_told_to_end_before_any_has_ended(tmp_path: Path) -> None:
    """Bug: seven SGLang servers of a grid ended one after the other, 50 s on an H200."""
    servers: list[server.ServerProcess] = []
    for _ in range(3):
        port = free_port.find_free_port()
        words = [*line(WAITS_FOR_OTHERS, port), str(tmp_path)]
        servers.append(server.ServerProcess("sglang", words, port, tmp_path / f"log-{port}", 60, settle_s=5.0))
    with server.ServerGroup(servers) as group:
        assert len(set(group.base_urls)) == 3
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == sorted(f"ended-{one.port}" for one in servers)


def crash(running: server.ServerProcess) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{running.base_url}/fall", trust_env=False)
    until = time.monotonic() + 60
    while running.get_exit_status() is None and time.monotonic() < until:
        time.sleep(0.01)
