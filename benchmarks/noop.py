"""What it costs to find that there is nothing to do, with 200 cells: python -m benchmarks.noop

Our own graph, with 100 trees of two checkpoints in params.yaml, whose outputs are made up and committed to DVC: none of it is
run. CPU-seconds of whole processes, each the least of three.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

REPO = Path(__file__).parents[1]
TREES = [f"t{s}_{k}_{n}" for s in (4, 5, 6, 7, 8, 9, 10, 12) for k in (2, 3, 4) for n in (6, 8, 10, 12, 14)][:100]
DVC = [sys.executable, "-m", "dvc"]
STALE = [sys.executable, "-m", "pipeline", "stale"]
FLOW = (
    "from pipeline import dvc_graph, flows; dvc_graph.repair_lock(); flows.plan_run(flows.load_params()); "
    "assert not dvc_graph.explain_stale()"
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(REPO), "DVC_SITE_CACHE_DIR": f"{folder}/site"}
        stages = make()
        found: dict[str, float] = {"stages": stages, "dvc repro": least([*DVC, "repro", "-q"])}
        found["DVC asked in process"] = least(STALE, Path(".scratch/fresh.json"))
        found["nothing has changed since"] = least(STALE)
        found["the flow's own check, with Prefect's import"] = least([sys.executable, "-c", FLOW])
    print(json.dumps({name: round(seconds, 2) for name, seconds in found.items()}, indent=2))


def make() -> int:
    """The project here, done as far as DVC can tell -> how many stages it has."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if name != "dvc.lock" and (REPO / name).is_file():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes((REPO / name).read_bytes())
    yaml = YAML()
    params = yaml.load(Path("params.yaml"))
    params["benchmark"]["trees"] = TREES
    yaml.dump(params, Path("params.yaml"))
    subprocess.run(["git", "init", "-q"], check=True)
    from dvc.repo import Repo

    with Repo() as repo:
        for out in [Path(out.fs_path) for stage in repo.index.stages for out in stage.outs]:
            file = out if out.suffix else out / "file"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"made up": str(out.name)}))
        stages = len(repo.index.stages)
    subprocess.run([*DVC, "commit", "-q", "-f"], check=True)
    return stages


def least(command: list[str], forget: Path | None = None) -> float:
    """CPU-seconds of the command, of three times, `forget` removed before each."""
    spent = []
    for _ in range(3):
        if forget:
            forget.unlink(missing_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


if __name__ == "__main__":
    main()
