"""inputs: params.yaml and the code -> for each instance of a stage a file of what it depends on besides its data.

The first stage of the graph, which always runs. Where a file comes out as it was, all that depends on it stays as it is or is
restored (stages/params/stage_inputs.py, docs/reruns.md).
"""

import shutil
from pathlib import Path

from stages.params import stage_inputs
from stages.params.schema import load_params
from stages.telemetry.run_stage import run_stage


def main() -> None:
    texts = stage_inputs.render_all(load_params(edited=True))
    shutil.rmtree(stage_inputs.INPUTS_FOLDER, ignore_errors=True)  # of stages that are gone
    stage_inputs.INPUTS_FOLDER.mkdir(parents=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    for folder in ("cells", "cost", "replay", "train"):  # of which `report` depends, also where no stage writes into it
        Path("results", folder).mkdir(parents=True, exist_ok=True)
    stage_inputs.note_run()
    print(f"{len(texts) - 1} stages")


if __name__ == "__main__":
    run_stage(main)
