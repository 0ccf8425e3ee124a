"""The guard ends the processes that a killed run left, also where a parent ends between the search and its end."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pipeline import processes
from tests.conftest import has_ended

MARK = "a mark of this test"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a child, both with the mark."""
    monkeypatch.setenv(processes.RUN_MARK_VARIABLE, MARK)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    monkeypatch.delenv(processes.RUN_MARK_VARIABLE)
    assert parent.stdout
    child = int(parent.stdout.readline())
    yield parent, child
    for pid in (parent.pid, child):
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()
    parent.wait()


def test_marked_processes_are_ended_and_no_others(left: tuple[subprocess.Popen[str], int]) -> None:
    parent, child = left
    processes.end_marked("another mark")
    assert psutil.pid_exists(child) and parent.poll() is None
    processes.end_marked(MARK)
    assert has_ended(parent.pid, 5) and has_ended(child, 5)


def test_a_child_whose_parent_ends_meanwhile_is_ended(
    left: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a stage outlived its killed run for good, because its fork server ended by itself between the search for processes
    and the look at its children; seen twice on a busy machine.
    """
    parent, child = left
    end_together = processes._end_together

    def end_late(found: list[psutil.Process]) -> None:
        parent.kill()
        parent.wait()
        end_together(found)

    monkeypatch.setattr(processes, "_end_together", end_late)
    processes.end_marked(MARK)
    assert has_ended(child, 5)
