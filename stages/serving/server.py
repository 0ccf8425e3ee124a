"""A server as a child process of the stage: started, checked, and stopped with the stage, however the stage ends.

The child runs under a guard (server_guard.py) in a session of its own. Stage and guard share a pipe: when the stage is gone,
even by SIGKILL, the pipe closes and the guard kills the server and all its descendants. Servers listen on 127.0.0.1 only. A
server that ends by itself is restarted a few times, since a crash of the engine must not cost the run.

The tests run `transformers`; `sglang` 0.5.17 ran on a GPU (docs/results), `vllm` did not.
"""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from stages.serving import server_guard

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 15.0  # from SIGTERM to SIGKILL
SLACK_S = 5.0  # for the guard to be scheduled on a busy machine
ENDING_GRACE_S = 2.0  # from the closed port to the process's end
INSTALL_HINTS = {"transformers": "pip install -c constraints.txt -e '.[serve]'"}


class ServerProcess:
    """A server started by `run_server`."""

    def __init__(
        self, engine: str, line: list[str], port: int, model: str, log: Path, timeout_s: float, settle_s: float,
        restarts: int, threads: int | None, section: str,
    ) -> None:  # fmt: skip
        self.engine, self.model, self.log = engine, model, log  # model: its name in requests
        self.base_url, self.restarted, self._port = f"http://{HOST}:{port}", 0, port
        self._line, self._timeout_s, self._settle_s, self._restarts = line, timeout_s, settle_s, restarts
        self._section = section
        # Without a limit it uses every core, and the stage and other servers wait for it.
        limit = {} if threads is None else {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._environment = {**os.environ, **limit}
        self._guard: subprocess.Popen | None = None

    def check_alive(self) -> None:
        """Restart the server if it has ended, and wait until it is ready.

        Raises:
            ValueError: with the tail of its log, if it has ended too often, or is not ready in time.
        """
        if not self._is_listening():  # it is ending, and the guard a moment after it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process().wait(ENDING_GRACE_S)
        while (status := self.get_exit_status()) is not None:
            if self.restarted == self._restarts:
                raise self._make_error(status)
            self.restarted += 1
            print(
                f"the {self.engine} server ended with status {status}; starting it again ({self.restarted} of "
                f"{self._restarts}), its log is {self.log}",
                flush=True,
            )
            self.stop()
            self.start("ab")
            self.wait_until_ready()

    def start(self, mode: str) -> None:
        with self.log.open(mode) as file:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", server_guard.__file__, str(self._settle_s), *self._line],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the stage, which then stops the server
                env=self._environment,
            )

    def get_exit_status(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process().poll()

    def wait_until_ready(self) -> bool:
        """Wait until the server is ready (True) or has ended (False). Raises ValueError after the start timeout."""
        deadline = time.monotonic() + self._timeout_s
        with httpx.Client(trust_env=False, timeout=5.0) as http:  # no proxy for loopback
            while time.monotonic() < deadline:
                if self.get_exit_status() is not None:
                    return False
                try:
                    if http.get(f"{self.base_url}/health").status_code == 200:
                        return True
                except httpx.TransportError:  # not listening yet, or too busy to answer
                    pass
                time.sleep(0.2)
        raise ValueError(
            f"the {self.engine} server was not ready after {self._timeout_s:g} s; raise {self._section}.start_timeout_s, "
            f"or see its log, {self.log}:\n{read_log_tail(self.log)}"
        )

    def stop(self) -> None:
        """Let the guard stop the server and all its descendants: by SIGTERM, then SIGKILL."""
        guard = self._process()
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            guard.wait(self._settle_s + server_guard.KILL_S + SLACK_S)
        except subprocess.TimeoutExpired:
            pass
        if guard.returncode is None or guard.returncode < 0:  # it hangs, or was killed: kill its group
            try:
                os.killpg(guard.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            guard.wait()

    def _process(self) -> subprocess.Popen:
        assert self._guard is not None, "not started"
        return self._guard

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1.0)  # a busy server that doesn't answer is listening
            return probe.connect_ex((HOST, self._port)) != errno.ECONNREFUSED

    def _make_error(self, status: int) -> ValueError:
        often = f", after {self.restarted} restarts" if self.restarted else ""
        return ValueError(
            f"the {self.engine} server ended with status {status}{often}{_suggest_remedy(self.engine, self.log)}; its log, "
            f"{self.log}:\n{read_log_tail(self.log)}"
        )


def build_server_command(
    engine: str, folder: str, port: int, dtype: str, device: str, trust_remote_code: bool
) -> list[str]:
    """Return the command line of `engine` for the target in `folder`.

    The flags keep SGLang and vLLM from taking top_k, top_p and penalties from the model's generation_config.json, which would
    change the distribution of the answers.
    """
    if engine == "transformers":
        line = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--host", HOST]
        line += ["--port", str(port), "--dtype", dtype, "--device", device]
    elif engine == "sglang":
        line = ["sglang", "serve", "--model-path", folder, "--host", HOST, "--port", str(port), "--dtype", dtype]
        line += ["--sampling-defaults", "openai"]
    elif engine == "vllm":
        line = ["vllm", "serve", folder, "--host", HOST, "--port", str(port), "--dtype", dtype]
        line += ["--generation-config", "vllm"]
    else:
        raise AssertionError(engine)
    return [*line, *(["--trust-remote-code"] if trust_remote_code else [])]


@contextmanager
def run_server(
    engine: str, line: list[str], port: int, model: str, log: Path, timeout_s: float, settle_s: float = STOP_TIMEOUT_S,
    restarts: int = 0, threads: int | None = None, section: str = "sample_target.server",
) -> Iterator[ServerProcess]:  # fmt: skip
    """Run the server of command `line`, which answers on `port` inside the block; it and its children end with the block.

    Args:
        restarts: how often `check_alive` may restart it.
        threads: CPU threads; None: no limit.
        section: of params.yaml, for messages.

    Raises:
        ValueError: with the tail of its log, if it can't be started, ends before it is ready, or is not ready in time.
    """
    if shutil.which(line[0]) is None:
        raise ValueError(
            f"{section} asks for {engine}, but there is no `{line[0]}` on the PATH; install it into an environment of its own "
            "(make serving-env) and put its bin folder on the PATH, or name a running server in base_urls"
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(engine, line, port, model, log, timeout_s, settle_s, restarts, threads, section)
    server.start("wb")
    try:
        if not server.wait_until_ready():  # at the first start the command is at fault
            raise server._make_error(server.get_exit_status() or 0)
        yield server
    finally:
        server.stop()


def find_free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return taken.getsockname()[1]


def read_log_tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _suggest_remedy(engine: str, log: Path) -> str:
    words = read_log_tail(log, 200)
    missing = "Missing dependencies for serving" in words or "requires `accelerate`" in words
    return f" for want of packages; run: {INSTALL_HINTS[engine]}" if missing and engine in INSTALL_HINTS else ""
