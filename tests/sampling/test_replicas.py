"""Replicas: how many servers the visible GPUs hold, which GPUs each sees, and that all end together."""

import socket
import stat
import sys
from pathlib import Path

import pytest

from stages.engines import registry
from stages.engines.gpu_memory import GpuMemory
from stages.engines.server import ServerGroup, ServerProcess
from stages.params.target_sections import Target
from stages.runtime import free_port
from stages.sampling import server_backend

ENGINE = """#!{python}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
print("sees", os.environ.get("CUDA_VISIBLE_DEVICES"), sys.argv[1:], flush=True)
if os.environ.get("CUDA_VISIBLE_DEVICES") == {broken!r}:
    sys.exit("no such device")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def install(folder: Path, broken: str = "none") -> None:
    """Put an `sglang` into the engine's own environment below `folder`."""
    program = folder / "serving-env/sglang/bin/sglang"
    program.parent.mkdir(parents=True)
    program.write_text(ENGINE.format(python=sys.executable, broken=broken))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which GPUs 4 to 7 are visible."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(server_backend, "list_visible_gpus", lambda: [GpuMemory("H200", 0.0, 139.0)] * 4)
    return tmp_path


def plan(device: str, *launch_args: str) -> ServerGroup:
    target = Target(model="/target", dtype="bfloat16", device=device)
    return server_backend.plan_replicas(registry.get("sglang"), "/target", target, launch_args, 60.0, Path("logs"))


def is_listening(server: ServerProcess) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((free_port.HOST, server.port)) == 0


@pytest.mark.parametrize(
    ("device", "launch_args", "expected"),
    [
        ("cuda", [], ["4", "5", "6", "7"]),
        ("cuda", ["--tp", "2"], ["4,5", "6,7"]),
        ("cuda", ["--tp-size=2", "--mem-fraction-static", "0.8"], ["4,5", "6,7"]),
        ("cuda", ["-tp", "2", "--pipeline-parallel-size", "2"], ["4,5,6,7"]),
        ("cuda", ["--tensor-parallel-size", "3"], ["4,5,6"]),
        ("cuda", ["--tp-size", "2", "--dp-size", "2"], ["4,5,6,7"]),
        ("cuda", ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], ["4,5", "6,7"]),
        ("cuda:1", [], ["5"]),
        ("cpu", [], [None]),
    ],
)
def test_each_group_of_gpus_has_a_server(
    four_gpus: Path, device: str, launch_args: list[str], expected: list[str | None]
) -> None:
    planned = plan(device, *launch_args).servers
    assert [server.gpus for server in planned] == expected
    assert len({server.port for server in planned}) == len({server.log for server in planned}) == len(expected)
    assert all(server.line[-len(launch_args) :] == launch_args for server in planned if launch_args)


def test_replicas_start_together_each_on_its_gpus_and_end_together(four_gpus: Path) -> None:
    install(four_gpus)
    with plan("cuda", "--tp", "2") as running:
        assert all(map(is_listening, running.servers))
        assert running.base_urls == [f"http://127.0.0.1:{server.port}" for server in running.servers]
        assert [server.log.read_text().split("[")[0] for server in running.servers] == ["sees 4,5 ", "sees 6,7 "]
    assert not any(map(is_listening, running.servers))


def test_a_server_that_cannot_start_stops_the_others(four_gpus: Path) -> None:
    install(four_gpus, broken="6")
    planned = plan("cuda")
    with pytest.raises(ValueError, match=r"(?s)sglang server ended with status 1; its log, .*_2.log:.*no such device"):
        planned.__enter__()
    assert not any(map(is_listening, planned.servers))
    assert [server.get_exit_status() is not None for server in planned.servers] == [True] * 4
