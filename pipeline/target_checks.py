"""Check params.yaml against its target, by processes that may import transformers (4 s). They download nothing."""

import os
import subprocess
import sys
from pathlib import Path

from pipeline.dvc_output import list_error_lines
from stages.params import checks
from stages.params.schema import Params
from stages.params.section import PARAMS_FILE
from stages.params.target_files import GGUF_SUFFIX


def check_target_config(params: Params, file: Path = PARAMS_FILE) -> None:
    """Raise ValueError for a target that prepare_target refuses by its config or GGUF file; `file` holds the parameters.

    Nothing is started for embedded targets, or where neither is on this machine: prepare_target then checks.
    """
    model = params.target.model
    if model.endswith(GGUF_SUFFIX) and Path(model).is_file():
        _run_check("stages.draft.supported_targets", file, Path(model))
    elif not model.startswith("builtin/") and (config := checks.find_target_config(params)) is not None:
        _run_check("stages.draft.supported_targets", file, config.parent)


def _run_check(module: str, *paths: Path) -> None:
    """Run a module that checks the parameters in a file. Raises ValueError with what it refuses."""
    command, offline = [sys.executable, "-m", module, *map(str, paths)], os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=offline)
    if done.returncode and (said := list_error_lines(done.stderr.splitlines())):
        raise ValueError("\n  ".join(map(str.strip, said)))
