"""A server as a child: ready, broken, and gone however its parent ends."""

import os
import signal
import subprocess
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


def start_stage(program: str, port: int, log: Path) -> subprocess.Popen:
    """A process that has started a server of `program`, which is ready, and waits."""
    stage = (
        f"import time; from pathlib import Path; from stages.engines import server\n"
        f"with server.ServerProcess('vllm', {line(program, port)!r}, {port}, Path({str(log)!r}), 60, settle_s=0.5):\n"
        f"    print('ready', flush=True); time.sleep(99)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", stage], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"ready\n"
    return parent


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


@pytest.mark.parametrize("kill_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_server_ends_when_its_stage_is_killed(tmp_path: Path, kill_signal: signal.Signals) -> None:
    port = free_port.find_free_port()
    parent = start_stage(SERVES, port, tmp_path / "log")
    child = int(httpx.get(f"http://127.0.0.1:{port}", trust_env=False).text)
    os.kill(parent.pid, kill_signal)
    parent.wait(60)
    assert has_ended(child)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}", trust_env=False)


def test_a_server_that_ends_at_start_shows_its_log(tmp_path: Path) -> None:
    port = free_port.find_free_port()
    broken = "import sys; print('CUDA is not there'); sys.exit(3)"
    begun = time.monotonic()
    with (
        pytest.raises(ValueError, match=r"(?s)the vllm server ended with status 3; its log.*CUDA is not there"),
        server.ServerProcess("vllm", line(broken, port), port, tmp_path / "log", 60, settle_s=0.5),
    ):
        pass
    assert time.monotonic() - begun < 60  # it was not given all the time it had to be ready


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


# Says its threads, serves, and ends itself as often as its file has lines less than asked for.
FALLS = """
import http.server, os, sys
print("threads", os.environ.get("OMP_NUM_THREADS"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/fall":
            print("the engine fell", flush=True); os._exit(7)
        self.send_response(200); self.end_headers(); self.wfile.write(b"up")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def crash(running: server.ServerProcess) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{running.base_url}/fall", trust_env=False)
    until = time.monotonic() + 60
    while running.get_exit_status() is None and time.monotonic() < until:
        time.sleep(0.01)


def test_a_server_that_crashes_is_restarted_a_limited_number_of_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port, log = free_port.find_free_port(), tmp_path / "log"
    with server.ServerProcess("vllm", line(FALLS, port), port, log, 60, settle_s=0.5, restarts=2, threads=3) as running:
        for often in (1, 2):
            crash(running)
            running.check_alive()
            assert running.restarted == often
            assert httpx.get(running.base_url, trust_env=False).text == "up"
        running.check_alive()
        crash(running)
        with pytest.raises(
            ValueError, match=r"(?s)the vllm server ended with status 7, after 2 restarts; its log, .*the engine fell"
        ):
            running.check_alive()
    assert "ended with status 7; starting it again (2 of 2), its log is " in capfd.readouterr().out
    assert log.read_text().count("threads 3\n") == 3  # the log of before stays
