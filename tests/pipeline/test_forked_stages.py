"""Stages that a run forks (stages/telemetry/fork_server.py) end with the run as those that it starts."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import has_ended
from tests.pipeline.conftest import GRAPH, REPO, Project, give_params
from tests.pipeline.test_run import RUN, read_until

SLEEPER = """
import os, time
print("asleep", os.getpid(), os.getppid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def started(project: Project) -> Iterator[subprocess.Popen[str]]:
    """A run whose first stage is a module that sleeps."""
    give_params(project)
    shutil.copytree(REPO / "stages", project.root / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    server = project.root / "stages/telemetry/fork_server.py"
    text = server.read_text()
    begin = text.index("PRELOADED = (")
    # Nothing: importing torch takes longer than DVC takes to start the first stage.
    server.write_text(f"{text[:begin]}PRELOADED = (){text[text.index(')', begin) + 1 :]}")
    (project.root / "stages/sleeper.py").write_text(SLEEPER)
    (project.root / "dvc.yaml").write_text(GRAPH.replace("python first.py", "python -m stages.sleeper"))
    run = subprocess.Popen([*RUN, "--verbose"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield run
    run.kill()
    run.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_forked_stage_ends_with_its_run(started: subprocess.Popen[str], number: signal.Signals) -> None:
    stage, server = map(int, read_until(started, "asleep").split()[1:3])
    assert "stages.telemetry.fork_server" in psutil.Process(server).cmdline()
    assert psutil.Process(stage).environ()["AERIE_RUN"]  # by which the guard finds it
    address = Path(psutil.Process(server).cmdline()[-2]).parent
    started.send_signal(number)
    assert started.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert has_ended(stage) and has_ended(server)
    until = time.monotonic() + 20  # the guard of a killed run removes it last
    while address.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not address.exists()


def test_a_forked_stage_that_fails_fails_the_run(started: subprocess.Popen[str]) -> None:
    stage = int(read_until(started, "asleep").split()[1])
    psutil.Process(stage).kill()
    assert started.wait(60) == 1
