"""A server as a child of the stage: started, waited for, watched, and ended with it, however the stage ends.

The child runs under a guard, in a process group of its own. The guard holds one end of a pipe whose other end is the
stage's: when the stage is gone, even by SIGKILL, the pipe closes and the guard ends the group. Servers listen on
127.0.0.1 only.

`transformers` is what the tests run. The flags of `sglang` and `vllm` are from their documentation (sglang 0.5, vllm
0.11 and later) and were not run here: neither has a build for our CPUs.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

HOST = "127.0.0.1"
END_S = 15.0  # from asking a server to end to killing it
EXTRA = {"transformers": "pip install -c constraints.txt -e '.[serve]'"}

# Ends the whole group once its standard input closes. As text, since it must not import the stage's packages (2 s).
GUARD = """
import os, signal, subprocess, sys, threading, time
left = threading.Event()
def watch():
    while os.read(0, 1):
        pass
    left.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(float(sys.argv[1]))
    os.killpg(0, signal.SIGKILL)
for name in (signal.SIGTERM, signal.SIGINT):
    signal.signal(name, signal.SIG_IGN)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
def default():
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
status = subprocess.call(sys.argv[2:], stdin=subprocess.DEVNULL, preexec_fn=default)
if left.is_set():
    watcher.join()
os._exit(status if status >= 0 else 128 - status)
"""


@dataclass(frozen=True)
class Server:
    engine: str
    base_url: str
    model: str  # the name it answers to
    log: Path
    check: Callable[[], None]  # raises ValueError, with the log's tail, where the server has ended


def command(engine: str, folder: str, port: int, dtype: str, device: str, trust_remote_code: bool) -> list[str]:
    """The command line of `engine` for the target in `folder`.

    SGLang and vLLM would else take top_k, top_p and penalties from the model's generation_config.json, and the answers
    would come from another distribution than the one that later stages assume.
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
def started(
    engine: str, line: list[str], port: int, model: str, log: Path, timeout_s: float, settle_s: float = END_S
) -> Iterator[Server]:
    """Inside the block the server of command `line` answers on `port`; after it, it and its children are gone.

    Raises:
        ValueError: where it can't be started, ends before it is ready, or is not ready within `timeout_s`; with the
            tail of its log.
    """
    if shutil.which(line[0]) is None:
        raise ValueError(
            f"sample_target.server.launch is {engine}, but there is no `{line[0]}` on the PATH; install {engine} (an "
            "environment of its own will do) and put its bin folder on the PATH, or name a running server in base_urls"
        )
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, str(settle_s), *line],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to the stage alone, which then ends the server in order
        )

    def check() -> None:
        if (status := guard.poll()) is not None:
            found = f"{_remedy(engine, log)}; its log, {log}:\n{tail(log)}"
            raise ValueError(f"the {engine} server ended with status {status}{found}")

    server = Server(engine, f"http://{HOST}:{port}", model, log, check)
    try:
        _wait(server, timeout_s)
        yield server
    finally:
        _end(guard, settle_s)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return taken.getsockname()[1]


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, of which a server's downfall is usually the last."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _wait(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=5.0) as http:  # a proxy of the environment is not for loopback
        while time.monotonic() < deadline:
            server.check()
            try:
                if http.get(f"{server.base_url}/health").status_code == 200:
                    return
            except httpx.TransportError:  # not listening yet, or too busy to answer
                pass
            time.sleep(0.2)
    raise ValueError(
        f"the {server.engine} server was not ready after {timeout_s:g} s; raise sample_target.server.start_timeout_s, or see "
        f"its log, {server.log}:\n{tail(server.log)}"
    )


def _end(guard: subprocess.Popen, settle_s: float) -> None:
    """End the server's whole group: politely, then not."""
    assert guard.stdin is not None
    try:
        os.killpg(guard.pid, signal.SIGTERM)  # to the server and its children; the guard ignores it
        guard.wait(settle_s)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    try:
        os.killpg(guard.pid, signal.SIGKILL)  # also what outlived the server itself: workers of an engine that crashed
    except ProcessLookupError:
        pass
    guard.stdin.close()
    guard.wait()


def _remedy(engine: str, log: Path) -> str:
    words = tail(log, 200)
    missing = "Missing dependencies for serving" in words or "requires `accelerate`" in words
    return f" for want of packages; run: {EXTRA[engine]}" if missing and engine in EXTRA else ""
