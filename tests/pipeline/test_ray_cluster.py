"""Stages made on a Ray cluster of two nodes on this machine, each with a checkout of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.runtime.free_port import find_free_port
from tests.conftest import has_ended
from tests.pipeline.test_flows import wait_for
from tests.pipeline.test_prefect_workers import CELLS, WorkerProject, edit

pytest.importorskip("prefect_ray", reason="pip install -e '.[ray]' to test a Ray cluster")
pytest.importorskip("ray", reason="pip install -e '.[ray]' to test a Ray cluster")
NODES = ("one", "two")


@pytest.fixture(scope="module")
def wide(prefect_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProject]:
    root = tmp_path_factory.mktemp("rayed")
    started = WorkerProject(root, prefect_tables)
    address = f"127.0.0.1:{find_free_port()}"
    edit(started.project, runner="ray", ray_address=address)
    started.project.commit()
    nodes = []
    try:
        for name in NODES:
            subprocess.run(["git", "clone", "-q", started.project.root, root / name], check=True)
            nodes.append(start_node(root, name, address))
            wait_for(lambda name=name: "started" in (root / f"{name}.log").read_text(), 300)
        wait_for(started.up, 600)
        yield started
    finally:
        for process in [started.process, *reversed(nodes)]:
            process.terminate()
        for process in [started.process, *nodes]:
            process.wait(120)


def start_node(root: Path, name: str, address: str) -> "subprocess.Popen[bytes]":
    where = ["--head", "--port", address.partition(":")[2], "--include-dashboard=false", f"--temp-dir={root}/r"]
    where = where if name == NODES[0] else ["--address", address]
    small = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    (root / f"{name}-tmp").mkdir()
    env = os.environ | {
        "AERIE_CHECKOUT": str(root / name),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "DVC_SITE_CACHE_DIR": str(root / f"{name}-site"),
        "PREFECT_HOME": str(root / f"{name}-home"),
        "TMPDIR": str(root / f"{name}-tmp"),  # slots of its own, as on another host
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where, *small]
    with (root / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=env, cwd=root, stdout=log, stderr=subprocess.STDOUT)


def test_cells_are_made_on_both_nodes_and_dvc_lock_is_whole(wide: WorkerProject) -> None:
    run = wide.run()
    state = wide.ended(run)
    assert state["message"] == f"{CELLS + 3} stages: {CELLS + 3} ran", wide.messages(run)
    assert len(YAML(typ="safe").load(wide.project.root / "dvc.lock")["stages"]) == CELLS + 3
    assert (wide.project.root / "results/cells/2.csv").read_text() == "tree,tau\n2\n"
    caches = [wide.root / name / ".dvc/cache/runs" for name in NODES]
    assert sum(len(list(cache.glob("*/*"))) for cache in caches) == CELLS and all(cache.exists() for cache in caches)
    assert wide.ended(wide.run())["message"] == f"{CELLS + 3} stages: {CELLS + 3} unchanged"


def test_a_failure_on_the_cluster_is_reported_here(wide: WorkerProject) -> None:
    wide.write_cell(wide.project, 2, "sys.exit('aerie: out of cheese')")
    run = wide.run()
    assert wide.ended(run)["message"].startswith("cell@2 failed: ")
    assert wait_for(lambda: [line for line in wide.messages(run) if "made on Ray" in line and "out of cheese" in line])


def test_cancelling_ends_the_stages_on_the_cluster(wide: WorkerProject) -> None:
    wide.start_sleeping_cell()
    run = wide.run()
    command = wide.find_sleeping_command(run)
    wide.ask(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    assert has_ended(command.pid, 30)
    assert wide.ended(run)["type"] == "CANCELLED"
    (wide.root / "awake").touch()
    assert wide.ended(wide.run())["type"] == "COMPLETED"


def test_a_run_killed_outright_leaves_nothing_at_work_there(wide: WorkerProject) -> None:
    wide.start_sleeping_cell()
    run = wide.run()
    command = wide.find_sleeping_command(run)
    wide.flow().kill()
    assert has_ended(command.pid, 30)
    (wide.root / "awake").touch()
    assert wide.ended(wide.run())["type"] == "COMPLETED"
