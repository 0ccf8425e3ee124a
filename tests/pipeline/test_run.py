"""`make run`'s command: one DVC for all stages, guarded, with a dvc.lock that is healed first."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline import processes, workspaces
from pipeline.cli import run_command_line
from pipeline.resources import try_lock
from pipeline.run_display import locate_log
from stages.runtime import scratch
from tests.conftest import has_ended
from tests.pipeline.conftest import Project, give_params

RUN = [sys.executable, "-m", "pipeline", "run"]


@pytest.fixture
def project(project: Project) -> Project:
    """With a params.yaml, which a run checks first."""
    give_params(project)
    return project


@pytest.fixture
def committed(project: Project, finished_run: Project) -> Project:
    """All stages have run, and git has what they left."""
    (project.root / ".gitignore").write_text("/.scratch/\n/.dvc/tmp\n/.dvc/cache\n")
    project.git("init", "-q")
    project.commit()
    return project


@pytest.fixture
def started(project: Project) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs to be ended, should a test fail before their end."""
    runs: list[subprocess.Popen[str]] = []
    yield runs
    for one in runs:
        one.send_signal(signal.SIGTERM)
        one.wait(60)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *words], capture_output=True, text=True)


def start(started: list[subprocess.Popen[str]], *words: str) -> subprocess.Popen[str]:
    started.append(subprocess.Popen([*RUN, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return started[-1]


def find_sleeper(stage: str) -> int:
    """Return the process id that a stage at work has written into its log."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        text = locate_log(stage).read_text() if locate_log(stage).exists() else ""
        if found := [
            line for line in text.splitlines(keepends=True) if line.startswith("asleep") and line.endswith("\n")
        ]:
            return int(found[0].split()[1])
        time.sleep(0.02)
    raise AssertionError(f"{stage} never slept")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came: {seen}")


def find_dvc(run: subprocess.Popen[str]) -> psutil.Process:
    (found,) = [one for one in psutil.Process(run.pid).children() if processes.DVC_MODULE in one.cmdline()]
    return found


def test_all_stages_run_by_one_dvc_and_a_second_run_finds_nothing_stale(project: Project) -> None:
    project.write_stage("middle", "print('dvc is', open(f'/proc/{os.getppid()}/stat').read().split()[3])")
    project.write_stage("last", "print('dvc is', open(f'/proc/{os.getppid()}/stat').read().split()[3])")
    done = run()
    assert done.returncode == 0 and re.search(r"^last +\d+\.\d s   this is last$", done.stdout, re.MULTILINE)
    assert done.stdout.startswith("stale: first, middle, last (new)\n")
    logs = [locate_log(stage).read_text() for stage in ("middle", "last")]
    assert "Running stage 'last'" in logs[1]
    dvcs = [line for log in logs for line in log.splitlines() if line.startswith("dvc is ")]
    assert len(dvcs) == 2 and len(set(dvcs)) == 1
    again = run()
    assert (again.returncode, again.stdout) == (0, "nothing is stale\n")


def test_a_stage_does_not_outlive_a_dvc_that_is_killed_outright(
    project: Project, started: list[subprocess.Popen[str]]
) -> None:
    """Bug: after `kill -9` of dvc the stage worked on, and the next `make run` worked beside it on the same files."""
    project.write_sleeping_stage("first")
    one = start(started)
    stage = find_sleeper("first")
    find_dvc(one).kill()
    assert one.wait(60) == 1 and has_ended(stage, 0)
    project.write_stage("first")
    assert run().returncode == 0


def test_a_stage_does_not_outlive_a_run_that_is_killed_outright_and_the_next_run_waits_for_its_end(
    project: Project, started: list[subprocess.Popen[str]]
) -> None:
    """Bug: `make run` had no guard; its lock must be free only when what it has left is gone."""
    project.write_sleeping_stage("first", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    one = start(started)
    stage = find_sleeper("first")
    one.kill()
    one.wait()
    project.write_stage("first")
    assert try_lock(workspaces.LOCK_PATH) is None and not has_ended(stage, 0)
    second = start(started)
    assert "another run is at work here" in read_until(second, "at work")
    assert has_ended(stage)
    rest = second.stdout.read() if second.stdout else ""
    assert second.wait(60) == 0 and re.search(r"^last +\d+\.\d s   this is last$", rest, re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_stage_without_a_traceback_and_the_next_goes_on(
    project: Project, started: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    notes = scratch.NOTES_FOLDER
    notes.mkdir(parents=True)
    (notes / "last").write_text("after epoch 9")  # of an earlier run
    os.utime(notes / "last", (1, 1))
    project.write_sleeping_stage("middle", f"open('{notes}/middle', 'w').write('after epoch 4')")
    one = start(started)
    stage = find_sleeper("middle")
    one.send_signal(number)
    rest = one.stdout.read() if one.stdout else ""
    assert one.wait(60) == 128 + number and "Traceback" not in rest and has_ended(stage, 0)
    if number == signal.SIGINT:
        assert rest.splitlines()[-1] == (
            "aerie: stopped; what has finished is kept, `aerie run` goes on after epoch 4 of middle"
        )
    project.write_stage("middle")
    done = run()
    assert done.returncode == 0 and "stale: middle, last" in done.stdout


def test_a_failed_stage_and_a_broken_graph_end_the_run_with_one_line(project: Project) -> None:
    """Bug: DVC's error about a broken dvc.yaml came as a traceback."""
    project.write_stage("middle", "sys.exit('out of cheese')")
    done = run()
    assert done.returncode == 1 and "out of cheese" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("aerie: middle failed, see above and logs/middle.log;")
    assert "failed to reproduce" in done.stderr and "middle" in done.stdout.splitlines()[-1]
    assert "out of cheese" in run("--verbose").stdout
    (project.root / "dvc.yaml").write_text("stages: [")
    done = run()
    assert done.returncode == 1 and done.stderr.startswith("aerie: ") and "Traceback" not in done.stderr


def test_a_wrong_params_yaml_is_refused_before_any_stage_runs(project: Project, finished_run: Project) -> None:
    """Also where nothing is stale: the key may be one that no stage is watched for."""
    assert run().stdout == "nothing is stale\n"
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("retry_pause_s:", "retry_pauze_s:"))
    done = run()
    assert (done.returncode, done.stdout) == (1, "")
    assert "schedule: unknown key retry_pauze_s" in done.stderr and "Traceback" not in done.stderr
    Path("params.yaml").write_text(text)
    assert run().stdout == "nothing is stale\n"


def test_with_nothing_to_do_neither_dvc_nor_pydantic_is_imported(project: Project, finished_run: Project) -> None:
    """`make run` with nothing stale started Python three times, and took 4.2 s on a slow machine; right after a run more."""
    assert run().returncode == 0
    code = "import sys; from pipeline import commands; print(*commands.run_graph(), sep='; '); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, modules = done.stdout.splitlines()
    assert first == "nothing is stale" and not {"dvc", "pydantic", "torch", "ruamel.yaml"} & set(modules.split())


@pytest.mark.parametrize("name", ["../x", "no such", "x:y"])
def test_a_stage_of_no_such_name_is_refused_on_the_command_line(project: Project, name: str) -> None:
    """Bug: DVC took it for a path and ended with a traceback."""
    with pytest.raises(SystemExit, match="is not the name of a stage"):
        run_command_line(["pull", name])
