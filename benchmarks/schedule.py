"""What the flow costs over plain DVC, in a toy project on this machine: python -m benchmarks.schedule

24 cells of a second each, and the stage above them: DVC in a row, four at once, the same through the flow, and runs with nothing
to do. Seconds by the clock, and the load that there was besides.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ruamel.yaml import YAML

from pipeline import dvc_graph, serve
from pipeline.resources import ResourceLease, ResourcePool
from pipeline.scheduler import StageGraph, run_stages
from stages.params.schedule import StageResources

CELLS, SLOTS = 24, 4
REPO = Path(__file__).parents[1]
DVC_YAML = """
stages:
  first: {cmd: cp raw.csv first.csv, deps: [raw.csv], outs: [first.csv]}
  cell:
    matrix: {n: %s}
    cmd: sleep 1; cp first.csv cell${item.n}.csv
    deps: [first.csv]
    outs: ["cell${item.n}.csv"]
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PREFECT_HOME": f"{folder}/prefect", "PYTHONPATH": str(REPO), "TMPDIR": folder}
        found = {"load before": os.getloadavg()[0], "dvc repro": _timed(folder, "serial", 1, _serial)}
        found["four at once, no Prefect"] = _timed(folder, "parallel", SLOTS, lambda: _parallel(Path(folder)))
        begun = time.monotonic()
        with serve.run_prefect_server(4390):
            found["server's first start"] = time.monotonic() - begun
            found["flow, four at once"] = _timed(folder, "flow", SLOTS, _flow)
            found["flow, one at a time"] = _timed(folder, "flow1", 1, _flow)
        found["flow, nothing to do, with the server's start"] = _again(Path(folder) / "flow", _flow_and_server)
        found["dvc repro, nothing to do"] = _again(Path(folder) / "serial", _serial)
        found["load after"] = os.getloadavg()[0]
        found["flow over dvc repro, a stage"] = (found["flow, one at a time"] - found["dvc repro"]) / (CELLS + 1)
    print(json.dumps({name: round(seconds, 2) for name, seconds in found.items()}, indent=2))


def _timed(folder: str, name: str, slots: int, act: Callable[[], None]) -> float:
    """In a project that was never run."""
    root = Path(folder) / name
    (root / ".dvc").mkdir(parents=True)
    (root / ".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    (root / "dvc.yaml").write_text(DVC_YAML % list(range(CELLS)))
    (root / "raw.csv").write_text(f"{name}\n")
    params = YAML().load(REPO / "params.yaml")
    params["fix_data"]["raw"] = "raw.csv"
    params["schedule"]["slots"] = slots
    params["schedule"]["stages"] = {stage: {"gpus": 0, "exclusive": False} for stage in ("first", "cell")}
    YAML().dump(params, root / "params.yaml")
    return _again(root, act)


def _again(root: Path, act: Callable[[], None]) -> float:
    os.chdir(root)
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def _serial() -> None:
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], check=True)


def _parallel(folder: Path) -> None:
    needs, changed = dvc_graph.list_stages(), dict[str, bool]()

    def bring(name: str, lease: ResourceLease, why: list[str]) -> None:
        changed[name] = bool(why) and dvc_graph.reproduce_stage(name, str) != dvc_graph.Outcome.UNCHANGED

    with ThreadPoolExecutor() as threads:
        work = StageGraph(needs, dict.fromkeys(needs, StageResources(gpus=0, exclusive=False)))
        pool = ResourcePool(SLOTS, [], folder / "locks")
        run_stages(
            work,
            dvc_graph.explain_stale(),
            pool,
            lambda *given: threads.submit(bring, *given),
            changed.get,
            dvc_graph.explain_stale,
        )


def _flow() -> None:
    subprocess.run([sys.executable, "-m", "pipeline.flows"], check=True, stderr=subprocess.DEVNULL)


def _flow_and_server() -> None:
    with serve.run_prefect_server(4390):
        _flow()


if __name__ == "__main__":
    main()
