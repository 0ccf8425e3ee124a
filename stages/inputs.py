"""inputs: params.yaml and the code -> for each instance of a stage a file of what it depends on besides its data.

The first stage of the graph, which always runs. Where a file comes out as it was, all that depends on it stays as it is or is
restored (stages/params/stage_inputs.py, docs/reruns.md).
"""

import shutil
from pathlib import Path

from stages.params import stage_inputs
from stages.params.schema import load_params
from stages.telemetry.run_stage import run_stage

# `report` depends on these folders, also where no stage of this params.yaml writes into them. Where one does, an empty folder
# would differ from what a clone is to fetch.
RESULT_WRITERS = {
    "cells": ("benchmark",),
    "cost": ("time_trees", "serving_costs"),
    "replay": ("replay_trees",),
    "train": ("init_draft", "import_draft", "check_overfit", "train_draft"),
}


def main() -> None:
    texts = stage_inputs.render_all(load_params(edited=True))
    shutil.rmtree(stage_inputs.INPUTS_FOLDER, ignore_errors=True)  # of stages that are gone
    stage_inputs.INPUTS_FOLDER.mkdir(parents=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    for folder, writers in RESULT_WRITERS.items():
        if not any(path.name.startswith(writers) for path in texts):
            Path("results", folder).mkdir(parents=True, exist_ok=True)
    stage_inputs.note_run()
    print(f"{len(texts) - 1} stages")


if __name__ == "__main__":
    run_stage(main)
