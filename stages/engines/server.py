"""A server as a child process of the stage: started, checked, and stopped with the stage, however the stage ends.

The child runs under a guard (server_guard.py) in a session of its own. Stage and guard share a pipe: when the stage is gone,
even by SIGKILL, the pipe closes and the guard kills the server and all its descendants. Servers listen on 127.0.0.1 only. A
server that ends by itself is restarted a few times, since a crash of the engine must not cost the run.

The tests run `transformers`; `sglang` 0.5.17 ran on a GPU (docs/results).
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from stages.cells.cell import UNSUPPORTED, NotMeasuredError
from stages.engines import registry, server_guard
from stages.runtime.free_port import HOST

STOP_TIMEOUT_S = 15.0  # from SIGTERM to SIGKILL
SLACK_S = 5.0  # for the guard to be scheduled on a busy machine
ENDING_GRACE_S = 2.0  # from the closed port to the process's end
LOG_TAIL_BYTES = 20_000


@dataclass
class ServerProcess:
    """The server of command `line`, which answers on `port` inside a `with` block; it and its children end with the block.

    Entering raises ValueError, with the tail of its log, if it can't be started, ends before it is ready, or is not ready in
    time.
    """

    engine: str
    line: list[str]
    port: int
    log: Path
    timeout_s: float  # to get ready
    settle_s: float = STOP_TIMEOUT_S
    restarts: int = 0  # how often `check_alive` may restart it
    threads: int | None = None  # CPU threads; None: no limit
    gpus: str | None = None  # its CUDA_VISIBLE_DEVICES; None: that of the stage
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables
    section: str = "sample_target.server"  # of params.yaml, for messages
    restarted: int = 0
    _log_start: int = field(default=0, init=False, repr=False)  # bytes of the log that earlier starts wrote
    _guard: subprocess.Popen | None = field(default=None, init=False, repr=False)
    # `check_alive` in another thread starts nothing more
    _is_closed: bool = field(default=False, init=False, repr=False)

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> "ServerProcess":
        ServerGroup([self]).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        ServerGroup([self]).__exit__()

    def start(self) -> None:
        """Start the command, and return before it is ready. Raises ValueError if there is no such command."""
        if shutil.which(self.line[0]) is None:
            raise ValueError(
                f"{self.section} asks for {self.engine}, but there is no `{self.line[0]}` on the PATH; install it (make "
                "serving-env), put it on the PATH, or name a running server in base_urls"
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._start("wb")

    def await_start(self) -> None:
        """Wait until the server is ready. Raises ValueError if it ends before: at the first start the command is at fault."""
        if not self.wait_until_ready():
            raise self._make_error(self.get_exit_status() or 0)

    def ask_to_end(self) -> None:
        """Let the guard begin to stop the server for good, and return before it has ended."""
        self._is_closed = True
        if self._guard and self._guard.stdin:
            self._guard.stdin.close()

    def check_alive(self) -> None:
        """Restart the server if it has ended, and wait until it is ready.

        Raises:
            ValueError: with the tail of its log, if it has ended too often, or is not ready in time.
        """
        guard = self._guard
        assert guard
        if not self._is_listening():  # it is ending, and the guard a moment after it
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(ENDING_GRACE_S)
        while (status := self.get_exit_status()) is not None and not self._is_closed:
            if self.restarted == self.restarts:
                raise self._make_error(status)
            self.restarted += 1
            print(
                f"the {self.engine} server ended with status {status}; starting it again ({self.restarted} of "
                f"{self.restarts}), its log is {self.log}",
                flush=True,
            )
            self.stop()
            self._start("ab")
            self.wait_until_ready()

    def _start(self, mode: str) -> None:
        self._log_start = self.log.stat().st_size if mode == "ab" else 0
        # Without a limit it uses every core, and the stage and other servers wait for it.
        limit = {} if self.threads is None else dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        devices = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        with self.log.open(mode) as file:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", server_guard.__file__, str(self.settle_s), *self.line],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the stage, which then stops the server
                env={**os.environ, **limit, **devices, **self.environment},
            )

    def get_exit_status(self) -> int | None:
        return self._guard.poll() if self._guard else None

    def wait_until_ready(self) -> bool:
        """Wait until the server is ready (True) or has ended (False).

        Raises ValueError after the start timeout, and at once where another process holds the port: SGLang 0.5.17 then runs on
        without its HTTP server.
        """
        deadline = time.monotonic() + self.timeout_s
        with httpx.Client(trust_env=False, timeout=5.0) as http:  # no proxy for loopback
            while time.monotonic() < deadline:
                if self.get_exit_status() is not None or self._is_closed:
                    return False
                with contextlib.suppress(httpx.TransportError):  # not listening yet, or too busy to answer
                    if http.get(f"{self.base_url}/health").status_code == 200:
                        return True
                if self._is_port_taken():
                    raise ValueError(
                        f"the {self.engine} server cannot listen on port {self.port}: another process has taken it since the "
                        f"start; run again, which takes another port. Its log, {self.log}:\n  {read_log_tail(self.log)}"
                    )
                time.sleep(0.2)
        raise ValueError(
            f"the {self.engine} server was not ready after {self.timeout_s:g} s; raise {self.section}.start_timeout_s, "
            f"or see its log, {self.log}:\n  {read_log_tail(self.log)}"
        )

    def stop(self) -> None:
        """Let the guard stop the server and all its descendants: by SIGTERM, then SIGKILL."""
        guard = self._guard
        assert guard and guard.stdin
        guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(self.settle_s + server_guard.KILL_S + SLACK_S)
        if guard.returncode is None or guard.returncode < 0:  # it hangs, or was killed: kill its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)  # a busy server that doesn't answer is listening
            return probe.connect_ex((HOST, self.port)) != errno.ECONNREFUSED

    def _is_port_taken(self) -> bool:
        """Return whether the log says that the port is in use; engines name it so for no other reason."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").lower().splitlines()
        return any("address already in use" in line and re.search(rf"\b{self.port}\b", line) for line in lines)

    def _make_error(self, status: int) -> ValueError:
        often = f", after {self.restarted} restarts" if self.restarted else ""
        words, engine = read_log_tail(self.log, 200), registry.get(self.engine)
        remedy = engine.install_hint
        if remedy and ("Missing dependencies for serving" in words or "requires `accelerate`" in words):
            often += f" for want of packages; run: {remedy}"
        reason = next((reason for line, reason in engine.known_ends if line in words), None)
        often += f": {reason}" if reason else ""
        tail = read_log_tail(self.log)
        message = f"the {self.engine} server ended with status {status}{often}; its log, {self.log}:\n  {tail}"
        return NotMeasuredError(UNSUPPORTED, reason, message) if reason else ValueError(message)


def read_log_tail(log: Path, lines: int = 20) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        return "\n  ".join(file.read().decode(errors="replace").splitlines()[-lines:])


@dataclass
class ServerGroup:
    """Servers that answer inside a `with` block. Entering raises ValueError where one cannot be started, and stops the others."""

    servers: list[ServerProcess]

    def __enter__(self) -> "ServerGroup":
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:  # they load the weights side by side
                server.await_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the servers for good, side by side: SGLang 0.5.17 takes seven seconds to end."""
        for server in self.servers:
            server.ask_to_end()
        for server in self.servers:
            if server._guard:
                server.stop()

    @property
    def base_urls(self) -> list[str]:
        return [server.base_url for server in self.servers]

    @property
    def restarted(self) -> int:
        return sum(server.restarted for server in self.servers)

    def check_alive(self) -> None:
        """Restart each server that has ended. Raises ValueError as `ServerProcess.check_alive`."""
        for server in self.servers:
            server.check_alive()

    def read_log_tails(self) -> str:
        return "".join(
            f"\n  The last lines of its log, {server.log}:\n  {read_log_tail(server.log)}"
            for server in self.servers
            if server.log.exists()
        )
