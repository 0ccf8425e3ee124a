"""inputs: params.yaml and the code -> for each instance of a stage a file of what it depends on besides its data.

The first stage of the graph, which always runs. Where a file comes out as it was, all that depends on it stays as it is or is
restored (stages/params/stage_inputs.py, docs/reruns.md).
"""

import re
import shutil
from pathlib import Path

from stages.params import stage_inputs
from stages.params.schema import load_params
from stages.runtime import guarded_yaml
from stages.telemetry.run_stage import run_stage

GRAPH = Path("dvc.yaml")


def main() -> None:
    params = load_params(edited=True)
    texts = stage_inputs.render_all(params)
    shutil.rmtree(stage_inputs.INPUTS_FOLDER, ignore_errors=True)  # of stages that are gone
    stage_inputs.INPUTS_FOLDER.mkdir(parents=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    stages = {instance.stage for instance in stage_inputs.list_instances(params)}
    for folder in find_empty_results(stages):
        Path(folder).mkdir(parents=True, exist_ok=True)
    stage_inputs.note_run()
    print(f"{len(texts) - 1} stages")


def find_empty_results(stages: set[str]) -> set[str]:
    """Return the folders on which `report` depends and into which none of the stages writes.

    Where one does, an empty folder would differ from what a clone is to fetch.
    """
    graph = {name: stage.get("do", stage) for name, stage in guarded_yaml.read_yaml(GRAPH)["stages"].items()}
    written = {str(out) for name in stages for out in [*graph[name]["outs"], *graph[name].get("metrics", ())]}
    folders = {dep for dep in graph["report"]["deps"] if re.fullmatch(r"results/\w+", dep)}
    return {folder for folder in folders if not any(out.startswith(f"{folder}/") for out in written)}


if __name__ == "__main__":
    run_stage(main)
