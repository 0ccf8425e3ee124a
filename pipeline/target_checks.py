"""Check params.yaml against its target, by processes that may import transformers (4 s). They download nothing."""

from pathlib import Path

from pipeline import processes
from stages.params import checks
from stages.params.schema import Params
from stages.params.section import PARAMS_FILE


def check_target_config(params: Params, file: Path = PARAMS_FILE) -> None:
    """Raise ValueError for a target that prepare_target refuses by its config or GGUF file; `file` holds the parameters.

    Nothing is started for embedded targets, or where neither is on this machine: prepare_target then checks.
    """
    model = params.target.model
    if params.target.is_gguf and Path(model).is_file():
        processes.run_silent("stages.draft.supported_targets", file, model)
    elif not params.target.is_embedded and (config := checks.find_target_config(params)) is not None:
        processes.run_silent("stages.draft.supported_targets", file, config.parent)
