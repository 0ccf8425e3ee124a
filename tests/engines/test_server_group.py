"""Servers that start and end together."""

import sys
from pathlib import Path

from stages.engines import server
from stages.engines.server import ServerGroup
from stages.runtime import free_port

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
        line = [sys.executable, "-c", WAITS_FOR_OTHERS, str(port), str(tmp_path)]
        servers.append(server.ServerProcess("sglang", line, port, tmp_path / f"log-{port}", 60, settle_s=5.0))
    with ServerGroup(servers) as group:
        assert len(set(group.base_urls)) == 3
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == sorted(
        f"ended-{server.port}" for server in servers
    )
